"""DARE with TIES: drop deltas at random and rescale the others, elect a sign, add the deltas that have it.

*Language models are Super Mario: absorbing abilities from homologous models as a free lunch*, arXiv 2311.03099
(equation in `dare_linear`), then `elect` and `disjoint merge` of TIES (arXiv 2306.01708, algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ramstream.methods import Block
from ramstream.methods._sums import elected_sum
from ramstream.methods.dare_linear import DareLinear


@dataclass(frozen=True)
class DareTies(DareLinear):
    """DARE's τ̂, added where w·τ̂ has the sign of Σ w·τ̂."""

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        return elected_sum(block, self.kept(block), self.normalize)
