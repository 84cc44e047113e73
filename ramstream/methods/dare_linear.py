"""DARE: drop deltas at random and rescale the others, then add them up.

*Language models are Super Mario: absorbing abilities from homologous models as a free lunch*, arXiv 2311.03099:
with drop rate p = 1 − density and mᵗ ~ Bernoulli(p), δ̃ = (1 − m) ⊙ δ and δ̂ = δ̃ / (1 − p).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from ramstream.errors import UsageError
from ramstream.methods import Block, Method, Number, PerAgent
from ramstream.methods._sums import weighted_sum


@dataclass(frozen=True)
class DareLinear(Method):
    """Σ w·τ̂, where τ̂ is τ / density for a random share `density` of an agent's elements, and 0 for the others."""

    epsilon: float = 0.0
    """An element counts as changed where |delta| > epsilon, strictly; smaller deltas are not merged."""
    weight: Annotated[Number, PerAgent()] = 1.0
    """w: what an agent's deltas are multiplied by."""
    density: Annotated[Number, PerAgent(0, 1)] = 1.0
    """The share of an agent's elements that is kept; the paper's drop rate is 1 − density."""
    seed: int = 0
    """Which elements are kept follows from it, the tensor's name, the agent's place and the element's index."""
    rescale: bool = True
    """Whether kept deltas are divided by density, so that their expectation stays."""
    normalize: bool = False
    """Whether the sum is divided by the weights: here all of them, in dare-ties those that are in it."""

    random: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("seed")
        if self.seed >= 2**64:
            raise UsageError(f"{self.name()}: seed is {self.seed}; it must be less than 2**64")

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        return weighted_sum(block, self.kept(block), self.normalize)

    def kept(self, block: Block) -> Iterator[Any]:
        """τ̂ of each agent."""
        for delta, draw, density in zip(block.deltas, block.draws, block.p["density"], strict=True):
            yield block.where(draw < density, delta / density if self.rescale else delta, 0.0)
