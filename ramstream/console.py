"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere. It listens to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


@contextmanager
def spinner(quiet: bool) -> Iterator[Callable[[int], None]]:
    """A function that takes numbers of bytes read and shows their sum and rate on a terminal."""
    console = Console(stderr=True)
    rate = _Rate(PassBegan("reading", 0))
    if quiet or not console.is_terminal:
        yield lambda nbytes: None
        return
    with console.status("reading") as status:

        def show(nbytes: int) -> None:
            rate.read += nbytes
            status.update(f"reading: {size(rate.read)}, {rate.words()}")

        yield show


class _Rate:
    """Where one pass is, its bytes per second, and how much memory the process holds."""

    def __init__(self, event: PassBegan) -> None:
        self.title, self.units, self.done, self.read = event.title, event.units, 0, 0
        self.began = time.monotonic()

    def add(self, event: Advanced) -> None:
        self.done += event.units
        self.read += event.read

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
                self._rate = _Rate(event)
                self._task = self._bars.add_task(event.title, total=event.units, rate="")
            case Advanced() if self._task is not None:
                self._rate.add(event)
                self._bars.update(self._task, advance=event.units, rate=self._rate.words())
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
                self._rate = _Rate(event)
                self._last = time.monotonic()
            case Advanced():
                self._rate.add(event)
                if time.monotonic() - self._last >= self._seconds:
                    self._last = time.monotonic()
                    done = 100 * self._rate.done / self._rate.units
                    self._print(f"{self._rate.title}: {done:.0f} %, {self._rate.words()}")
            case PassEnded():
                self._print(f"{self._rate.title}: {size(self._rate.read)} read, {self._rate.words()}")
            case Note():
                self._print(f"note: {event.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
