"""One pass over units: hand out tasks, gather results, and vouch for them in an order that survives a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ramstream import durable, writer
from ramstream.engine.events import Advanced, Listener, Note, PassBegan, PassEnded
from ramstream.engine.executors import executor
from ramstream.engine.ledgers import CountLedger, MergeLedger
from ramstream.engine.limits import Capacity
from ramstream.engine.signals import held_back
from ramstream.engine.tasks import run_task
from ramstream.engine.worker import Setup, UnitResult, Work
from ramstream.kernels import jit
from ramstream.memory import HISTOGRAMS

if TYPE_CHECKING:
    from ramstream.engine.survey import SurveyLedger

BATCH_SECONDS = 2.0
BATCH_BYTES = 1 << 30
TASK_UNITS = 2
"""Units a task at most: handing one out costs nothing beside the work in it."""


@dataclass
class Books:
    """The ledgers of a run and the results that no ledger vouches for yet.

    Order: data, fsync; then the lines that vouch for it, fsync. One round covers some seconds or some GB.
    """

    setup: Setup
    counts: CountLedger | None
    """None where nothing is counted, only checksums are compared."""
    merges: MergeLedger | None
    listener: Listener
    durable: bool = True
    survey: SurveyLedger | None = None
    _pending: list[UnitResult] = field(default_factory=list)
    _failed: bool = False
    """Whether nothing more is vouched for: see `stop`."""
    _since: float = field(default_factory=time.monotonic)

    def add(self, results: Iterable[UnitResult]) -> None:
        """Take finished units; vouch for them when enough has gathered."""
        self._pending.extend(results)
        written = sum(result.written for result in self._pending)
        held = sum(result.surveyed.nbytes for result in self._pending if result.surveyed)
        due = written >= BATCH_BYTES or held >= HISTOGRAMS
        if due or time.monotonic() - self._since >= BATCH_SECONDS:
            self.flush()

    def stop(self) -> None:
        """Vouch for nothing more.

        The system reports lost data once: when a call has failed, the next fsync of the same file succeeds, whoever
        makes it, and says nothing about what was lost.
        """
        self._failed = True

    def flush(self) -> None:
        """Make everything gathered durable and vouch for it."""
        if self._failed:
            return
        results, self._pending, self._failed = self._pending, [], True
        if results and self.durable:
            durable.sync_all(Path(result.chunk) for result in results if result.chunk)
            if self.setup.merge and self.setup.out:
                files = [file for result in results for file in result.files]
                writer.sync_files(self.setup.out, self.setup.merge.outputs, files)
        self._failed = False
        counted = [result for result in results if result.counted]
        if counted and self.counts is not None:
            self.counts.add([CountLedger.line(result) for result in counted])
        if self.survey is not None:
            self.survey.vouch(self.setup.survey, results)
        merged = [result for result in results if result.output is not None]
        if merged and self.merges is not None:
            self.merges.add([MergeLedger.line(result) for result in merged])
        if results:
            self.listener(Advanced(len(results), sum(result.read for result in results)))
        self._since = time.monotonic()


def run_pass(
    title: str, books: Books, units: Sequence[int], work: Callable[[int], Work], found: Capacity
) -> None:
    """Do the `work` of `units` in their order by the workers that were `found`, and vouch for it.

    Whatever ends the pass early, what was finished by then is vouched for, unless the system had an error: what
    arrived before it and was not yet vouched for, with it or after it may be what was lost.
    """
    durable.allow_many_files()  # a few of every checkpoint for every worker
    setup = books.setup
    loop = "merging.merge" if setup.merge else f"sifting.{setup.survey}" if setup.survey else "counting.count"
    if units and not jit.compiled(loop):
        books.listener(Note("compiling the kernels first, some ten to sixty seconds; only once"))
    books.listener(PassBegan(title, len(units)))
    tasks = _tasks(units, work, found.workers)
    running: set[Future[list[UnitResult]]] = set()
    with held_back() as signals, executor(found, setup) as workers:
        try:
            while True:
                for task in islice(tasks, max(workers.room - len(running), 0)):
                    running.add(workers.submit(run_task, task, len(running)))
                if not running:
                    break
                done = wait(running, workers.patience, FIRST_COMPLETED).done
                for future in sorted(done, key=_is_lost, reverse=True):
                    running.discard(future)
                    books.add(future.result())
                workers.watch()
                signals.act()
        except BaseException as error:
            if isinstance(error, OSError):
                books.stop()
            _abandon(books, running)
            raise
        books.flush()
    books.listener(PassEnded())


def _tasks(units: Sequence[int], work: Callable[[int], Work], workers: int) -> Iterator[list[Work]]:
    """Runs of works, shorter where there would not be four tasks a worker; made when they are handed out."""
    length = max(min(TASK_UNITS, len(units) // (4 * workers)), 1)
    for begin in range(0, len(units), length):
        yield [work(unit) for unit in units[begin : begin + length]]


def _abandon(books: Books, running: set[Future[list[UnitResult]]]) -> None:
    """Stop: drop what has not begun, wait for what has, keep what it finished."""
    for future in running:
        future.cancel()
    done = [future for future in wait(running).done if not future.cancelled()]
    if any(map(_is_lost, done)):
        books.stop()
    for future in done:
        if future.exception() is None:
            books.add(future.result())
    books.flush()


def _is_lost(done: Future[list[UnitResult]]) -> bool:
    """Whether a task ended with an error of the system."""
    return isinstance(done.exception(), OSError)
