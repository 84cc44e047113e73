"""One pass over units: hand out tasks, gather results, and vouch for them in an order that survives a crash."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ramstream import durable, writer
from ramstream.engine.events import Advanced, Listener, PassBegan, PassEnded
from ramstream.engine.ledgers import CountLedger, MergeLedger
from ramstream.engine.worker import Setup, UnitResult, Work, run_task
from ramstream.plan import CountPlan
from ramstream.types import ITEMSIZE

BATCH_SECONDS = 2.0
BATCH_BYTES = 1 << 30
IN_FLIGHT = 2
"""Tasks a worker at most: one it does, one that waits."""

TASK_BYTES = 64 << 20
"""A task reads about this much, so that handing it out costs nothing beside it."""


@dataclass
class Books:
    """The ledgers of a run and the results that no ledger vouches for yet.

    Order: data, fsync; then the lines that vouch for it, fsync. One round covers some seconds or some GB.
    """

    setup: Setup
    counts: CountLedger
    merges: MergeLedger | None
    listener: Listener
    durable: bool = True
    _pending: list[UnitResult] = field(default_factory=list)
    _since: float = field(default_factory=time.monotonic)

    def add(self, results: Iterable[UnitResult]) -> None:
        """Take finished units; vouch for them when enough has gathered."""
        self._pending.extend(results)
        written = sum(result.written for result in self._pending)
        if written >= BATCH_BYTES or time.monotonic() - self._since >= BATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make everything gathered durable and vouch for it."""
        results, self._pending = self._pending, []
        if results and self.durable:
            durable.sync_all(Path(result.chunk) for result in results if result.chunk)
            if self.setup.merge and self.setup.out:
                files = [file for result in results for file in result.files]
                writer.sync_files(self.setup.out, self.setup.merge.outputs, files)
        counted = [result for result in results if result.inputs is not None]
        if counted:
            self.counts.add([CountLedger.record(result) for result in counted])
        merged = [result for result in results if result.output is not None]
        if merged and self.merges is not None:
            self.merges.add([MergeLedger.record(result) for result in merged])
        if results:
            read = sum(unit_bytes(self.setup.count, result.unit) for result in results)
            self.listener(Advanced(read, len(results)))
        self._since = time.monotonic()


def unit_bytes(plan: CountPlan, unit: int) -> int:
    """Bytes that reading a unit from every checkpoint takes."""
    total = 0
    for tensor, piece in plan.pieces(unit):
        if not plan.is_grain(unit):
            sources = 1 if tensor.compare == "ignore" else len(tensor.sources)
            total += (piece.end - piece.begin) * sources
            continue
        for source in tensor.sources:
            if source is not None and source.valid > piece.begin:
                total += (min(source.valid, piece.end) - piece.begin) * ITEMSIZE[source.dtype]
    return total


def run_pass(title: str, books: Books, works: Sequence[Work], workers: int) -> None:
    """Do `works` in their order on `workers` threads, and vouch for them.

    Whatever ends the pass early, what was finished by then is vouched for.
    """
    plan = books.setup.count
    sizes = {work.unit: unit_bytes(plan, work.unit) for work in works}
    total = sum(unit_bytes(plan, unit) for unit in range(plan.units))
    books.listener(PassBegan(title, total, total - sum(sizes.values())))
    tasks = _tasks(works, sizes, workers)
    running: set[Future[list[UnitResult]]] = set()
    with ThreadPoolExecutor(workers, thread_name_prefix="ramstream") as pool:
        try:
            while True:
                for task in islice(tasks, IN_FLIGHT * workers - len(running)):
                    running.add(pool.submit(run_task, books.setup, task))
                if not running:
                    break
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    books.add(future.result())
        except BaseException:
            _abandon(books, running)
            raise
    books.flush()
    books.listener(PassEnded())


def _tasks(works: Sequence[Work], sizes: dict[int, int], workers: int) -> Iterator[list[Work]]:
    """Runs of works of about TASK_BYTES, shorter where there would not be four tasks a worker."""
    limit = min(TASK_BYTES, sum(sizes.values()) // (4 * workers))
    task: list[Work] = []
    size = 0
    for work in works:
        task.append(work)
        size += sizes[work.unit]
        if size >= limit:
            yield task
            task, size = [], 0
    if task:
        yield task


def _abandon(books: Books, running: set[Future[list[UnitResult]]]) -> None:
    """Stop: drop what has not begun, wait for what has, keep what it finished."""
    for future in running:
        future.cancel()
    for future in wait(running).done:
        if not future.cancelled() and future.exception() is None:
            books.add(future.result())
    books.flush()
