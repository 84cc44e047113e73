"""Nothing in the page cache: against reading the inputs and writing the output with nothing in between."""

from __future__ import annotations

from collections.abc import Callable

from benchmark import caches
from benchmark.commands import merge
from benchmark.floors import Floor
from benchmark.lines import Goal, Line, at_most
from benchmark.processes import Program, seconds_of
from benchmark.setting import Bench

GOALS = {"ram": 1.0, "ram-plus": 1.25}
"""Times reading every input once and writing the output."""


def measure(bench: Bench) -> list[Line]:
    lines: list[Line] = []
    for words, before in bench.caches.states(bench.main().inputs):
        lines += _measure(bench, words, before)
    return lines


def _measure(bench: Bench, words: str, before: Callable[[], None]) -> list[Line]:
    """The lines of one state; the goals are of the first, which has no words."""
    model = bench.main()
    floor = Floor(bench, model, before, twice=True)
    ours = {method: merge(bench, method, model, before=before) for method in GOALS}
    bench.rounds(*floor.programs, *ours.values())
    raw = {**floor.raw, **seconds_of(*ours.values())}
    note = "" if caches.fit(model.nbytes) else "the inputs do not fit the page cache"

    def line(method: str, name: str, bound: float, goal: Goal | None = None) -> Line:
        return Line(f"{method} / {name}{words}", ours[method].best / bound, "x", goal, note, raw)

    goals: dict[str, Goal | None] = {method: None if words else at_most(x) for method, x in GOALS.items()}
    return [
        *(line(method, "read once and write", floor.one, goal) for method, goal in goals.items()),
        line("ram-plus", "read twice and write", floor.two),
        *(Line(f"{p.name}{words}", p.best, "s", raw=seconds_of(p)) for p in _shown(floor, ours)),
    ]


def _shown(floor: Floor, ours: dict[str, Program]) -> list[Program]:
    return [min(floor.readers, key=lambda reader: reader.best), floor.writer, *ours.values()]
