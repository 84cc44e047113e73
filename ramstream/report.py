"""How plans, statistics and outcomes look: rich tables from plain data. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ramstream.statistics import lambda_text

View = list[RenderableType]
"""What is printed one below the other; lines of text are never cut where there is no terminal."""


def size(nbytes: float) -> str:
    """`4.2 GB`, powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def number(count: float) -> str:
    """`494 M`, for elements."""
    for unit in ("", " k", " M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.4g} G"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _table(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def stats_view(stats: dict[str, Any]) -> View:
    """`ramstream stats`: the paper's table, pairs of agents, groups, warnings."""
    parts: View = [
        Text(
            f"{stats['base']}: {number(stats['elements'])} elements in {stats['tensors']} tensors, "
            f"changed where |delta| > {stats['epsilon']:g}"
        ),
        _agents(stats),
        Text("  ".join(_count_words(stats))),
    ]
    if stats.get("pairs"):
        parts.append(_pairs(stats["pairs"]))
    if stats.get("groups"):
        parts.append(_groups(stats))
    parts += [Text(f"warning: {text}", style="yellow") for text in stats["warnings"]]
    return parts


def _agents(stats: dict[str, Any]) -> Table:
    others = [f"with {k}" for k in range(1, len(stats["agents"]))]
    table = _table("agent", "changed", "alone", *others, "ρ", "λ")
    for t, agent in enumerate(stats["agents"]):
        rho = agent["rho"]
        table.add_row(
            agent["label"],
            _percent(agent["changed_share"]),
            *(_percent(share) for share in agent["overlapping"]),
            rho if isinstance(rho, str) else f"{rho:.3f}",
            lambda_text(stats["lambda"], t),
        )
    return table


def _count_words(stats: dict[str, Any]) -> Iterator[str]:
    total = stats["elements"] or 1
    for c, n in enumerate(stats["counts"]):
        word = "unchanged" if c == 0 else "unique" if c == 1 else f"by {c} agents"
        yield f"{word} {_percent(n / total)}"


def _pairs(pairs: list[dict[str, Any]]) -> Table:
    table = _table("pair", "both changed", "against chance", "opposite signs", "cosine", title="\nTwo by two")
    for pair in pairs:
        against, cosine = pair["against_chance"], pair["cosine"]
        table.add_row(
            " + ".join(pair["agents"]),
            number(pair["both"]),
            "none" if against is None else f"{against:.2f} ×",
            _percent(pair["conflict_share"]),
            "none" if cosine is None else f"{cosine:+.3f}",
        )
    return table


def _groups(stats: dict[str, Any]) -> Table:
    labels = [agent["label"] for agent in stats["agents"]]
    table = _table("group", "elements", *labels, "shared by 2 or more", title="\nChanged, by group")
    for group in stats["groups"]:
        total = group["elements"] or 1
        table.add_row(
            group["group"],
            number(group["elements"]),
            *(_percent(agent["changed_share"]) for agent in group["agents"]),
            _percent(sum(group["counts"][2:]) / total),
        )
    return table


def plan_view(plan: dict[str, Any]) -> View:
    """`--dry-run`: what would be read, merged and written, and what it takes."""
    table = _table("", "")
    for key, value in plan.items():
        if key != "notes":
            table.add_row(key.replace("_", " "), _plan_value(key, value))
    return [table, *(Text(f"note: {note}", style="yellow") for note in plan["notes"])]


def _plan_value(key: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if key.endswith(("bytes", "memory", "disk", "read", "written", "budget", "store")) and isinstance(
        value, int
    ):
        return size(value)
    if key == "elements":
        return number(value)
    return str(value)


def outcome_view(out: str, already: bool, summary: dict[str, Any]) -> View:
    """The summary at the end of a merge."""
    stats = summary["statistics"]
    lines = [f"{out}: already complete, nothing to do" if already else _done_line(out, summary)]
    if stats["method"].get("r"):
        lines.append(f"λ moved {number(summary['moved_by_lambda'])} output elements away from plain RAM")
    for name, n in summary["overflow"].items():
        lines.append(f"warning: {n} elements of {name} are beyond the output's range")
    if summary.get("store"):
        lines.append(
            f"overlap store: {summary['store']} ({size(summary['store_size'])}); another r, alpha or method needs "
            f"one pass with it; remove it with rm -r {summary['store']}"
        )
    if summary["left_behind"]:
        lines.append(f"left behind: {', '.join(summary['left_behind'])}")
    warnings = [Text(f"warning: {text}", style="yellow") for text in stats["warnings"]]
    return [_agents(stats), Text("  ".join(_count_words(stats))), *(Text(line) for line in lines), *warnings]


def _done_line(out: str, summary: dict[str, Any]) -> str:
    peak = f", {size(summary['peak_memory'])} peak memory" if summary.get("peak_memory") else ""
    return f"{out}: {size(summary['bytes_written'])} written in {summary['seconds']:.1f} s{peak}"


def verify_view(report: dict[str, Any]) -> View:
    """What `verify` looked at and found."""
    looked = f"{report['files']} files"
    if report["bytes_read"]:
        looked += f", {size(report['bytes_read'])} of weights read"
    verdict = "ok" if report["ok"] else f"{len(report['problems'])} problems"
    return [Text(f"{report['out']}: {looked}: {verdict}"), *(Text(f"  {p}") for p in report["problems"])]
