"""One file a method; the file's name is the command-line name (`ram_plus.py` is `ram-plus`).

A method is a frozen dataclass whose fields are its parameters (`-p r=0.2`). It says what happens to a block of
elements, in torch operations (`merge`), and, where it needs a number over the whole model, how the tallies of
pass 1 become coefficients of shape (tensors, T).
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ramstream.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Method(ABC):
    """What every method has: a name, a change threshold, its parameters, and the merge of a block."""

    epsilon: float = 1e-5
    """An element counts as changed where |delta| > epsilon, strictly."""

    kernel: ClassVar[str | None] = None
    """The numba core (`ramstream.kernels.host.KERNELS`) that computes the same as `merge`, or None."""

    needs_counts: ClassVar[bool] = False
    """Whether the coefficients depend on the tallies of the whole model."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{self.name()}: {field.name} is {value}; it must be a finite number")
        self._at_least_zero("epsilon")

    def _at_least_zero(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 0:
                raise UsageError(f"{self.name()}: {name} is {getattr(self, name)}; it must be 0 or more")

    @classmethod
    def name(cls) -> str:
        """The command-line name."""
        return cls.__module__.rsplit(".", 1)[-1].replace("_", "-")

    def parameters(self) -> dict[str, Any]:
        """The parameters by name, epsilon first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        return f"{self.name()} ({', '.join(f'{key}={value}' for key, value in self.parameters().items())})"

    @abstractmethod
    def merge(self, base: torch.Tensor, deltas: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        """Merge a block of n elements, in its width (float32 or float64).

        base (n,); deltas (T, n), exactly 0 where an agent is unchanged and nothing else is; coefficients (T,).
        Returns (n,). Only eager add, sub, mul, div, where: see the arithmetic rules. Elements that no agent
        changed are taken from the base afterwards, whatever is returned for them.
        """

    def coefficients(self, overlap: NDArray[np.int64]) -> NDArray[np.float64]:
        """Coefficients (tensors, T), float64, from `overlap` (tensors, T, T) of the tallies; 1 by default."""
        import numpy as np

        return np.ones(overlap.shape[:2])


def available() -> dict[str, type[Method]]:
    """Every method by its command-line name."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for value in vars(loaded).values():
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == loaded.__name__:
                found[value.name()] = value
    return found


def create(name: str, parameters: Mapping[str, str]) -> Method:
    """The method called `name` with `parameters` as the command line spells them.

    UsageError for an unknown method or parameter, or a value that does not parse.
    """
    known = available()
    if name not in known:
        raise UsageError(f"there is no method {name!r}; use one of {', '.join(sorted(known))}")
    cls = known[name]
    hints = {key: hint for key, hint in typing.get_type_hints(cls).items() if key in _names(cls)}
    values: dict[str, Any] = {}
    for key, text in parameters.items():
        if key not in hints:
            raise UsageError(f"{name} has no parameter {key!r}; it has {', '.join(_names(cls))}")
        values[key] = _parse(f"{name}: {key}", hints[key], text)
    return cls(**values)


def _names(cls: type[Method]) -> Sequence[str]:
    return [field.name for field in fields(cls)]


def _parse(what: str, hint: Any, text: str) -> Any:
    choices = typing.get_args(hint)
    if choices:
        if text not in choices:
            raise UsageError(f"{what} is {text!r}; use one of {', '.join(choices)}")
        return text
    try:
        return hint(text)
    except ValueError:
        raise UsageError(f"{what} is {text!r}, which is not a {hint.__name__}") from None
