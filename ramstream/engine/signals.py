"""Signals while a pass runs: noted when they arrive, acted on between two of its steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_STOPPING = (signal.SIGINT, signal.SIGTERM)

insisted: Callable[[int], object] | None = None
"""Ends the process, which is as safe as kill -9: what a second signal does where the whole process is ours.

None in somebody else's. There the former handler is called at once, but threads that hang in a read are waited for,
since they may yet write where the next run works.
"""


class Signals:
    """Ctrl-C and SIGTERM that arrived, until `act` hands them to whoever handled them before."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []

    def act(self) -> None:
        """Do what the former handler does about a signal that arrived: as a rule it raises."""
        if self._arrived:
            number, frame = self._arrived[-1]
            self._before[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))
        if len(self._arrived) > 1:  # whoever asks twice does not want to wait for a disk that hangs
            if insisted is not None:
                insisted(number)
            self._give_back()
            self.act()

    def _take(self) -> None:
        for number in _STOPPING:
            if callable(before := signal.getsignal(number)):
                self._before[number] = before
                signal.signal(number, self._note)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def held_back() -> Iterator[Signals]:
    """Signals are only noted in the block, and acted on by `Signals.act` and at its regular end.

    A handler that raises just where an executor has taken one of its locks leaves that lock taken, and the pass
    would wait for its workers for ever. Outside the main thread, which alone gets signals, nothing is changed.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    signals._take()
    try:
        yield signals
    finally:
        signals._give_back()
    signals.act()
