"""What remains of a count plan in a store or an output: enough to read its numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ramstream.plan.count import CountPlan


@dataclass(frozen=True)
class Described:
    """What a store or an output says about the model that was counted."""

    base: str
    labels: tuple[str, ...]
    epsilon: float
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    copied: tuple[tuple[str, str, int], ...]
    """Tensors in no count: name, reason, bytes."""
    notes: tuple[str, ...]
    on_nonfinite: str = "error"
    mismatches: tuple[tuple[int, str], ...] = ()
    """(agent, what) where an agent's dtype is another than the base's."""

    @property
    def elements(self) -> list[int]:
        """Elements of each merged tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @classmethod
    def of(cls, plan: CountPlan) -> Described:
        """The description of what a plan counts."""
        return cls(
            plan.checkpoints[0].label,
            tuple(plan.labels),
            plan.epsilon,
            tuple(tensor.name for tensor in plan.merged),
            tuple(tensor.shape for tensor in plan.merged),
            tuple(tensor.dtype for tensor in plan.merged),
            tuple((tensor.name, tensor.reason, tensor.nbytes) for tensor in plan.copied),
            plan.notes,
            plan.options.on_nonfinite,
            plan.mismatches,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Described:
        """The inverse of `vars`, after a trip through JSON."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        fields["shapes"] = tuple(tuple(shape) for shape in data["shapes"])
        fields["copied"] = tuple((name, reason, size) for name, reason, size in data["copied"])
        fields["mismatches"] = tuple((agent, text) for agent, text in data["mismatches"])
        return cls(**fields)
