"""What the methods say about themselves: what each does, and its parameters with type, default and meaning."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from ramstream import methods
from ramstream.methods import Method, PerAgent, PerTensor

Kind = Literal["by agent", "by tensor", "number", "whole number", "switch", "choice"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method."""

    name: str
    kind: Kind
    """`by agent` may differ by agent, tensor and layer, `by tensor` by the latter two; the others are one value."""
    choices: tuple[str, ...]
    """The values there are, where `kind` is `choice`."""
    least: float
    most: float
    default: str
    """As the command line spells it."""
    doc: str

    @property
    def type(self) -> str:
        """Which values it takes, in words."""
        if self.kind == "choice":
            return " or ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        room = ""
        if self.most < math.inf:
            room = f" from {self.least:g} to {self.most:g}"
        elif self.least > -math.inf:
            room = f", {self.least:g} or more"
        differs = {"by agent": "; by agent, tensor and layer", "by tensor": "; by tensor and layer"}
        whole = self.kind == "whole number"
        return f"{'whole number' if whole else 'number'}{room}{differs.get(self.kind, '')}"


def parameters(name: str) -> dict[str, Parameter]:
    """The parameters of the method called `name`, with the defaults that go with that name.

    UsageError for a name that there is not.
    """
    cls, defaults = methods.find(name)
    docs = _docs(cls)
    found = {}
    own = {field.name: _spelled(field.default) for field in fields(cls)} | dict(defaults)
    for key, hint in methods.hints(cls).items():
        mark = methods.mark_of(hint)
        least, most = (mark.least, mark.most) if mark else (-math.inf, math.inf)
        kind = _kind(hint, mark)
        choices = typing.get_args(hint) if kind == "choice" else ()
        found[key] = Parameter(key, kind, choices, least, most, own[key], docs.get(key, ""))
    return found


def describe(name: str | None = None) -> list[dict[str, Any]]:
    """Every method, or the one called `name`, as plain data. UsageError for a name that there is not."""
    known = methods.available()
    chosen = known if name is None else {methods.find(name)[0].name(): methods.find(name)[0]}
    return [
        {
            "name": key,
            "summary": _summary(cls),
            "formula": " ".join((inspect.getdoc(cls) or "").split()),
            "aliases": {alias: dict(defaults) for alias, defaults in cls.aliases.items()},
            "parameters": [
                {"name": p.name, "type": p.type, "default": p.default, "doc": p.doc}
                for p in parameters(key).values()
            ],
        }
        for key, cls in sorted(chosen.items())
    ]


def list_view(described: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each method."""
    names = [_names(method) for method in described]
    width = max(map(len, names), default=0)
    for shown, method in zip(names, described, strict=True):
        yield f"{shown:<{width}}  {method['summary']}"


def method_view(method: dict[str, Any]) -> Iterator[str]:
    """What one method does, and its parameters."""
    yield f"{_names(method)}: {method['summary']}"
    yield method["formula"]
    for alias, defaults in method["aliases"].items():
        yield f"{alias} is {method['name']} with {', '.join(f'{k}={v}' for k, v in defaults.items())}"
    for parameter in method["parameters"]:
        yield ""
        yield f"-p {parameter['name']}={parameter['default']}   ({parameter['type']})"
        if parameter["doc"]:
            yield f"    {parameter['doc']}"


def _names(method: Mapping[str, Any]) -> str:
    return ", ".join((method["name"], *method["aliases"]))


def _summary(cls: type[Method]) -> str:
    """The first line of the method's file."""
    text = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    return text.partition("\n")[0]


def _kind(hint: Any, mark: PerAgent | PerTensor | None) -> Kind:
    if mark is not None:
        return "by agent" if isinstance(mark, PerAgent) else "by tensor"
    kinds: dict[Any, Kind] = {bool: "switch", int: "whole number", float: "number"}
    return kinds.get(hint, "choice")


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _docs(cls: type[Method]) -> dict[str, str]:
    """The strings that stand below the fields of a class and of what it extends, by field."""
    found: dict[str, str] = {}
    for owner in reversed([base for base in cls.__mro__ if issubclass(base, Method)]):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        except OSError:  # made at run time
            continue
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found
