"""RAM with TIES: keep what only one agent changed, elect a sign where several did.

*Behavior Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572 (unique and shared elements), and
*TIES-Merging*, arXiv 2306.01708, algorithm 1 (`elect` and `disjoint merge`; nothing is trimmed).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ramstream.methods import Block
from ramstream.methods._sums import added, elected_sum, weighted
from ramstream.methods.ram import Ram


@dataclass(frozen=True)
class RamTies(Ram):
    """w·τ where one agent changed the element; where c ≥ 2 did, the mean, by w, of the τ with the sign of Σ w·τ."""

    rescales: ClassVar[bool] = False

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        count = added(delta != 0 for delta in block.deltas)
        alone = added(weighted(block, block.deltas))  # the others' deltas are 0
        return block.where(count == 1, alone, elected_sum(block, block.deltas, normalize=True))
