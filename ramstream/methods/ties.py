"""TIES: trim small deltas, elect a sign, average the deltas that have it.

*TIES-Merging: resolving interference when merging models*, arXiv 2306.01708, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ramstream.methods import Block, Method, Number, PerAgent
from ramstream.methods._sums import elected_sum


@dataclass(frozen=True)
class Ties(Method):
    """The mean, by w, of the trimmed deltas whose w·τ has the sign of Σ w·τ.

    Deltas of one magnitude are trimmed or kept together.
    """

    epsilon: float = 0.0
    """An element counts as changed where |delta| > epsilon, strictly; smaller deltas are not merged."""
    weight: Annotated[Number, PerAgent()] = 1.0
    """w: how much an agent counts, in the election too."""
    density: Annotated[Number, PerAgent(0, 1)] = 1.0
    """The share of an agent's elements, those with the largest |delta|, that is kept; the paper recommends 0.2."""
    normalize: bool = True
    """Whether the sum is divided by the weights that are in it, so that it is a mean."""
    scope: Literal["tensor", "model"] = "tensor"
    """Whether the share is of each tensor, as in mergekit, or of the whole model, as in the paper's code."""

    quantile: ClassVar[str] = "density"

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        pairs = zip(block.deltas, block.thresholds, strict=True)
        kept = (block.where(abs(delta) < least, 0.0, delta) for delta, least in pairs)
        return elected_sum(block, kept, self.normalize)
