"""Task arithmetic: add up what the agents changed.

*Editing models with task arithmetic*, arXiv 2212.04089, learning by addition: θ = θ⁰ + λ · Σ w·τ; λ is `scale`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from ramstream.methods import Block, Method, Number, PerAgent
from ramstream.methods._sums import weighted_sum


@dataclass(frozen=True)
class TaskArithmetic(Method):
    """Σ w·τ; a negative w makes the merged model forget what the agent learned."""

    epsilon: float = 0.0
    """An element counts as changed where |delta| > epsilon, strictly; smaller deltas are not merged."""
    weight: Annotated[Number, PerAgent()] = 1.0
    """w: what an agent's deltas are multiplied by."""
    normalize: bool = False
    """Whether the sum is divided by Σ w."""

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        return weighted_sum(block, block.deltas, self.normalize)
