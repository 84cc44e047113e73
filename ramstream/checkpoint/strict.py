"""JSON from files of unknown origin: whatever is wrong with it becomes a ValueError with a reason."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ramstream.checkpoint.wording import shown

_KINDS = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_MOST_DIGITS = 1000
_MOST_VALUES = 4_000_000
"""Values of a text, counted by its commas and opening brackets: Python takes up to 250 bytes for one of 3 bytes."""


def parse_object(data: bytes, lenient: bool = False) -> dict[str, Any]:
    """The JSON object in `data`, UTF-8, of at most four million values.

    Strict refuses a key that occurs twice and NaN or Infinity; `lenient` takes them as Python does, for
    `config.json`, which we only look into. ValueError says what is wrong.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > _MOST_VALUES:
        raise ValueError(f"is JSON of {values:,} values, the limit is {_MOST_VALUES:,}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from None
    try:
        if lenient:
            value = json.loads(text, parse_int=_integer)
        else:
            value = json.loads(text, parse_int=_size, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("is JSON nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error.msg}, character {error.pos})") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_KINDS.get(type(value), 'number')}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"holds the key {shown(key)} twice")
        result[key] = value
    return result


def _integer(text: str) -> int:
    """Python itself stops at 4300 digits, with advice that helps no one here."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"holds an integer of {len(text):,} digits")
    return int(text)


def _size(text: str) -> int:
    """safetensors takes -0 for a fraction, Python for 0."""
    if text == "-0":
        raise ValueError("holds -0")
    return _integer(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"holds {text}, which JSON does not have")
