"""How names that come out of files are shown in messages: never control characters, never a megabyte."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 160


def shown(text: object) -> str:
    """A name or JSON value, safe for one line of a terminal; quoted, escaped and cut where it must be."""
    if isinstance(text, str):
        if 0 < len(text) <= _LONGEST and text.isprintable():
            return text
        return _cut(ascii(text[: _LONGEST + 1]))
    try:
        return _cut(repr(text))
    except (ValueError, RecursionError):  # an integer of thousands of digits; nesting
        return f"a huge {type(text).__name__}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and how many more there are."""
    text = ", ".join(shown(name) for name in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most:,} more"


def at_most(lines: Sequence[str], most: int, label: str) -> list[str]:
    """The first `most` lines about `label`, and one that says how many more there are."""
    more = len(lines) - most
    return [*lines[:most], *([f"{label}: has {more:,} more problems"] if more > 0 else [])]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
