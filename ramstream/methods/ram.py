"""RAM: average what several agents changed, keep what only one changed.

*Behavior Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ramstream.methods import Block, Method, Number, PerAgent


@dataclass(frozen=True)
class Ram(Method):
    """w·τ where one agent changed the element, Σ w·τ / Σ w over the contributors where c ≥ 2 did; w = 1."""

    weight: Annotated[Number, PerAgent(0)] = 1.0
    """w: how much an agent counts among contributors, and what its unique changes are multiplied by."""

    rescales: ClassVar[bool] = True

    def merge(self, block: Block) -> Any:
        """`Method.merge`; λ scales an element that one agent alone changed."""
        total = below = count = alone = 0.0
        for delta, weight, rescale in zip(block.deltas, block.p["weight"], block.lambdas, strict=True):
            contributes = delta != 0
            total = total + weight * delta
            below = below + block.where(contributes, weight, 0.0)
            count = count + contributes
            alone = block.where(contributes, (weight * rescale) * delta, alone)
        shared = block.where(below == 0, 0.0, total / below)
        return block.where(count == 1, alone, shared)
