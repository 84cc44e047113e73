"""How names that come out of files are shown in messages: never control characters, never a megabyte."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 160
_MOST_FAULTS = 50


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
    return [*lines[:most], *_more(len(lines) - most, label)]


def _more(problems: int, label: str) -> list[str]:
    return [f"{label}: has {problems:,} more problems"] if problems > 0 else []


class Problems:
    """What is wrong with a checkpoint: each of the first fifty faults once, with all tensors that have it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._names: dict[tuple[str, str], list[str]] = {}
        self._more = 0

    def add(self, file: str, what: str, *names: str) -> None:
        """`what` says what is wrong with `names` in `file`, or with the whole of it, and what to do.

        An empty `file` stands for the whole checkpoint.
        """
        if (file, what) not in self._names and len(self._names) == _MOST_FAULTS:
            self._more += 1
        else:
            self._names.setdefault((file, what), []).extend(names)

    def lines(self) -> list[str]:
        """A line for each fault, and one that says how many more there are."""
        lines = []
        for (file, what), names in self._names.items():
            where = f"{self._label}/{file}" if file else self._label
            lines.append(": ".join([where, *([listed(names)] if names else []), what]))
        return [*lines, *_more(self._more, self._label)]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
