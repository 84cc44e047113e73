"""RAM+: RAM, with each agent's unique elements rescaled by how much of its work is shared.

*Behavior Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ramstream.methods.ram import Ram

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class RamPlus(Ram):
    """RAM with λᵗ = 1 + r · clip(ρᵗ, 0, α), where ρᵗ = sharedᵗ / uniqueᵗ."""

    r: float = 0.1
    """How strongly an agent's shared work raises its λ."""
    alpha: float = 2.0
    """What ρ is clipped to."""
    ratio: Literal["unique", "changed"] = "unique"
    """The denominator of ρ; `changed` is the paper's bounded variant, RAM+s."""
    scope: Literal["model", "tensor"] = "model"
    """Whether λ is one number an agent, or one for each tensor."""

    needs_counts: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, Mapping[str, str]]] = {"ramplus-tl": {"scope": "tensor", "alpha": "0.2"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("r", "alpha")

    def coefficients(self, overlap: NDArray[np.int64]) -> NDArray[np.float64]:
        """λ (tensors, T). Where the denominator is 0, ρ is +∞ if anything is shared, otherwise 0."""
        import numpy as np

        counts = overlap if self.scope == "tensor" else overlap.sum(axis=0, keepdims=True)
        unique = counts[..., 0]
        shared = counts[..., 1:].sum(axis=-1)
        below = unique if self.ratio == "unique" else unique + shared
        rho = np.where(shared > 0, np.inf, 0.0)
        np.divide(shared, below, out=rho, where=below > 0)
        with np.errstate(over="ignore"):  # the engine refuses what is not finite
            lambdas = 1.0 + self.r * np.clip(rho, 0.0, self.alpha)
        return np.broadcast_to(lambdas, overlap.shape[:2]).copy()
