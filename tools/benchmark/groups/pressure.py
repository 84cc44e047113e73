"""Inputs that do not fit the page cache: a second pass that runs backwards finds some of them still there."""

from __future__ import annotations

from pathlib import Path

from benchmark.cgroup import NotPossible, limited, parent
from benchmark.commands import RAMSTREAM, forwards, merge, merge_options
from benchmark.floors import Floor
from benchmark.lines import Line, at_most, skipped
from benchmark.processes import Program, seconds_of, timed
from benchmark.setting import Bench

ROOM = 300_000_000
"""Bytes of page cache that are left at least."""
WALL = "ram-plus / read twice and write"
GOAL = at_most(1.1)


def measure(bench: Bench) -> list[Line]:
    try:
        folder = parent(bench.options.cgroup)
        limit = _limit(bench)
        with limited(folder, limit) as cgroup:
            return _measure(bench, cgroup, limit)
    except NotPossible as error:
        return [skipped(WALL, "x", GOAL, str(error))]


def _limit(bench: Bench) -> int:
    """Half the inputs, or what a merge needs and some room where that is more; NotPossible if all would fit."""
    model = bench.main()
    words = merge_options(bench, "ram-plus", model, bench.work / "planned", "--dry-run")
    needed = timed([*RAMSTREAM, *words]).printed["projected_memory_bytes"]
    limit = max(model.nbytes // 2, int(needed) + ROOM)
    if limit > 0.8 * model.nbytes:
        raise NotPossible("the inputs are too small not to fit beside what a merge needs")
    return limit


def _measure(bench: Bench, cgroup: Path, limit: int) -> list[Line]:
    model = bench.main()
    before = bench.caches.cold(model.inputs)
    floor = Floor(bench, model, before, twice=True, cgroup=cgroup)
    backward = merge(bench, "ram-plus", model, before=before, cgroup=cgroup)
    forward = forwards(bench, model, before=before, cgroup=cgroup)
    bench.rounds(*floor.programs, backward, forward)
    note = f"{model.nbytes / 1e9:.1f} GB of inputs in a cgroup of {limit / 1e9:.1f} GB"
    raw = {**floor.raw, **seconds_of(backward, forward)}
    return [
        Line(WALL, backward.best / floor.two, "x", GOAL, note, raw),
        Line("ram-plus forwards / the same", forward.best / floor.two, raw=raw),
        *_read([backward, forward]),
    ]


def _read(programs: list[Program]) -> list[Line]:
    """Bytes that came from the disk, and the share of them that the order saves."""
    raw = {program.name: [run.read for run in program.runs] for program in programs}
    backward, forward = (program.read for program in programs)
    saved = 100 * (1 - backward / forward) if forward else 0.0
    return [
        *(Line(f"disk reads, {program.name}", program.read / 1e9, "GB", raw=raw) for program in programs),
        Line("disk reads saved by going backwards", saved, "%", raw=raw),
    ]
