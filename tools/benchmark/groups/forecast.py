"""What `--dry-run` says a merge will take, against what it takes right after."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmark.commands import RAMSTREAM, merge, merge_options
from benchmark.lines import Line, at_most
from benchmark.processes import Program
from benchmark.setting import Bench

OFF = 30
"""Percent a forecast may be off."""


def measure(bench: Bench) -> list[Line]:
    cold = bench.caches.cold(bench.main().inputs)
    return [
        _line(bench, "ram-plus", "warm", lambda: None),
        _line(bench, "ram-plus", "cold", cold),
        _line(bench, "ram", "cold", cold),
    ]


def _line(bench: Bench, method: str, state: str, before: Callable[[], None]) -> Line:
    """The median over rounds: each pair is one forecast and its merge."""
    run = merge(bench, method, bench.main(), before=before)
    words = merge_options(bench, method, bench.main(), run.leftovers[0], "--dry-run")
    asked = Program("dry run", [*RAMSTREAM, *words], before=before)
    asked.leftovers = run.leftovers  # a finished output would be a forecast of nothing
    bench.rounds(asked, run)
    estimates = [float(value) for value in asked.printed("estimated_seconds")]
    off = [100 * abs(estimate / r.seconds - 1) for estimate, r in zip(estimates, run.runs, strict=True)]
    raw = {"estimated": estimates, "measured": run.seconds}
    note = f"{median(estimates):.1f} s said, {run.best:.1f} s at best"
    return Line(f"forecast of {method}, {state}, is off by", median(off), "%", at_most(OFF), note, raw)
