"""What an overlap store saves, and what writing one costs."""

from __future__ import annotations

from collections.abc import Callable

from make_checkpoint import Recipe

from benchmark.commands import child, count, merge
from benchmark.lines import Line, at_most
from benchmark.models import Model
from benchmark.processes import Program, remove, seconds_of, timed
from benchmark.setting import Bench

COSTS = {"cold": 10, "warm": 25}
"""Percent that counting into a store may take more than counting."""


def measure(bench: Bench) -> list[Line]:
    lines = [*_reused(bench), *_swept(bench), *_costs(bench, bench.main(), "scattered")]
    with bench.models.briefly(Recipe(bench.options.parameters, clustered=True)) as clustered:
        return [*lines, *_costs(bench, clustered, "clustered")]


def _reused(bench: Bench) -> list[Line]:
    """A merge with another r from a complete store, beside one that makes the store."""
    made, complete = bench.work / "made.zarr", bench.work / "complete.zarr"
    both = merge(bench, "ram-plus", bench.main(), "--store", str(made), name="two passes")
    both.leftovers.append(made)
    words = ("--store", str(complete), "-p", "r=0.2")
    one = merge(bench, "ram-plus", bench.main(), *words, name="one pass from a store")
    timed(child("library", "count", complete, *bench.main().arguments))
    try:
        bench.rounds(both, one)
    finally:
        remove([complete])
    return [Line(f"{one.name} / {both.name}", one.best / both.best, raw=seconds_of(both, one))]


def _swept(bench: Bench) -> list[Line]:
    """Bytes the engine reads for ten values of r, in units of the inputs."""
    store = bench.work / "swept.zarr"
    try:
        run = timed(child("library", "sweep", store, *bench.main().arguments))
    finally:
        remove([store])
    report = run.printed
    bench.say(f"merged with {len(report['merging'])} values of r in {run.seconds:.2f} s")
    ten, once = (value / report["inputs"] for value in (sum(report["merging"]), report["counting"]))
    return [
        Line("read by ten merges from a store / inputs", ten, "x", at_most(10), raw=report),
        Line("read to make the store / inputs", once, "x", at_most(1), raw=report),
    ]


def _costs(bench: Bench, model: Model, profile: str) -> list[Line]:
    """Seconds of `count` with a store to those without, cold and warm."""
    states: dict[str, Callable[[], None]] = {
        "cold": bench.caches.cold(model.inputs),
        "warm": lambda: None,
    }
    pairs = {state: _pair(bench, model, f"{profile}, {state}", before) for state, before in states.items()}
    for pair in pairs.values():
        bench.rounds(*pair)  # state by state: only a round that follows a warm one is warm
    lines = []
    for state, pair in pairs.items():
        seconds = {program.name: program.printed("seconds") for program in pair}
        without, kept = (min(figures) for figures in seconds.values())
        name, cost = f"cost of a store, {profile}, {state}", 100 * (kept / without - 1)
        lines.append(Line(name, cost, "%", at_most(COSTS[state]), raw=seconds))
    return lines


def _pair(bench: Bench, model: Model, words: str, before: Callable[[], None]) -> tuple[Program, Program]:
    return (
        count(bench, model, False, f"count, {words}", before),
        count(bench, model, True, f"count into a store, {words}", before),
    )
