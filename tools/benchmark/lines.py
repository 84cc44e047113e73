"""A line of the bench: what was measured, what it is to be, and whether it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HOLDS, SHORT, INFORMATION, SKIPPED = "holds", "short", "information", "skipped"

Raw = Mapping[str, Any]
"""The figures behind a line, every run's, by what they are of."""


@dataclass(frozen=True)
class Goal:
    """A bound, in the line's unit."""

    sign: Literal["<=", ">="]
    value: float

    def met(self, measured: float) -> bool:
        return measured <= self.value if self.sign == "<=" else measured >= self.value


def at_most(value: float) -> Goal:
    return Goal("<=", value)


def at_least(value: float) -> Goal:
    return Goal(">=", value)


@dataclass(frozen=True)
class Line:
    """One row of the table. `measured` is None where it was not measured; `note` says why."""

    name: str
    measured: float | None
    unit: str = "x"
    goal: Goal | None = None
    note: str = ""
    raw: Raw = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return SKIPPED
        if self.goal is None:
            return INFORMATION
        return HOLDS if self.goal.met(self.measured) else SHORT

    @property
    def ratio(self) -> float | None:
        """Measured to goal; None where there is nothing to compare, or the goal is 0."""
        if self.measured is None or self.goal is None or not self.goal.value:
            return None
        return self.measured / self.goal.value

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `goal` is None for information."""
        return {
            "line": self.name,
            "goal": f"{self.goal.sign} {self.goal.value:g}" if self.goal else None,
            "measured": self.measured,
            "unit": self.unit,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "note": self.note,
            "raw": dict(self.raw),
        }


def skipped(name: str, unit: str, goal: Goal | None, why: str) -> Line:
    return Line(name, None, unit, goal, why)


def spread(values: Sequence[float]) -> float:
    """By how many percent the largest is above the smallest."""
    return 100 * (max(values) / min(values) - 1)
