"""The groups of lines, in the order of the table. A module is imported when its group runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from benchmark.lines import Line
from benchmark.setting import Bench

GROUPS = ("start", "warm", "methods", "cold", "pressure", "store", "kernels", "growth", "forecast", "cluster")


def measure(group: str, bench: Bench) -> list[Line]:
    """Run one group."""
    run: Callable[[Bench], list[Line]] = import_module(f"benchmark.groups.{group}").measure
    return run(bench)
