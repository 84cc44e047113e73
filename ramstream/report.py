"""How plans, statistics and outcomes look: rich tables from plain data. Nothing is computed here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ramstream.statistics import lambda_text

View = list[RenderableType]
"""What is printed one below the other; lines of text are never cut where there is no terminal."""


_MOST_COLUMNS = 4
"""Columns of overlaps with so many other agents; beyond, they are added up: a terminal has 80 characters."""

_MOST_NAMES = 8


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
        Text(_method(stats)),
    ]
    if stats.get("norms"):
        parts.append(Text(_norms(stats["norms"])))
    if stats["pairs"]:
        parts.append(_pairs(stats))
    if stats.get("groups"):
        parts.append(_groups(stats))
    parts += [Text(f"warning: {text}", style="yellow") for text in stats["warnings"]]
    return parts


def _agents(stats: dict[str, Any]) -> Table:
    agents = stats["agents"]
    columns = min(len(agents), _MOST_COLUMNS + 1)
    others = [f"with {k}" for k in range(1, columns)]
    if columns < len(agents):
        others[-1] += "+"
    rescaled = bool(stats["lambda"])
    table = _table("agent", "changed", "alone", *others, "ρ", *(["λ"] if rescaled else []))
    for t, (label, agent) in enumerate(zip(_short(agents), agents, strict=True)):
        rho, shares = agent["rho"], agent["overlapping"]
        table.add_row(
            label,
            _percent(agent["changed_share"]),
            *(_percent(share) for share in (*shares[: columns - 1], sum(shares[columns - 1 :]))),
            rho if isinstance(rho, str) else f"{rho:.3f}",
            *([lambda_text(stats["lambda"], t)] if rescaled else []),
        )
    return table


def _short(agents: Sequence[dict[str, Any]]) -> list[str]:
    """The agents' labels without the folders that all of them lie in."""
    labels = [agent["label"] for agent in agents]
    try:
        common = os.path.commonpath([os.path.dirname(label) for label in labels]) if len(labels) > 1 else ""
    except ValueError:  # absolute and relative ones
        common = ""
    return [os.path.relpath(label, common) if common else label for label in labels]


def _method(stats: dict[str, Any]) -> str:
    """The method and its parameters, whose λ is shown if it has one."""
    method = stats["method"]
    parameters = ", ".join(
        f"{key}={value}" for key, value in method.items() if key not in ("name", "epsilon")
    )
    return f"{'λ as in' if stats['lambda'] else 'method'} {method['name']}" + (
        f" ({parameters})" if parameters else ""
    )


def _count_words(stats: dict[str, Any]) -> Iterator[str]:
    total = stats["elements"] or 1
    for c, n in enumerate(stats["counts"]):
        word = "unchanged" if c == 0 else "unique" if c == 1 else f"by {c} agents"
        yield f"{word} {_percent(n / total)}"


def _norms(norms: dict[str, Any]) -> str:
    """How far the merged model went, against the agents."""
    merged, largest, mean = norms["merged"], norms["largest"], norms["mean"]
    if merged is None or not largest:
        return "norm of the merged delta: " + ("not finite" if merged is None else f"{merged:.4g}")
    against = f"{merged / largest:.2f} × the largest agent's, {merged / mean:.2f} × the agents' mean"
    return f"norm of the merged delta: {merged:.4g}, {against}"


def _pairs(stats: dict[str, Any]) -> Table:
    pairs = combinations(_short(stats["agents"]), 2)
    table = _table("pair", "both changed", "against chance", "opposite signs", "cosine", title="\nTwo by two")
    for labels, pair in zip(pairs, stats["pairs"], strict=True):
        against, cosine = pair["against_chance"], pair["cosine"]
        table.add_row(
            " + ".join(labels),
            number(pair["both"]),
            "none" if against is None else f"{against:.2f} ×",
            _percent(pair["conflict_share"]),
            "none" if cosine is None else f"{cosine:+.3f}",
        )
    return table


def _groups(stats: dict[str, Any]) -> Table:
    table = _table("group", "elements", *_short(stats["agents"]), "by 2 or more", title="\nChanged, by group")
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
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for key, value in plan.items():
        if key != "notes":
            table.add_row(key.removesuffix("_bytes").replace("_", " "), _plan_value(key, value))
    return [table, *(Text(f"note: {note}", style="yellow") for note in plan["notes"])]


def _plan_value(key: str, value: Any) -> str:
    if isinstance(value, list):
        few = ", ".join(str(item) for item in value[:_MOST_NAMES])
        return f"{few} and {len(value) - _MOST_NAMES} more" if len(value) > _MOST_NAMES else few or "none"
    if key.startswith("bytes_") or key.endswith("_bytes"):
        return size(value)
    return number(value) if key == "elements" else str(value)


def outcome_view(out: str, already: bool, summary: dict[str, Any]) -> View:
    """The summary at the end of a merge."""
    stats = summary["statistics"]
    lines = [f"{out}: already complete, nothing to do" if already else _done_line(out, summary)]
    if summary.get("inputs_touched"):
        lines.append(
            "warning: input files were touched since this merge, though what is sampled of them is the same; if "
            f"they may have changed, remove {out} and merge anew"
        )
    if stats["method"].get("r"):
        lines.append(f"λ moved {number(summary['moved_by_lambda'])} output elements away from plain RAM")
    for name, n in summary["overflow"].items():
        lines.append(f"warning: {n} elements of {name} are beyond the output's range, or not a number")
    if summary.get("store"):
        lines.append(
            f"overlap store: {summary['store']} ({size(summary['store_size'])}); another r, alpha or method needs "
            f"one pass with it; remove it with rm -r {shlex.quote(summary['store'])}"
        )
    if summary["left_behind"]:
        lines.append(f"left behind: {', '.join(summary['left_behind'])}")
    warnings = [Text(f"warning: {text}", style="yellow") for text in stats["warnings"]]
    lines.insert(1, _norms(stats["norms"]))
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
