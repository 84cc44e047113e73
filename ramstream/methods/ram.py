"""RAM: average what several agents changed, keep what only one changed.

*Behavior Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ramstream.methods import Method

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ram(Method):
    """θ⁰ + τ where one agent changed the element, θ⁰ + (Σ τ over contributors) / c where c ≥ 2 did."""

    kernel: ClassVar[str | None] = "ram"

    def merge(self, base: torch.Tensor, deltas: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """`Method.merge`; the coefficient scales an element that one agent alone changed."""
        import torch

        zero = torch.zeros_like(base)
        total, count, alone = zero, zero, zero
        for delta, coefficient in zip(deltas, coefficients, strict=True):
            contributes = delta != 0
            total = total + delta
            count = count + contributes
            alone = torch.where(contributes, coefficient * delta, alone)
        return base + torch.where(count == 1, alone, total / count)
