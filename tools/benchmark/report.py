"""All groups' lines: as JSON, taken over from an earlier bench of the same machine, and as the one table."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmark.lines import INFORMATION, Line

DIGITS = {"s": 2, "x": 2, "%": 1, "MB": 1, "GB": 2, "µs": 1}


def machine() -> dict[str, Any]:
    """What figures may not be compared across."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30), 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


@dataclass
class Report:
    """Groups by name: plain data with `date`, sizes and `lines`."""

    machine: dict[str, Any] = field(default_factory=machine)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, group: str, about: dict[str, Any], lines: list[Line]) -> None:
        self.groups[group] = {**about, "lines": [line.as_dict() for line in lines]}

    def take_over(self, path: Path) -> None:
        """The groups of an earlier bench, with their dates. SystemExit where another machine ran it."""
        earlier = json.loads(path.read_text())
        here = self.machine
        other = [f"{key} {earlier['machine'].get(key)}, here {here[key]}" for key in here
                 if earlier["machine"].get(key) != here[key]]  # fmt: skip
        if other:
            raise SystemExit(f"{path} is of another machine: {'; '.join(other)}")
        self.groups = {**earlier["groups"], **self.groups}

    def save(self, path: Path, order: tuple[str, ...]) -> None:
        groups = {group: self.groups[group] for group in order if group in self.groups}
        path.write_text(json.dumps({"machine": self.machine, "groups": groups}, indent=2) + "\n")

    def table(self, order: tuple[str, ...]) -> Table:
        """One row a line, a heading a group."""
        view = Table("line", "goal", "measured", "to goal", "verdict", "", caption=self._caption())
        for group in (name for name in order if name in self.groups):
            about = self.groups[group]
            view.add_section()
            view.add_row(f"[bold]{group}[/bold]", "", "", "", "", about_text(about))
            for line in about["lines"]:
                view.add_row(*cells(line))
        return view

    def markdown(self, order: tuple[str, ...]) -> str:
        """The same table for a README."""
        rows = ["| line | goal | measured | verdict | |", "|---|---|---|---|---|"]
        for group in (name for name in order if name in self.groups):
            about = self.groups[group]
            rows.append(f"| **{group}** | | | | {about_text(about)} |")
            for line in about["lines"]:
                name, goal, measured, _, verdict, note = cells(line)
                rows.append(f"| {name} | {goal} | {measured} | {verdict} | {note} |")
        return "\n".join([*rows, "", self._caption()])

    def _caption(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.machine.items())


def about_text(about: dict[str, Any]) -> str:
    """A group's date, size and how it was measured."""
    size = f"{about['parameters'] / 1e9:g} B"
    return f"{about['date']}, {size}, {about['rounds']} rounds, cold by {about['cold']}"


def cells(line: dict[str, Any]) -> list[str]:
    """A line's row. Goals are in the line's unit."""
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
    verdict = "" if line["verdict"] == INFORMATION else line["verdict"]
    goal = f"{line['goal']} {line['unit']}".rstrip() if line["goal"] else ""
    return [line["line"], goal, shown(line["measured"], line["unit"]), ratio, verdict, line["note"]]


def shown(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.{DIGITS.get(unit, 2)}f} {unit}".rstrip()
