"""Who does the tasks of a pass: threads of this process, or the workers of a dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Protocol

from ramstream.engine.ahead import ReadAhead
from ramstream.engine.events import Listener
from ramstream.engine.limits import Capacity, Limits, capacity
from ramstream.engine.tasks import release
from ramstream.engine.worker import Setup, UnitResult, Work
from ramstream.plan import CountPlan, MergePlan

Task = Callable[[Setup, Sequence[Work]], list[UnitResult]]

IN_FLIGHT = 2
"""Tasks a worker at most: one it does, one that waits."""


class Workers(Protocol):
    """Those that a run may use."""

    def __call__(self, count: CountPlan, merge: MergePlan | None = None) -> Capacity:
        """How many of them fit a plan. BudgetError where none does."""
        ...


class Executor(Protocol):
    """Takes tasks of one pass."""

    @property
    def room(self) -> int:
        """Tasks that may be in flight now, at least one."""
        ...

    @property
    def patience(self) -> float | None:
        """Seconds after which whoever waits for a task should `watch`; None where tasks always end."""
        ...

    def submit(self, task: Task, works: Sequence[Work], flying: int) -> Future[list[UnitResult]]:
        """Have a task done; `flying` are in flight already."""
        ...

    def watch(self) -> None:
        """RamstreamError where the work cannot go on."""
        ...


@contextmanager
def connected(limits: Limits, listener: Listener) -> Iterator[Workers]:
    """The workers that `limits` speak of, for the time of a run."""
    if limits.scheduler is None:
        yield partial(capacity, limits)
        return
    from ramstream.engine.cluster import Cluster

    with closing(Cluster(limits, listener)) as cluster:
        yield cluster.capacity


@contextmanager
def executor(found: Capacity, setup: Setup) -> Iterator[Executor]:
    """Who does the tasks of one pass. Whatever has not begun by the end is dropped."""
    if found.cluster is not None:
        with found.cluster.executor(setup) as remote:
            yield remote
        return
    try:
        with (
            closing(ReadAhead(setup.count)) as ahead,
            ThreadPoolExecutor(found.workers, thread_name_prefix="ramstream") as pool,
        ):
            yield _Threads(pool, ahead, setup, IN_FLIGHT * found.workers)
    finally:
        release(setup.token)


class _Threads:
    """Threads of this process: kernels and reads release the GIL."""

    patience = None

    def __init__(self, pool: ThreadPoolExecutor, ahead: ReadAhead, setup: Setup, room: int) -> None:
        self._pool, self._ahead, self._setup, self.room = pool, ahead, setup, room

    def submit(self, task: Task, works: Sequence[Work], flying: int) -> Future[list[UnitResult]]:
        future = self._pool.submit(task, self._setup, works)
        self._ahead.announce(works, flying + 1)
        return future

    def watch(self) -> None:
        """Threads do not get lost."""
