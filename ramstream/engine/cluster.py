"""The workers of a dask cluster: tasks go to its scheduler, results come back to the one driver.

The driver keeps the journals, the store and the locks. Workers see the same files under the same paths, and get
folders of the run to write to (`lending`); what happens inside them is `remote`. A worker that dies is dask's
business, which has its tasks done elsewhere: they write the same bytes once more.
"""

from __future__ import annotations

import asyncio
import itertools
import pkgutil
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from ramstream.engine import remote
from ramstream.engine.connecting import connection, explained, lost
from ramstream.engine.events import Listener, Note
from ramstream.engine.executors import IN_FLIGHT, Task
from ramstream.engine.inputs import input_stats
from ramstream.engine.lending import Lent, lend
from ramstream.engine.limits import Capacity, Limits
from ramstream.engine.worker import Setup, UnitResult, Work
from ramstream.errors import PlanError, RamstreamError, UsageError
from ramstream.plan import CountPlan, MergePlan

ABSENCE = 60.0
"""Seconds that a run waits while there is no worker at all."""

ARRIVAL = 30.0
"""Seconds that workers have to load ramstream and look around before a run begins; for a pass a fifth of it. Who
takes longer looks around before his first task."""

ANSWER = 5.0
"""Seconds in which the scheduler has to say who is there, or nothing is concluded from it."""

PATIENCE = 1.0
"""Seconds between two looks at the cluster."""


class Cluster:
    """The workers of one scheduler, for the time of a run."""

    def __init__(self, limits: Limits, listener: Listener) -> None:
        self.address, self.most, self.threads = str(limits.scheduler), limits.workers, 0
        if not re.fullmatch(r"(tcp|tls)://[^/\s]+:\d+", self.address):
            raise UsageError(f"--scheduler {self.address!r}: write tcp://HOST:PORT or tls://HOST:PORT")
        if self.most is not None:
            limits.wanted_workers()
        self._limits, self._listener = replace(limits, scheduler=None), listener
        self._client: Any = None
        self._terms: remote.Terms | None = None
        self._looked, self._alone_since = 0.0, 0.0
        self._stack = ExitStack()

    def capacity(self, count: CountPlan, merge: MergePlan | None = None) -> Capacity:
        """What the workers that are there may take together.

        PlanError where the scheduler or its workers cannot be reached or cannot take part, BudgetError where the
        memory that they have or may take is too little.
        """
        if self._client is None:
            self._client = self._stack.enter_context(connection(self.address, self._listener))
        self._wait_for_workers()
        self._terms = remote.Terms(remote.versions(), self._limits, count, merge, input_stats(count))
        # A worker that cannot import what a message is about does not survive it. This one is about names.
        self._on_each(ARRIVAL, pkgutil.resolve_name, f"{remote.__name__}:__name__")
        found = self._on_each(ARRIVAL, remote.arrive, self.send(remote.Order(self._terms)))
        if not found:
            raise PlanError(
                f"none of the workers of {self.address} answered within {ARRIVAL:.0f} s; they are stopped or busy"
            )
        workers = min(self.threads, self.most or self.threads)
        devices = tuple(itertools.chain.from_iterable(each.devices for each in found))
        budget, projected = max(each.budget for each in found), max(each.projected for each in found)
        return Capacity(workers, budget, projected, devices, self._limits.io, self)

    def _wait_for_workers(self) -> None:
        begun = time.monotonic()
        while not self._count_threads():
            if time.monotonic() - begun > ABSENCE:
                raise PlanError(
                    f"{self.address} has no workers; start some with `dask worker {self.address}`"
                )
            if not self._alone_since:
                self._alone_since = begun
                self._listener(Note(f"waiting for workers of {self.address}"))
            time.sleep(0.2)
        self._alone_since = 0.0

    def _count_threads(self) -> int:
        self.threads = sum(self._present().values())
        return self.threads

    def _present(self) -> dict[str, int]:
        """Every worker's threads by its address."""
        try:
            return dict(self._client.nthreads(callback_timeout=ANSWER))
        except OSError as error:  # TimeoutError is one
            raise lost(self.address, error) from error

    def send(self, order: remote.Order) -> Any:
        """What tasks get of an order: dask's future of a parcel, which it makes anew if all who have it die."""
        return self.call(remote.same, remote.Parcel(order), key=_key("order"))

    def call(self, function: Callable[..., Any], *arguments: Any, key: Any, **where: Any) -> Any:
        """dask's future of a call on a worker."""
        try:
            return self._client.submit(function, *arguments, key=key, pure=False, **where)
        except Exception as error:
            if self._client.status == "running":
                raise
            raise lost(self.address, error) from error

    def answer(self, call: Any) -> Future[Any]:
        """The result of one of dask's futures, which is done, as soon as it is here."""

        async def gather() -> Any:
            return (await self._client.gather([call], asynchronous=True))[0]

        return asyncio.run_coroutine_threadsafe(gather(), self._client.loop.asyncio_loop)

    def _on_each(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function gives on every worker that answers in time. An error lists all that was wrong."""
        calls = {
            address: Call(
                self, self.call(function, *arguments, key=_key("look"), workers=[address]), worker=address
            )
            for address in self._present()
        }
        done = wait(calls.values(), seconds).done
        late = [address for address, call in calls.items() if call not in done]
        for call in calls.values():
            call.cancel()
        errors = [error for call in calls.values() if call in done and (error := call.exception())]
        for error in errors:
            if not isinstance(error, RamstreamError):
                raise error
        if errors:
            raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors))))
        if late:
            self._listener(Note(f"did not answer yet, and may join later: {', '.join(late)}"))
        return [call.result() for call in done]

    @contextmanager
    def executor(self, setup: Setup) -> Iterator[_Pass]:
        """For the tasks of one pass; at the end nobody can write for it any more."""
        assert self._terms is not None, "the capacity was asked for before"
        with lend(setup) as lent:
            parcel = self.send(remote.Order(self._terms, lent.setup, lent.folders))
            tasks = _Pass(self, parcel, lent)
            try:
                self._on_each(ARRIVAL / 5, remote.arrive, parcel)
                yield tasks
            finally:
                tasks.close()

    def watch(self) -> None:
        """RamstreamError where the scheduler is gone, or there was no worker for too long."""
        if self._client.status != "running":
            raise lost(self.address, "the connection ended")
        if time.monotonic() - self._looked < PATIENCE:
            return
        with suppress(RamstreamError):  # busy or gone: tasks that are dropped will tell
            self._count_threads()
        self._looked = now = time.monotonic()
        if self.threads:
            self._alone_since = 0.0
        elif not self._alone_since:
            self._alone_since = now
            self._listener(Note(f"{self.address} has no workers left; waiting for some"))
        elif now - self._alone_since > ABSENCE:
            raise RamstreamError(
                f"{self.address} had no workers for {ABSENCE:.0f} s; start some with `dask worker {self.address}` "
                "and run the same command again, it goes on from here"
            )

    def close(self) -> None:
        """Leave the cluster as it was."""
        self._stack.close()


class Call(Future[Any]):
    """A call on the cluster as a future that `concurrent.futures.wait` knows.

    Every call waits for its answer by itself: what a worker that is stopped holds keeps nothing else up.
    """

    def __init__(
        self,
        cluster: Cluster,
        call: Any,
        take: Callable[[Any], Any] = lambda result: result,
        worker: str | None = None,
    ) -> None:
        super().__init__()
        self._cluster, self._call, self._take, self._worker = cluster, call, take, worker
        self._answer: Future[Any] | None = None
        call.add_done_callback(self._ready)

    def _ready(self, call: Any) -> None:
        """In dask's thread for callbacks, which nothing may hold up."""
        if not self.cancelled():
            self._answer = self._cluster.answer(call)
            self._answer.add_done_callback(self._done)

    def _done(self, answer: Future[Any]) -> None:
        """In dask's thread for the connection."""
        with suppress(InvalidStateError):  # cancelled meanwhile
            if answer.cancelled():
                self.set_exception(lost(self._cluster.address, "the connection ended"))
            elif error := answer.exception():
                self.set_exception(explained(error, self._cluster.address, self._worker))
            else:
                self.set_result(answer.result())
        self._call.release()

    def result(self, timeout: float | None = None) -> Any:
        """What the call gave, taken over; to be asked for once."""
        return self._take(super().result(timeout))

    def cancel(self) -> bool:
        """Forget about it; where it was begun it goes on there, to no effect."""
        if cancelled := super().cancel():
            self.set_running_or_notify_cancel()
            if self._answer is not None:
                self._answer.cancel()
            self._call.release()
        return cancelled


class _Pass:
    """Tasks of one pass on a cluster."""

    patience = PATIENCE

    def __init__(self, cluster: Cluster, parcel: Any, lent: Lent) -> None:
        self._cluster, self._parcel, self._lent = cluster, parcel, lent
        self._name, self._numbers = f"ramstream-{lent.setup.token}", itertools.count()
        self._calls: set[Call] = set()

    @property
    def room(self) -> int:
        """Two tasks a thread; where fewer threads are to be used than there are, one for each of those."""
        threads, most = self._cluster.threads, self._cluster.most
        return max(1, IN_FLIGHT * threads if most is None or most >= threads else most)

    def submit(self, task: Task, works: Sequence[Work], flying: int) -> Future[list[UnitResult]]:
        key = self._name, next(self._numbers)
        begun = self._cluster.call(remote.work, self._parcel, task, works, key=key)
        call = Call(self._cluster, begun, self._lent.take)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def watch(self) -> None:
        self._cluster.watch()

    def close(self) -> None:
        """Wait for nothing any more."""
        for call in list(self._calls):
            call.cancel()
        self._parcel.release()


def _key(what: str) -> str:
    return f"ramstream-{what}-{uuid.uuid4()}"
