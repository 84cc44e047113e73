"""Ways to add up what several agents changed, for the methods to share; there is no method in this file.

`block.p["weight"]` holds a number for each of the deltas. Weights multiply deltas before anything else happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ramstream.methods import Block

SMALL = 1e-8
"""Weights whose sum is nearer to 0 than this are not divided by."""


def added(values: Iterable[Any]) -> Any:
    """Their sum, in order, from 0.0."""
    total: Any = 0.0
    for value in values:
        total = total + value
    return total


def weighted(block: Block, deltas: Iterable[Any]) -> Iterator[Any]:
    """w·τ of each agent."""
    return (weight * delta for weight, delta in zip(block.p["weight"], deltas, strict=True))


def weighted_sum(block: Block, deltas: Iterable[Any], normalize: bool) -> Any:
    """Σ w·τ, divided by Σ w where `normalize` says so and it is not 0."""
    total = added(weighted(block, deltas))
    if not normalize:
        return total
    below = added(block.p["weight"])
    return total / block.where(abs(below) < SMALL, 1.0, below)


def elected_sum(block: Block, deltas: Iterable[Any], normalize: bool) -> Any:
    """Σ w·τ over the agents whose w·τ has the sign of Σ w·τ, or is positive where that is 0.

    These are `elect` and `disjoint merge` of TIES (arXiv 2306.01708). Where `normalize` says so the sum is divided
    by the weights of these agents. A NaN has no sign and stays a NaN.
    """
    values = list(weighted(block, deltas))
    negative = added(values) < 0
    total: Any = 0.0
    below: Any = 0.0
    for value, weight in zip(values, block.p["weight"], strict=True):
        agrees = ((value < 0) == negative) & (value != 0)
        total = total + block.where(agrees, value, 0.0)
        below = below + block.where(agrees, weight, 0.0)
    return total / block.where(below == 0, 1.0, below) if normalize else total
