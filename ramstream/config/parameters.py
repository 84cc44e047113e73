"""Parameters of a configuration file as the texts that `methods.create` takes.

As in mergekit a model's own parameters come before those for all, and these before the method's default; in each
the first value counts whose `filter` is absent, `*` or part of the tensor's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramstream import manual
from ramstream.checkpoint.wording import shown
from ramstream.config.document import Place
from ramstream.config.problems import Problems, described, nearest
from ramstream.config.recipe import IDLE, MERGEKIT, OPTIONS, SPELLINGS
from ramstream.manual import Parameter
from ramstream.settings import EVERY, Rule, Setting

Rules = tuple[Rule, ...]

_SWITCH = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1", "1.0"), "true"),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0", "0.0"), "false"),
}


@dataclass(frozen=True)
class Given:
    """A mapping of parameters in the file, and where it stands."""

    place: Place
    values: Mapping[str, Any]


class Parameters:
    """The parameters of one method, looked up in what a file gives."""

    def __init__(self, method: str, problems: Problems, notes: list[str]) -> None:
        self._known = manual.parameters(method)
        self._method = method.strip().lower().replace("_", "-")
        self._mergekit = MERGEKIT.get(self._method)
        self._problems, self._notes = problems, notes

    def texts(self, common: Sequence[Given], models: Mapping[str, Given]) -> dict[str, str]:
        """Every parameter that is given for all models or for one of them, by its name here."""
        for_all = self.translated(common)
        own = {model: self.translated([given]) for model, given in models.items()}
        for given in own.values():
            for name, (place, _) in given.items():
                if self._known[name].kind != "by agent":
                    self._problems.add(place, "holds for all models; give it under parameters at the top")
        result = {}
        for name, parameter in self._known.items():
            place_and_value = for_all.get(name)
            if parameter.kind == "by agent":
                text = self._by_agent(parameter, place_and_value, {m: g.get(name) for m, g in own.items()})
            elif place_and_value is None:
                continue
            else:
                text = self._for_all(parameter, *place_and_value)
            if text is not None:
                result[name] = text
        return result

    def translated(self, sources: Sequence[Given]) -> dict[str, tuple[Place, Any]]:
        """Place and value by our name, with problems for names that are unknown or given twice."""
        found: dict[str, tuple[Place, Any]] = {}
        names = {SPELLINGS.get(name, name): name for name in self._known}
        for source in sources:
            for word, value in source.values.items():
                place = (*source.place, word)
                name = names.get(word, word if word in self._known else "")
                if not name:
                    self._unknown(place, word)
                elif name in found:
                    self._problems.add(place, f"is given a second time; first {_dotted(found[name][0])}")
                else:
                    found[name] = place, value
                    self._note_ignored(source, word, names)
        return found

    def _unknown(self, place: Place, word: str) -> None:
        """Parameters that only mergekit has, and those that nobody has."""
        idle = IDLE.get((self._method, word))
        if word == "int8_mask" and word in (self._mergekit or ()):
            idle = "only mergekit's use of memory depends on it"
        if idle:
            self._note(f"{word} changes nothing: {idle}")
            return
        known = [SPELLINGS.get(name, name) for name in self._known]
        known += OPTIONS if place[0] == "ramstream" else ()
        if word in (self._mergekit or ()):
            self._problems.add(
                place, f"is not done by {self._method} here; leave it out, or merge with mergekit"
            )
        else:
            self._problems.add(place, f"is no parameter of {self._method}; {nearest(word, known)}")

    def _note_ignored(self, source: Given, word: str, names: Mapping[str, str]) -> None:
        theirs = SPELLINGS.get(names.get(word, word), word)
        if self._mergekit is not None and theirs not in self._mergekit and "ramstream" not in source.place:
            self._note(f"{word} counts here; mergekit's {self._method.replace('-', '_')} ignores it")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _by_agent(
        self,
        parameter: Parameter,
        common: tuple[Place, Any] | None,
        own: Mapping[str, tuple[Place, Any] | None],
    ) -> str | None:
        """A setting with an entry for each model, or one for all where no model has its own."""
        if common is not None and _is_text(*common):
            for place in (found[0] for found in own.values() if found):
                self._problems.add(place, f"is given a second time; first {_dotted(common[0])}")
            return self._text(*common)
        default = Setting.of(parameter.default).agents[0]
        fallback = () if common is None else self._rules(*common)
        if not any(own.values()):
            self._note_gaps(parameter, dict.fromkeys(own, fallback))
            return None if common is None else str(Setting((_counting((*fallback, *default)),)))
        given = {m: (self._rules(*found) if found else ()) + fallback for m, found in own.items()}
        self._note_gaps(parameter, given)
        return str(Setting(tuple(_counting((*rules, *default)) for rules in given.values())))

    def _note_gaps(self, parameter: Parameter, given: Mapping[str, Rules]) -> None:
        """Where mergekit would stop for want of a value that has a default here."""
        if parameter.name != "weight" or "weight" not in (self._mergekit or ()):
            return
        lacking = [model for model, rules in given.items() if not any(rule.everywhere for rule in rules)]
        if lacking:
            models = ", ".join(map(shown, lacking))
            text = f"weight is not given for every tensor of {models}, where mergekit stops"
            self._note(
                f"{text}; it is {parameter.default} there, list the model with a weight to set another"
            )

    def _for_all(self, parameter: Parameter, place: Place, value: Any) -> str | None:
        """The text of a parameter that is the same for all agents."""
        if parameter.kind == "by tensor" and _is_text(place, value):
            return self._text(place, value)
        if parameter.kind == "by tensor":
            default = Setting.of(parameter.default).agents[0]
            return str(Setting((_counting((*self._rules(place, value), *default)),)))
        if isinstance(value, dict | list):
            place, value = self._plain(place, value)
            if value is None:
                return None
        if parameter.kind == "choice":
            return self._problems.choice(place, value, parameter.choices)
        if parameter.kind == "switch":
            word = _SWITCH.get(str(value).strip().lower())
            if word is None:
                self._problems.add(place, f"is {described(value)}; use true or false")
            return word
        number = self._problems.number(place, value)
        if number is None or parameter.kind == "number":
            return None if number is None else repr(number)
        if isinstance(value, int) or number.is_integer():
            return str(value if isinstance(value, int) else int(number))
        self._problems.add(place, f"is {described(value)}, not a whole number")
        return None

    def _text(self, place: Place, value: str) -> str | None:
        """A setting as `-p` takes it."""
        try:
            return str(Setting.of(value))
        except ValueError:
            self._problems.add(place, f"is {described(value)}, which is no number or setting")
            return None

    def _plain(self, place: Place, value: Any) -> tuple[Place, Any]:
        """The one value that a list or filter comes to; None with a problem where it is not one."""
        inner = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(inner, dict) and "value" in inner and inner.get("filter") in (None, EVERY, ""):
            inner = inner["value"]
            inner = inner[0] if isinstance(inner, list) and len(inner) == 1 else inner
        if isinstance(inner, dict | list) or inner is None:
            self._problems.add(place, "takes one value, no gradient and no filter")
            return place, None
        return place, inner

    def _rules(self, place: Place, value: Any) -> Rules:
        """A number, a gradient, or values with filters; nothing with a problem."""
        problems = self._problems
        if isinstance(value, dict):
            return self._condition(place, value)
        if not isinstance(value, list):
            number = problems.number(place, value)
            return () if number is None else (Rule((number,)),)
        conditions = [isinstance(item, dict) for item in value]
        if any(conditions) and not all(conditions):
            problems.add(
                place, "mixes values with filters and plain numbers; give each a filter, '*' for the rest"
            )
            return ()
        if any(conditions):
            found = [self._condition((*place, i), item) for i, item in enumerate(value)]
            return tuple(rule for rules in found for rule in rules)
        points = [problems.number((*place, i), item) for i, item in enumerate(problems.items(place, value))]
        known = tuple(point for point in points if point is not None)
        return (Rule(known),) if known else ()

    def _condition(self, place: Place, value: dict[str, Any]) -> Rules:
        parts = self._problems.mapping(place, value, ("value", "filter"))
        word = parts.get("filter", EVERY)
        if not isinstance(word, str):
            self._problems.add((*place, "filter"), f"is {described(word)}, not a string; put it in quotes")
            return ()
        inner = parts.get("value")
        if isinstance(inner, dict) or (isinstance(inner, list) and any(isinstance(i, dict) for i in inner)):
            self._problems.add((*place, "value"), "holds a filter in a filter; give a number or a gradient")
            return ()
        if inner is None:
            self._problems.add(place, "has no value")
            return ()
        return tuple(Rule(rule.points, word or EVERY) for rule in self._rules((*place, "value"), inner))


def _is_text(place: Place, value: Any) -> bool:
    """Whether a value is in the words of the command line: a string under `ramstream`."""
    return place[0] == "ramstream" and isinstance(value, str)


def _counting(rules: Rules) -> Rules:
    """The rules up to the first that is about every tensor; none after it ever counts."""
    last = next((i for i, rule in enumerate(rules) if rule.everywhere), len(rules))
    return rules[: last + 1]


def _dotted(place: Place) -> str:
    return ".".join(map(str, place))
