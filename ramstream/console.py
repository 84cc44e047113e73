"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere. It listens to the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ramstream.engine.events import Advanced, Event, Listener, Note, PassBegan, PassEnded, ignore
from ramstream.engine.limits import resident_memory
from ramstream.report import size

PLAIN_SECONDS = 30.0
"""Without a terminal a line is printed at most this often, beside one at the end of each pass."""


@contextmanager
def progress(quiet: bool, verbose: bool = False) -> Iterator[Listener]:
    """A listener for the time of one run; `verbose` prints a line for each batch that is on disk."""
    console = Console(stderr=True)
    if quiet:
        yield ignore
    elif console.is_terminal and not verbose:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        ) as bars:
            yield _Bars(bars)
    else:
        yield _Plain(console, 0.0 if verbose else PLAIN_SECONDS)


class _Rate:
    """Bytes per second of one pass, and how much memory the process holds."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done, self.read = total, done, 0
        self.began = time.monotonic()

    def add(self, read: int) -> None:
        self.read += read

    def words(self) -> str:
        seconds = max(time.monotonic() - self.began, 1e-9)
        held = resident_memory()
        return f"{size(self.read / seconds)}/s" + (f", {size(held)} memory" if held else "")


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case PassBegan():
                self._rate = _Rate(event.total, event.done)
                self._task = self._bars.add_task(
                    event.title, total=event.total, completed=event.done, rate=""
                )
            case Advanced() if self._task is not None:
                self._rate.add(event.read)
                self._bars.update(self._task, advance=event.read, rate=self._rate.words())
            case Note():
                self._bars.console.print(f"note: {event.text}", highlight=False, markup=False)
            case PassEnded():
                self._task = None


class _Plain:
    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._seconds = seconds
        self._last = time.monotonic()

    def __call__(self, event: Event) -> None:
        match event:
            case PassBegan():
                self._title, self._rate = event.title, _Rate(event.total, event.done)
                self._last = time.monotonic()
            case Advanced():
                self._rate.add(event.read)
                if time.monotonic() - self._last >= self._seconds:
                    self._last = time.monotonic()
                    done = 100 * (self._rate.done + self._rate.read) / max(self._rate.total, 1)
                    self._print(f"{self._title}: {done:.0f} %, {self._rate.words()}")
            case PassEnded():
                self._print(f"{self._title}: {size(self._rate.read)} read, {self._rate.words()}")
            case Note():
                self._print(f"note: {event.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
