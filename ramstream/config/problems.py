"""What is wrong with a configuration file, gathered so that all of it is said at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ramstream.checkpoint.wording import shown
from ramstream.config.document import Document, Place
from ramstream.errors import UsageError
from ramstream.types import parse_dtype

_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def described(value: Any) -> str:
    """A value for a message; never a whole list or mapping."""
    kinds = {dict: "a mapping", list: "a list", type(None): "empty", bool: str(value).lower()}
    return kinds.get(type(value)) or shown(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean weight?`, or what there is."""
    known = list(known)
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


class Problems:
    """The problems of one file; its methods give back what is right, and None or nothing for what is not."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: list[str] = []

    def add(self, place: Place, text: str) -> None:
        """Say that something is wrong there; `text` follows the place as in `… is 5, …`."""
        self._found.append(f"{self._document.at(place)} {text}")

    def stop(self) -> None:
        """UsageError with every problem, if there is one."""
        if self._found:
            raise UsageError("\n".join(dict.fromkeys(self._found)))

    def mapping(
        self,
        place: Place,
        value: Any,
        known: Iterable[str] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The known keys of a mapping that have a value; nothing for none."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.add(place, f"is {described(value)}, not a mapping")
            return {}
        if known is None:
            return value
        for key in value:
            if key in (refused or {}) and value[key] is not None:
                self.add((*place, key), f"is refused: {(refused or {})[key]}")
            elif key not in known and key not in (refused or {}):
                self.add((*place, key), f"is unknown; {nearest(key, known)}")
        return {key: item for key, item in value.items() if key in known and item is not None}

    def items(self, place: Place, value: Any) -> list[Any]:
        """A list that is not empty."""
        if isinstance(value, list) and value:
            return value
        self.add(place, "is empty" if value == [] else f"is {described(value)}, not a list")
        return []

    def word(self, place: Place, value: Any) -> str | None:
        """A string that is not empty."""
        if isinstance(value, str) and value.strip():
            return value
        quoted = "; put it in quotes" if isinstance(value, bool | int | float) else ""
        self.add(place, f"is {described(value)}, not a name{quoted}")
        return None

    def number(self, place: Place, value: Any) -> float | None:
        """A number, or a string that is one, as YAML reads 1e-5."""
        try:
            if isinstance(value, str | bool | int | float):
                return float(value)
        except (ValueError, OverflowError):
            pass
        self.add(place, f"is {described(value)}, not a number")
        return None

    def dtype(self, place: Place, value: Any) -> str | None:
        """The name of a float dtype."""
        word = self.word(place, value)
        if word is None:
            return None
        try:
            return parse_dtype(word).name.lower()
        except UsageError:
            self.add(place, f"is {shown(word)}, not a float dtype; {nearest(word, _DTYPES)}")
            return None

    def choice(self, place: Place, value: Any, choices: Iterable[str]) -> str | None:
        """One of a few words."""
        choices = list(choices)
        if value in choices:
            return str(value)
        self.add(place, f"is {described(value)}; {nearest(str(described(value)), choices)}")
        return None
