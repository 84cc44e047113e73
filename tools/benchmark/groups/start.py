"""What is there before any weight is read: start-up, the first compilation, a question to a store."""

from __future__ import annotations

import shutil

from benchmark.commands import RAMSTREAM, merge
from benchmark.lines import Line, at_most
from benchmark.processes import Program, remove, seconds_of, timed
from benchmark.setting import Bench


def measure(bench: Bench) -> list[Line]:
    usage = Program("--help", [*RAMSTREAM, "--help"])
    small = merge(bench, "ram-plus", bench.small(), name="merge of 1 MB")
    store = bench.work / "asked.zarr"
    question = Program("stats STORE", [*RAMSTREAM, "stats", str(store)])
    first = _first(bench)
    timed([*RAMSTREAM, "stats", *bench.main().arguments, "--store", str(store), "--quiet"])
    try:
        bench.rounds(usage, small, question)
        bench.rounds(first, warm_up=False)
    finally:
        remove([store])
    goals = [(usage, 0.25), (small, 1.5), (first, 15.0), (question, 1.0)]
    return [Line(p.name, p.best, "s", at_most(goal), raw=seconds_of(p)) for p, goal in goals]


def _first(bench: Bench) -> Program:
    """A merge that finds no compiled kernel."""
    cache = bench.work / "numba-cache"

    def empty() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()

    name = "merge of 1 MB, the very first"
    environment = {"NUMBA_CACHE_DIR": str(cache)}
    program = merge(bench, "ram-plus", bench.small(), name=name, before=empty, environment=environment)
    program.leftovers.append(cache)
    return program
