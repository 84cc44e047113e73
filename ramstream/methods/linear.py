"""Linear: the weighted mean of models, the base one of them.

*Model soups: averaging weights of multiple fine-tuned models improves accuracy without increasing inference time*,
arXiv 2203.05482, the uniform soup, with weights: θ = Σ w·θᵗ / Σ w over t = 0 .. T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ramstream.errors import PlanError
from ramstream.methods import Block, Method, Number, PerAgent
from ramstream.methods._sums import added

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Linear(Method):
    """Σ w·τ / Σ w, the base's w in the denominator, which is the weighted mean of the models less the base."""

    epsilon: float = 0.0
    """An element counts as changed where |delta| > epsilon, strictly; smaller deltas are not merged."""
    weight: Annotated[Number, PerAgent()] = 1.0
    """w: the share of each model, the base's first, then the agents' in order."""
    normalize: bool = True
    """Whether weights are divided by their sum; otherwise the models are added as Σ w·θᵗ."""

    base_is_model: ClassVar[bool] = True

    @property
    def moves_unchanged(self) -> bool:
        """Without `normalize` the base itself is scaled, by Σ w."""
        return not self.normalize

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        weights = block.p["weight"]
        total = added(weight * delta for weight, delta in zip(weights[1:], block.deltas, strict=True))
        below = added(weights)
        return total / below if self.normalize else total + (below - 1.0) * block.base

    def settings(
        self, names: Sequence[str], agents: int, model: Sequence[str] = ()
    ) -> dict[str, NDArray[np.float64]]:
        """`Method.settings`; PlanError where weights that are to be normalised sum to 0, or so nearly that float32
        would make noise of it.
        """
        import numpy as np

        values = super().settings(names, agents, model)
        weights = values["weight"]
        nothing = abs(weights.sum(axis=1)) <= 1e-6 * abs(weights).sum(axis=1)
        with np.errstate(over="ignore"):
            nothing |= ~np.isfinite(weights.astype(np.float32).sum(axis=1))
        if self.normalize and nothing.any():
            at = int(nothing.argmax())
            listed = ", ".join(f"{weight:g}" for weight in weights[at])
            raise PlanError(
                f"linear: the weights of {names[at]}, {listed} (the base's first), sum to 0, or to more than "
                "float32 holds; give weights with another sum, or normalize=false"
            )
        return values
