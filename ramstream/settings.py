"""Settings: a method's parameter that may differ by agent, by tensor name and along the layers.

Written as one text, as `-p weight=...` takes it and the record keeps it:

    0.5                       one number
    0.5,0.3,0.2               one an agent
    0:0.5:1                   a gradient: from the first layer to the last, linear in between
    self_attn@0.8;mlp@0:1;0.5 the first rule whose word is part of the tensor's name counts

The forms combine: agents are separated by `,`, the rules of one agent by `;`, the points of a gradient by `:`. In a
word these signs are written as in URLs: `%2C`, `%3B`, `%3A`, and `%40` for `@`, `%25` for `%`, `%20` for a blank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ramstream.errors import PlanError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EVERY = "*"
"""The filter that every tensor's name passes."""


@dataclass(frozen=True)
class Rule:
    """A number, or the points of a gradient over the layers, for tensors whose name contains `filter`."""

    points: tuple[float, ...]
    filter: str = EVERY

    @property
    def everywhere(self) -> bool:
        """Whether the rule is about every tensor, so that no later rule counts."""
        return self.filter == EVERY

    def matches(self, name: str) -> bool:
        """Whether the rule is about a tensor."""
        return self.everywhere or self.filter in name

    def at(self, depth: float) -> float:
        """The value at a depth from 0 (first layer, and what lies outside layers) to 1 (last layer)."""
        scaled = depth * (len(self.points) - 1)
        left = int(scaled)
        right = min(left + 1, len(self.points) - 1)
        return (1 - (scaled - left)) * self.points[left] + (scaled - left) * self.points[right]

    def __str__(self) -> str:
        points = ":".join(map(repr, self.points))
        return points if self.everywhere else f"{_escaped(self.filter)}@{points}"


@dataclass(frozen=True)
class Setting:
    """The rules of every agent in order, or one list for all of them."""

    agents: tuple[tuple[Rule, ...], ...]

    @classmethod
    def of(cls, value: float | str | Setting | Sequence[float]) -> Setting:
        """A setting from a number, its text, or a number for each agent. ValueError for what is none of these."""
        if isinstance(value, Setting):
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
            return cls(tuple((Rule((float(number),)),) for number in value))
        if isinstance(value, int | float):
            return cls(((Rule((float(value),)),),))
        if not isinstance(value, str):
            raise ValueError(value)
        return cls(tuple(tuple(map(_rule, agent.split(";"))) for agent in value.split(",")))

    def unused(self, names: Sequence[str]) -> list[Rule]:
        """The rules that hold for none of these tensors: no name has their word, or earlier rules come first.

        The last rule of all may be a default that nothing is left for.
        """
        found: dict[Rule, None] = {}
        for rules in self.agents:
            first = {next((rule for rule in rules if rule.matches(name)), None) for name in names}
            found |= dict.fromkeys(rule for rule in rules if rule not in first and not rule.everywhere)
        return list(found)

    @property
    def complete(self) -> bool:
        """Whether it has a value for every tensor, whatever its name."""
        return all(any(rule.everywhere for rule in rules) for rules in self.agents)

    @property
    def plain(self) -> float | str:
        """The number where it is one, otherwise the text; `of` takes either."""
        if len(self.agents) == len(self.agents[0]) == 1 and str(self.agents[0][0]) == repr(
            self.agents[0][0].at(0)
        ):
            return self.agents[0][0].at(0)
        return str(self)

    def __str__(self) -> str:
        return ",".join(";".join(map(str, rules)) for rules in self.agents)

    def numbers(self) -> Iterator[float]:
        """Every number in it."""
        for rules in self.agents:
            for rule in rules:
                yield from rule.points

    def resolve(
        self, what: str, names: Sequence[str], agents: int, model: Sequence[str] = ()
    ) -> NDArray[np.float64]:
        """The values, float64 (tensors, agents); layers are counted in `model` too, where `names` are some of it.

        PlanError, naming `what`, where it speaks of another number of agents or no rule is about a tensor.
        """
        import numpy as np

        if len(self.agents) not in (1, agents):
            raise PlanError(
                f"{what} has {len(self.agents)} values for {agents} models; give one for all, or one for each"
            )
        rows = self.agents if len(self.agents) == agents else self.agents * agents
        result = np.empty((len(names), agents))
        deep = depths([*names, *model])[: len(names)]
        for i, (name, depth) in enumerate(zip(names, deep, strict=True)):
            for t, rules in enumerate(rows):
                found = next((rule for rule in rules if rule.matches(name)), None)
                if found is None:
                    raise PlanError(f"{what} says nothing about {name}; add a value without a filter")
                result[i, t] = found.at(depth)
        return result


def _rule(text: str) -> Rule:
    word, at, points = text.rpartition("@")
    numbers = tuple(float(point) for point in points.split(":"))
    if at and not word.strip():
        raise ValueError(text)
    return Rule(numbers, unquote(word.strip(), errors="surrogateescape") if at else EVERY)


def _escaped(word: str) -> str:
    """A filter's word as the text form holds it."""
    return "".join(
        quote(sign, safe="", errors="surrogateescape")
        if sign in ",;:@%" or sign.isspace() or not sign.isprintable()
        else sign
        for sign in word
    )


def depths(names: Sequence[str]) -> list[float]:
    """How deep each tensor lies: 0 for the first layer and what is outside layers, 1 for the last layer.

    Layers are counted apart for each stack, that is for each name up to its first number between two dots. A
    stack of one layer is as deep as a last one.
    """
    found = [re.match(r"(?P<stack>.*?)\.(?P<layer>\d+)\.", name, re.ASCII | re.DOTALL) for name in names]
    last: dict[str, int] = {}
    for match in found:
        if match:
            last[match["stack"]] = max(last.get(match["stack"], 0), int(match["layer"]))
    return [
        0.0 if match is None else int(match["layer"]) / last[match["stack"]] if last[match["stack"]] else 1.0
        for match in found
    ]


def check(what: str, setting: Setting, least: float = -math.inf, most: float = math.inf) -> None:
    """UsageError where a number of a setting is not finite, or not between `least` and `most`."""
    for number in setting.numbers():
        if not math.isfinite(number):
            raise UsageError(f"{what} is {number}; it must be a finite number")
        if not least <= number <= most:
            room = f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
            raise UsageError(f"{what} is {number:g}; it must be {room}")
