"""Regular expressions out of files of unknown origin, matched in bounded time.

PEFT takes the keys of `rank_pattern` and `alpha_pattern` as regular expressions. Python's `re` may need 2^n steps
for one of them, so it only says whether a text is one at all. Those of more than names become automata
(K. Thompson, *Regular Expression Search Algorithm*, 1968), run with one set of states at a time. What an automaton
cannot do (backreferences, looking around, flags) is refused by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_PLAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*")
_TIMES = re.compile(r"(?:([*+?])|\{(?=[\d,])(\d*)(?:(,)(\d*))?\})\??(\+?)")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)

_LONGEST = 4096
"""Letters of a key; names of tensors have no more."""
_MOST_STATES = 300_000
"""Of the automata of all keys together, what they are made from included: some 50 bytes each."""
_MOST_AUTOMATA = 1_000
_MOST_STEPS = 20_000_000
"""What all matching together may take: a step is about a letter of a name and a pattern."""
_MISS = 20
"""Steps that a new move of an automaton counts for, a state."""


class Patterns:
    """Keys in order, to find the first that matches a module's name, or its end after a dot."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS
        self._room = _MOST_STATES
        self._count = 0
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        """By length, places of the dots (each of which stands for any letter), and what is left without them."""
        self._automata: list[tuple[int, _Automaton]] = []

    def add(self, key: str) -> None:
        """One more key, by its place. ValueError says why it is none, or none that is read."""
        i, self._count = self._count, self._count + 1
        if len(key) > _LONGEST:
            raise ValueError(f"has {len(key):,} letters, the limit is {_LONGEST:,}; write it shorter")
        if _PLAIN.fullmatch(key):
            dots = tuple(at for at, letter in enumerate(key) if letter == ".")
            alike = self._plain.setdefault(len(key), {})
            if dots not in alike:
                self._grow(len(dots))
            alike.setdefault(dots, {}).setdefault(key.replace(".", ""), i)
        elif len(self._automata) < _MOST_AUTOMATA:
            self._automata.append((i, _Automaton(key, self._grow)))
        else:
            raise ValueError(f"is one regular expression more than {_MOST_AUTOMATA:,}; write fewer")

    def first(self, module: str) -> int | None:
        """The place of the first key that matches; None where none does. ValueError where it takes too long."""
        found = self._first_plain(module)
        for i, automaton in self._automata:
            if found is not None and i > found:
                break
            self._spend(len(module))
            if automaton.matches(module, self._spend):
                return i
        return found

    def _first_plain(self, module: str) -> int | None:
        starts = (0, *(at + 1 for at, letter in enumerate(module) if letter == "."))
        found = []
        for end in (module[start:] for start in starts):
            for dots, keys in self._plain.get(len(end), {}).items():
                self._spend(len(end))
                i = keys.get(_without(end, dots))
                if i is not None:
                    found.append(i)
        return min(found, default=None)

    def _grow(self, states: int) -> None:
        self._room -= states
        if self._room < 0:
            raise ValueError(
                "is too large a pattern, alone or after those before it; write fewer and smaller ones"
            )

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise ValueError("takes too long to match")


def _without(text: str, places: Sequence[int]) -> str:
    """A text without the letters at some places."""
    begins, ends = (0, *(at + 1 for at in places)), (*places, len(text))
    return "".join(text[begin:end] for begin, end in zip(begins, ends, strict=True))


@lru_cache(10_000)
def _fits(atom: str, letter: str) -> bool:
    """Whether an expression of one letter is for this one."""
    return re.fullmatch(atom, letter) is not None


_States = frozenset[int]


class _Automaton:
    """States, each with the letters it takes and the states that follow; what takes none is passed at once."""

    def __init__(self, key: str, grow: Callable[[int], None]) -> None:
        self._atoms: list[str | None] = []
        """An expression of one letter, `^` or `$` for an end of the text, None for nothing."""
        self._next: list[list[int]] = []
        self._grow = grow
        grow(len(key))  # first: parsing it takes more than it has
        self._done = self._state(None, [])
        try:
            self._start = self._build(_parsed(key), self._done)
        except RecursionError:
            raise ValueError("is a regular expression that nests too deeply; write it otherwise") from None
        self._moves: dict[tuple[_States, str], _States] = {}

    def matches(self, text: str, spend: Any) -> bool:
        """Whether the text matches, or its end after a dot. `spend` is told of work that was not done before."""
        states = self._passed({self._start}, first=True)
        for letter in text:
            move = states, letter
            if move not in self._moves:
                after = {to for at in states if self._takes(at, letter) for to in self._next[at]}
                if letter == ".":
                    after.add(self._start)
                self._moves[move] = self._passed(after)
                spend(_MISS * (len(states) + len(self._moves[move])))
            states = self._moves[move]
        return self._done in self._passed(set(states), last=True)

    def _takes(self, state: int, letter: str) -> bool:
        atom = self._atoms[state]
        return atom is not None and atom not in "^$" and _fits(atom, letter)

    def _passed(self, states: set[int], first: bool = False, last: bool = False) -> _States:
        """The states, and those reached from them without a letter."""
        found, left = set(states), list(states)
        while left:
            at = left.pop()
            atom = self._atoms[at]
            if atom is None or (atom == "^" and first) or (atom == "$" and last):
                new = [to for to in self._next[at] if to not in found]
                found.update(new)
                left += new
        return frozenset(found)

    def _state(self, atom: str | None, following: list[int]) -> int:
        self._grow(1)
        self._atoms.append(atom)
        self._next.append(following)
        return len(self._atoms) - 1

    def _build(self, node: Any, then: int) -> int:
        """The state where a part of the expression begins that goes on at `then`."""
        self._grow(1)
        match node:
            case str():
                return self._state(node, [then])
            case "all", parts:
                for part in reversed(parts):
                    then = self._build(part, then)
                return then
            case "any", parts:
                return self._state(None, [self._build(part, then) for part in parts])
            case "times", part, least, most:
                return self._repeated(part, least, most, then)
        raise AssertionError(node)

    def _repeated(self, part: Any, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._state(None, [then])
            self._next[loop].append(self._build(part, loop))
            then = loop
        else:
            for _ in range(most - least):
                then = self._state(None, [then, self._build(part, then)])
        for _ in range(least):
            then = self._build(part, then)
        return then


def _parsed(key: str) -> Any:
    """An expression as a tree: text for one letter, ("all", …), ("any", …), ("times", part, least, most)."""
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(key)
    except (re.error, OverflowError, RecursionError):
        raise ValueError("is no regular expression; correct it") from None
    node, _ = _choice(key, 0)
    return node


def _choice(key: str, at: int) -> tuple[Any, int]:
    """Alternatives up to a closing bracket or the end, and where they end."""
    branches: list[Any] = [[]]
    while at < len(key) and key[at] != ")":
        if key[at] == "|":
            branches.append([])
            at += 1
            continue
        part, at = _part(key, at)
        while times := _TIMES.match(key, at):
            if times[5]:
                raise ValueError(
                    "is a regular expression with a possessive repetition, which is not read; write it otherwise"
                )
            part, at = ("times", part, *_range(times)), times.end()
        branches[-1].append(part)
    return ("any", [("all", branch) for branch in branches]), at


def _range(times: re.Match[str]) -> tuple[int, int | None]:
    """How often at least and at most, None for ever."""
    if times[1]:
        return (1 if times[1] == "+" else 0), (1 if times[1] == "?" else None)
    least = int(times[2] or 0)
    return least, (None if times[3] and not times[4] else int(times[4] or least))


def _part(key: str, at: int) -> tuple[Any, int]:
    """A group, a class, an escape or a letter, and where it ends."""
    if group := _GROUP.match(key, at):
        node, end = _choice(key, group.end())
        return node, end + 1
    if letters := _CLASS.match(key, at):
        return letters[0], letters.end()
    if key[at] == "(":
        raise ValueError(
            f"is a regular expression with {key[at : at + 3]}, which is not read; write it otherwise"
        )
    if key[at] == "\\":
        if key[at + 1].isalnum() and key[at + 1] not in "dDsSwW":
            raise ValueError(
                f"is a regular expression with {key[at : at + 2]}, which is not read; write it otherwise"
            )
        return key[at : at + 2], at + 2
    return (key[at] if key[at] in ".^$" else re.escape(key[at])), at + 1
