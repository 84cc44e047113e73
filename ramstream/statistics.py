"""Statistics of an overlap: plain numbers from the tallies, for tables, JSON and the model card alike.

Everything here follows from the tallies of pass 1 and a method's formula for its coefficients; no checkpoint
is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ramstream.errors import UsageError
from ramstream.tallies import Tallies

if TYPE_CHECKING:
    from ramstream.methods import Method
    from ramstream.plan import Described

ALARM_SHARE = 0.9
"""Above this share of changed elements an agent is probably no RL fine-tune of this base."""

_KINDS = (
    ("expert", ("expert",)),
    ("norm", ("norm", "ln_", "layernorm")),
    ("attention", ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")),
    (
        "mlp",
        ("mlp", "ffn", "feed_forward", "gate_proj", "up_proj", "down_proj", "intermediate", "dense", "fc"),
    ),
    ("embedding", ("embed", "wte", "wpe", "lm_head", "output.weight")),
)

Overlap = NDArray[np.int64]
"""(tensors, T, T): [i, t, k] elements of tensor i that t and exactly k others changed."""


def kind_of(name: str) -> str:
    """attention, mlp, embedding, norm, expert, or other, by the words in a tensor's name."""
    lowered = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lowered for word in words)), "other")


def layer_of(name: str) -> str:
    """`layer 3` for the first number in a tensor's name, otherwise `outside layers`."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return f"layer {found.group(1)}" if found else "outside layers"


GROUPINGS: dict[str, Callable[[str], str]] = {"tensor": str, "layer": layer_of, "kind": kind_of}


def statistics(
    described: Described,
    tallies: Tallies,
    method: Method,
    by: str | None = None,
    subset: tuple[Sequence[int], Overlap] | None = None,
) -> dict[str, Any]:
    """All of `ramstream stats` as plain data.

    `subset` looks at some agents only: their indices, and their overlap recounted from the bits. `by` groups the
    tensors by `tensor`, `layer` or `kind`.
    """
    method.check_agents(len(described.labels) if subset is None else len(subset[0]))
    chosen, overlap = (range(len(described.labels)), tallies["overlap"]) if subset is None else subset
    labels = [described.labels[t] for t in chosen]
    elements = np.array(described.elements, np.int64)
    total, size = overlap.sum(axis=0), int(elements.sum())
    agents = [_agent(label, total[t], size, method) for t, label in enumerate(labels)]
    for t, agent in zip(chosen, agents, strict=True):
        agent["nonfinite"] = int(tallies["nonfinite"][:, t + 1].sum())
        agent["refused"] = int(tallies["refused"][:, t + 1].sum())
        agent["l2_norm"] = _finite(np.sqrt(tallies["l2"][:, t].sum()))
    result: dict[str, Any] = {
        "base": described.base,
        "elements": size,
        "tensors": len(described.names),
        "agents": agents,
        "counts": _counts(total, size),
        "epsilon": described.epsilon,
        "method": {"name": method.name(), **method.parameters()},
        "lambda": _lambda_rows(method.coefficients(overlap), described.names) if method.rescales else [],
        "pairs": list(_pairs(tallies, chosen, labels, size)),
        "nonfinite_in_base": int(tallies["nonfinite"][:, 0].sum()),
    }
    if subset is None:
        for agent, steps in zip(agents, tallies["steps"].sum(axis=0), strict=True):
            agent["steps"] = {"unique": steps[0].tolist(), "shared": steps[1].tolist()}
        if tallies["patterns"].size:
            result["patterns"] = _patterns(tallies["patterns"].sum(axis=0), labels)
    if by is not None:
        result["groups"] = list(_groups(described.names, elements, overlap, GROUPINGS[by], method))
    result["copied"] = [{"name": n, "reason": why, "bytes": nbytes} for n, why, nbytes in described.copied]
    found = (
        _mismatches(described, chosen, agents),
        _nonfinite(described, agents),
        _warnings(result, described),
    )
    result["warnings"] = [*described.notes, *chain(*found)]
    return result


def _agent(label: str, overlap: NDArray[np.int64], size: int, method: Method) -> dict[str, Any]:
    """One agent's row of the paper's table; shares are fractions, ρ is the one the method uses."""
    changed, unique = int(overlap.sum()), int(overlap[0])
    shared = changed - unique
    below = changed if method.parameters().get("ratio") == "changed" else unique
    return {
        "label": label,
        "changed": changed,
        "changed_share": changed / size if size else 0.0,
        "unique": unique,
        "shared": shared,
        "overlapping": [int(n) / changed if changed else 0.0 for n in overlap],
        "rho": shared / below if below else ("inf" if shared else 0.0),
    }


def _counts(overlap: NDArray[np.int64], size: int) -> list[int]:
    """Elements changed by exactly 0, 1, … T agents."""
    exactly = [int(overlap[:, k].sum()) // (k + 1) for k in range(overlap.shape[1])]
    return [size - sum(exactly), *exactly]


def lambda_text(lambdas: Any, t: int) -> str:
    """An agent's λ from the statistics, or its range where every tensor has its own."""
    if isinstance(lambdas, dict):
        values = [row[t] for row in lambdas.values()]
        return f"{min(values):.4f} to {max(values):.4f}"
    return f"{lambdas[t]:.4f}" if lambdas else "none"


def _lambda_rows(lambdas: NDArray[np.float64], names: Sequence[str]) -> Any:
    """One row where all tensors share λ, otherwise a row a tensor. UsageError where one is not finite."""
    if not np.isfinite(lambdas).all():
        raise UsageError("λ is not a finite number with these parameters; use smaller ones")
    if len(lambdas) == 0 or (lambdas == lambdas[0]).all():
        return lambdas[0].tolist() if len(lambdas) else []
    return {name: row.tolist() for name, row in zip(names, lambdas, strict=True)}


def _pairs(
    tallies: Tallies, chosen: Sequence[int], labels: Sequence[str], size: int
) -> Iterator[dict[str, Any]]:
    """Overlap against chance, sign conflicts and the cosine of the deltas, for each two agents."""
    pairs, conflicts, dots = (tallies[name].sum(axis=0) for name in ("pairs", "sign_conflicts", "dots"))
    for i, s in enumerate(chosen):
        for j in range(i + 1, len(chosen)):
            t = chosen[j]
            both, chance = int(pairs[s, t]), int(pairs[s, s]) * int(pairs[t, t]) / max(size, 1)
            with np.errstate(all="ignore"):
                norm = np.sqrt(dots[s, s]) * np.sqrt(dots[t, t])
                cosine = dots[s, t] / norm
            same = both == pairs[s, s] == pairs[t, t] and dots[s, t] == dots[s, s] == dots[t, t]
            yield {
                "agents": [labels[i], labels[j]],
                "both": both,
                "both_by_chance": chance,
                "against_chance": both / chance if chance else None,
                "sign_conflicts": int(conflicts[s, t]),
                "conflict_share": int(conflicts[s, t]) / both if both else 0.0,
                "cosine": _finite(cosine),
                "identical": bool(same and both),
            }


def _patterns(patterns: NDArray[np.int64], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Elements by exact set of contributors, the unchanged ones first."""
    return [
        {"agents": [label for t, label in enumerate(labels) if pattern >> t & 1], "elements": int(n)}
        for pattern, n in enumerate(patterns)
    ]


def _groups(
    names: Sequence[str],
    elements: NDArray[np.int64],
    overlap: Overlap,
    group_of: Callable[[str], str],
    method: Method,
) -> Iterator[dict[str, Any]]:
    members: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(group_of(name), []).append(i)
    for group, indices in members.items():
        size, total = int(elements[indices].sum()), overlap[indices].sum(axis=0)
        yield {
            "group": group,
            "tensors": len(indices),
            "elements": size,
            "agents": [_agent("", row, size, method) for row in total],
            "counts": _counts(total, size),
        }


def norms(agents: Sequence[dict[str, Any]], merged: float) -> dict[str, float | None]:
    """L2 norms over changed elements: of the merged delta, to six digits, the largest agent's and the agents' mean.

    RAM keeps what only one agent changed undiluted, so that the merged norm grows with the number of agents.
    """
    found = [agent["l2_norm"] for agent in agents]
    known = bool(found) and None not in found
    return {
        "merged": float(f"{merged:.6g}") if np.isfinite(merged) else None,
        "largest": max(found) if known else None,
        "mean": sum(found) / len(found) if known else None,
    }


def _finite(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _mismatches(described: Described, chosen: Sequence[int], agents: list[dict[str, Any]]) -> Iterator[str]:
    """The alarm about agents of another dtype, with the share of changes it comes with."""
    for agent, text in described.mismatches:
        if agent in chosen:
            share = agents[chosen.index(agent)]["changed_share"]
            yield f"{text}; {100 * share:.1f} % of its elements count as changed"


def _nonfinite(described: Described, agents: list[dict[str, Any]]) -> Iterator[str]:
    """How many NaN and Inf were left out or merged."""
    fate = {"base": "left as the base has them", "keep": "merged"}.get(described.on_nonfinite)
    for agent in agents:
        if agent["refused"] and fate:
            yield f"{agent['label']}: {agent['refused']} NaN or Inf where the base differs were {fate}"


def _warnings(result: dict[str, Any], described: Described) -> Iterator[str]:
    """What a reader should know before trusting the numbers."""
    agents = result["agents"]
    for agent in agents:
        if agent["changed_share"] > ALARM_SHARE:
            yield (
                f"{agent['label']} changed {100 * agent['changed_share']:.1f} % of the elements: "
                "it is probably not an RL fine-tune, or not one of this base"
            )
        if not agent["changed"]:
            yield f"{agent['label']} changed no merged element by more than {described.epsilon:g}"
    for pair in result["pairs"]:
        if pair["identical"]:
            yield f"{pair['agents'][0]} and {pair['agents'][1]} are identical in every merged element"
    if agents and not any(agent["changed"] for agent in agents):
        yield "nothing changed at all: a merge equals the base"
    if "BF16" in described.dtypes:
        least = min((value - 1 for value in _flat(result["lambda"]) if value > 1), default=None)
        if least is not None:
            yield (
                f"in bf16 output the smallest λ, {1 + least:.6g}, shows only where an agent alone moved an element "
                f"by {int(np.ceil(0.5 / least))} steps of bf16 or more"
            )


def _flat(lambdas: Any) -> Iterator[float]:
    rows = lambdas.values() if isinstance(lambdas, dict) else [lambdas]
    for row in rows:
        yield from row
