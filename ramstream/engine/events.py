"""What the engine tells whoever listens; it never prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PassBegan:
    """A pass over the inputs begins, with so many units of work left in it."""

    title: str
    units: int


@dataclass(frozen=True)
class Advanced:
    """`units` more units, `read` bytes of input, were worked through and are vouched for."""

    units: int
    read: int


@dataclass(frozen=True)
class PassEnded:
    """The pass is complete."""


@dataclass(frozen=True)
class Note:
    """Something the user should know."""

    text: str


Event = PassBegan | Advanced | PassEnded | Note
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener of those who do not care."""
