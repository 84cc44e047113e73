"""Inputs in the page cache: against plain numpy, against mergekit, and in a small budget."""

from __future__ import annotations

import shutil

from make_checkpoint import Recipe

from benchmark.commands import merge, mergekit, plain
from benchmark.lines import Line, at_least, at_most, skipped
from benchmark.processes import Program, seconds_of, take_turns
from benchmark.setting import Bench

BUDGET = 512
"""MB allowed to a merge whose largest tensor is larger."""
LARGEST, WITH_LARGEST = 10**9, 600_000_000
"""Bytes of that tensor, and elements of its model."""
PEERS = (("ramplus_tl", "ram-plus", 18), ("ram", "ram", 25))
"""mergekit's method, ours, and how many times faster ours is to be."""


def measure(bench: Bench) -> list[Line]:
    model, options = bench.main(), bench.options
    numpy = plain(bench, model)
    ours = {method: merge(bench, method, model) for method in ("ram-plus", "ram")}
    peers: dict[str, Program] = {}
    if options.peers and shutil.which(options.mergekit):
        peers = {method: mergekit(bench, method, model) for method, *_ in PEERS}
    bench.rounds(numpy, *ours.values(), *peers.values())
    return [*_alone(numpy, ours), *_beside(ours, peers, _why(options.peers)), _small_budget(bench)]


def _why(asked: bool) -> str:
    return "mergekit is not installed here; use --mergekit" if asked else "needs --peers"


def _alone(numpy: Program, ours: dict[str, Program]) -> list[Line]:
    raw = seconds_of(numpy, *ours.values())
    peak = max(program.peak for program in ours.values()) / 1e6
    peaks = {program.name: [run.peak for run in program.runs] for program in ours.values()}
    projected = {program.name: program.printed("projected_memory") for program in ours.values()}
    return [
        Line("ram-plus / plain numpy", ours["ram-plus"].best / numpy.best, "x", at_most(3.5), raw=raw),
        Line("ram / plain numpy", ours["ram"].best / numpy.best, raw=raw),
        *(Line(program.name, program.best, "s", raw=raw) for program in (numpy, *ours.values())),
        Line("peak memory", peak, "MB", at_most(400), raw={"peak": peaks, "projected": projected}),
    ]


def _beside(ours: dict[str, Program], peers: dict[str, Program], why: str) -> list[Line]:
    """mergekit's seconds and bytes to ours."""
    memory, lines = "peak memory, mergekit / ramstream", []
    for theirs, method, goal in PEERS:
        name = f"mergekit {theirs} / {method}"
        if theirs not in peers:
            lines.append(skipped(name, "x", at_least(goal), why))
            continue
        ratio, raw = peers[theirs].best / ours[method].best, seconds_of(peers[theirs], ours[method])
        lines.append(Line(name, ratio, "x", at_least(goal), raw=raw))
    if not peers:
        return [*lines, skipped(memory, "x", at_least(40), why)]
    programs = [*peers.values(), *ours.values()]
    raw_peaks = {program.name: [run.peak for run in program.runs] for program in programs}
    ratio = max(p.peak for p in peers.values()) / max(p.peak for p in ours.values())
    return [*lines, Line(memory, ratio, "x", at_least(40), raw={"peak": raw_peaks})]


def _small_budget(bench: Bench) -> Line:
    """A model whose largest tensor is about twice the budget, at full size."""
    scale = bench.options.scale
    recipe = Recipe(round(WITH_LARGEST * scale), largest=round(LARGEST * scale))
    with bench.models.briefly(recipe) as model:
        program = merge(bench, "ram-plus", model, "--memory", f"{BUDGET}MB", name="small budget")
        take_turns([program], 1, bench.say, warm_up=False)
    raw = {**seconds_of(program), "peak": [program.peak], "projected": program.printed("projected_memory")}
    note = f"largest tensor {recipe.largest / 1e6:,.0f} MB"
    return Line(f"peak with --memory {BUDGET}MB", program.peak / 1e6, "MB", at_most(BUDGET), note, raw)
