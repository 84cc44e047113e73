"""One file a method; the file's name is the command-line name (`ram_plus.py` is `ram-plus`).

A method is a frozen dataclass whose fields are its parameters (`-p r=0.2`). Its `merge` says once, in arithmetic
operators, what happens to a block of elements; from that come the loops that run on the CPU and the operations on a
GPU. Where it needs numbers over whole tensors or the whole model it says so in its class variables.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import pkgutil
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ramstream.errors import UsageError
from ramstream.settings import Setting, check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Number = float | str | Setting | Sequence[float]
"""A number, one for each agent, or the text of a setting by agent, tensor and layer (`ramstream.settings`)."""


@dataclass(frozen=True)
class PerAgent:
    """Marks a parameter that each agent has its own value of, and its range."""

    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True)
class PerTensor:
    """Marks a parameter that may differ by tensor but not by agent, and its range."""

    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True)
class Block:
    """What `Method.merge` is handed: a block of n elements and the numbers that hold for it.

    base, deltas and draws stand for arrays (n,), all others for one number. They know `+ - * /`, `abs`,
    comparisons, and for what a comparison gives `& | ~`; a method must not ask for their truth.
    """

    base: Any
    deltas: Sequence[Any]
    """T of them, exactly 0 where an agent is unchanged and nowhere else."""
    draws: Sequence[Any]
    """With `Method.random`, for each agent uniform numbers in [0, 1), each the same however work is cut."""
    lambdas: Sequence[Any]
    """T of them: `Method.coefficients`."""
    thresholds: Sequence[Any]
    """With `Method.quantile`, T magnitudes: the least that an agent keeps."""
    p: Mapping[str, Any]
    """Parameters by name: one number, or T of them (T + 1 with `Method.base_is_model`, base first) for PerAgent."""
    where: Callable[[Any, Any, Any], Any]
    """where(condition, a, b), element by element."""


@dataclass(frozen=True)
class Method(ABC):
    """What every method has: a name, a change threshold, its parameters, and the merge of a block."""

    epsilon: float = 1e-5
    """An element counts as changed where |delta| > epsilon, strictly."""
    scale: Annotated[Number, PerTensor()] = 1.0
    """What the merged delta is multiplied by before it is added to the base."""
    max_norm: Literal["none", "largest", "mean"] = "none"
    """The L2 norm of the merged delta is at most that of the largest agent's, or the mean of the agents'."""
    norm_scope: Literal["model", "tensor"] = "model"
    """Whether `max_norm` is about the whole model or each tensor."""

    rescales: ClassVar[bool] = False
    """Whether `merge` uses λ."""
    needs_counts: ClassVar[bool] = False
    """Whether the coefficients depend on the tallies of the whole model."""
    random: ClassVar[bool] = False
    """Whether `merge` uses random draws; then there is a parameter `seed`."""
    quantile: ClassVar[str] = ""
    """The PerAgent parameter that says which share of an agent's largest deltas it keeps; then there is a parameter
    `scope`, `tensor` or `model`, that says among which elements."""
    base_is_model: ClassVar[bool] = False
    """Whether the base is one of the models that are merged: PerAgent parameters have its value first."""
    aliases: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Other names, in the command line's spelling, and the defaults that go with each."""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value, mark = getattr(self, name), mark_of(hint)
            if mark is not None:
                try:
                    setting = Setting.of(value)
                except ValueError:
                    raise UsageError(
                        f"{self.name()}: {name} is {value!r}, which is no number or setting"
                    ) from None
                if isinstance(mark, PerTensor) and len(setting.agents) > 1:
                    raise UsageError(f"{self.name()}: {name} is {value!r}; it cannot differ by agent")
                check(f"{self.name()}: {name}", setting, mark.least, mark.most)
                object.__setattr__(self, name, setting)
            else:
                self._check_plain(name, hint, value)
        self._at_least("epsilon")

    def _check_plain(self, name: str, hint: Any, value: Any) -> None:
        """UsageError where a value is none of its type; from the command line it always is."""
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        kinds: dict[Any, Any] = {bool: bool, int: int, float: int | float}
        right = value in choices if choices else isinstance(value, kinds.get(hint, object))
        if not right or (isinstance(value, bool) and hint is not bool):
            known = f"one of {', '.join(choices)}" if choices else f"a {getattr(hint, '__name__', hint)}"
            raise UsageError(f"{self.name()}: {name} is {value!r}; it must be {known}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{self.name()}: {name} is {value}; it must be a finite number")

    def _at_least(self, *names: str, least: float = 0) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise UsageError(
                    f"{self.name()}: {name} is {getattr(self, name)}; it must be {least:g} or more"
                )

    @classmethod
    def name(cls) -> str:
        """The command-line name."""
        return cls.__module__.rsplit(".", 1)[-1].replace("_", "-")

    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as plain data, epsilon first."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value.plain if isinstance(value, Setting) else value for key, value in values.items()}

    def __str__(self) -> str:
        return f"{self.name()} ({', '.join(f'{key}={value}' for key, value in self.parameters().items())})"

    @abstractmethod
    def merge(self, block: Block) -> Any:
        """The merged delta (n,) of a block; `base + scale · delta` becomes the output.

        Elements that no agent changed are taken from the base, whatever is returned for them (`moves_unchanged`).
        """

    @property
    def moves_unchanged(self) -> bool:
        """Whether elements that no agent changed are merged too, rather than taken from the base."""
        return False

    def check_agents(self, agents: int) -> None:  # noqa: B027
        """UsageError where the parameters do not fit so many agents."""

    def coefficients(self, overlap: NDArray[np.int64]) -> NDArray[np.float64]:
        """λ (tensors, T), float64, from `overlap` (tensors, T, T) of the tallies; 1 by default."""
        import numpy as np

        return np.ones(overlap.shape[:2])

    def settings(
        self, names: Sequence[str], agents: int, model: Sequence[str] = ()
    ) -> dict[str, NDArray[np.float64]]:
        """The parameters that `merge` finds in `Block.p`, float64 (tensors, values).

        `model` are the names of all tensors of the model, where `names` are some of them: layers are counted in it.
        PlanError where a parameter does not fit.
        """
        import numpy as np

        result = {}
        for name, values in self.numeric(agents).items():
            value = getattr(self, name)
            if isinstance(value, Setting):
                result[name] = value.resolve(f"{self.name()}: {name}", names, values or 1, model)
            else:
                result[name] = np.full((len(names), 1), value)
        return result

    def numeric(self, agents: int) -> dict[str, int | None]:
        """The parameters that `merge` finds in `Block.p`, with the number of their values; None for one number."""
        result: dict[str, int | None] = {}
        for name, hint in hints(type(self)).items():
            mark = mark_of(hint)
            if isinstance(mark, PerAgent):
                result[name] = agents + self.base_is_model
            elif mark is not None or (hint is float and name != "epsilon"):
                result[name] = None
        return result


def hints(cls: type[Method]) -> dict[str, Any]:
    """The types of the parameters by name, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def mark_of(hint: Any) -> PerAgent | PerTensor | None:
    """What marks a parameter's type as differing by agent or tensor, None where it is one number for all."""
    found = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, PerAgent | PerTensor)]
    return found[0] if found else None


def available() -> dict[str, type[Method]]:
    """Every method by its command-line name."""
    found: dict[str, type[Method]] = {}
    for module in pkgutil.iter_modules(__path__):
        try:
            loaded = importlib.import_module(f"{__name__}.{module.name}")
        except Exception as error:  # a method of the user's own
            raise UsageError(
                f"the method file {module.name}.py cannot be loaded: {error!r}; mend it"
            ) from error
        for value in vars(loaded).values():
            here = isinstance(value, type) and value.__module__ == loaded.__name__
            if here and issubclass(value, Method) and not inspect.isabstract(value):
                if value.name() in found:
                    raise UsageError(
                        f"the method file {module.name}.py has two methods; give each its own file"
                    )
                found[value.name()] = value
    return found


def find(name: str) -> tuple[type[Method], Mapping[str, str]]:
    """The method called `name`, or by another spelling of it, and the defaults that go with that name.

    UsageError for a name that there is not, with the nearest.
    """
    known: dict[str, tuple[type[Method], Mapping[str, str]]] = {}
    for cls in available().values():
        known |= {cls.name(): (cls, {})} | {alias: (cls, defaults) for alias, defaults in cls.aliases.items()}
    word = name.strip().lower().replace("_", "-")
    if word not in known:
        near = difflib.get_close_matches(word, known, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no method {name!r}; {meant}use one of {', '.join(sorted(known))}")
    return known[word]


def create(name: str, parameters: Mapping[str, str]) -> Method:
    """The method called `name` with `parameters` as the command line spells them.

    UsageError for an unknown method or parameter, or a value that does not parse.
    """
    cls, defaults = find(name)
    known = hints(cls)
    values: dict[str, Any] = {}
    for key, text in {**defaults, **parameters}.items():
        if key not in known:
            near = ["scale"] if key == "lambda" else difflib.get_close_matches(key, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{cls.name()} has no parameter {key!r}; {meant}it has {', '.join(known)}")
        values[key] = _parse(f"{cls.name()}: {key}", known[key], text)
    return cls(**values)


def _parse(what: str, hint: Any, text: str) -> Any:
    if mark_of(hint) is not None:
        return text
    choices = typing.get_args(hint) or (("true", "false") if hint is bool else ())
    if choices:
        word = text.lower() if hint is bool else text
        if word not in choices:
            raise UsageError(f"{what} is {text!r}; use one of {', '.join(choices)}")
        return word == "true" if hint is bool else word
    try:
        return hint(text)
    except ValueError:
        kind = "whole number" if hint is int else "number"
        raise UsageError(f"{what} is {text!r}, which is not a {kind}") from None
