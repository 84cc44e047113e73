"""The connection to a dask scheduler: reached in bounded time or refused, and dask's errors in our words."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ramstream.engine.events import Listener, Note
from ramstream.errors import PlanError, RamstreamError, UsageError

CONNECT = 10.0
"""Seconds in which the scheduler has to answer."""

_LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio")


@contextmanager
def connection(address: str, listener: Listener) -> Iterator[Any]:
    """dask's client of the scheduler at `address`.

    UsageError where dask.distributed is not installed, PlanError where no scheduler answers.
    """
    distributed = _distributed()
    with _quiet():
        _refuse_others(distributed, address)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            try:
                client = distributed.Client(address, timeout=CONNECT, name="ramstream", set_as_default=False)
            except Exception as error:
                raise _unreachable(address, error) from error
        for warning in found:  # of the scheduler's other versions
            listener(Note(str(warning.message)))
        try:
            yield client
        finally:
            with suppress(Exception):  # whatever is wrong with it by now
                client.close(timeout=CONNECT)


def _distributed() -> ModuleType:
    try:
        import distributed
    except ImportError as error:
        raise UsageError(
            f"--scheduler needs dask.distributed ({error}); pip install 'ramstream[distributed]'"
        ) from None
    module: ModuleType = distributed
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of dask's: what matters of them is an error or a note of ours."""
    before = [(logger, logger.level) for logger in map(logging.getLogger, _LOGGERS)]
    try:
        for logger, _ in before:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _refuse_others(distributed: ModuleType, address: str) -> None:
    """PlanError where something else than a scheduler answers, or nothing: a client might wait for it for ever."""

    async def meet() -> str:
        arguments = distributed.Security().get_connection_args("client")
        async with distributed.rpc(address, connection_args=arguments, timeout=CONNECT) as there:
            return str((await there.identity())["type"])

    def answer() -> str:
        return asyncio.run(asyncio.wait_for(meet(), CONNECT + 1))

    try:
        with ThreadPoolExecutor(1) as pool:  # whoever calls us may be in an event loop of his own
            kind = pool.submit(answer).result()
    except Exception as error:
        raise _unreachable(address, error) from error
    if kind != "Scheduler":
        raise PlanError(f"--scheduler {address} is a dask {kind.lower()}; give the address of the scheduler")


def _unreachable(address: str, error: BaseException) -> PlanError:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause) or "no answer in time"
    return PlanError(
        f"--scheduler {address}: no dask scheduler answers there ({text}); start one with `dask scheduler`, and "
        "give the address that it prints. With tls:// dask's configuration names the certificates"
    )


def lost(address: str, why: object) -> RamstreamError:
    """The error of a run whose scheduler does not answer for its tasks any more."""
    return RamstreamError(
        f"the scheduler {address} is gone, or dropped what it was given ({why}); start a cluster and run the same "
        "command again with its address, it goes on from here"
    )


def explained(error: BaseException, address: str, worker: str | None = None) -> BaseException:
    """dask's errors in our words; others are what a task raised, and stay as they are.

    `worker` is the one that was asked, None where any could answer.
    """
    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    if isinstance(error, KilledWorker):
        times = error.allowed_failures + 1
        return RamstreamError(
            f"{times} workers in a row ended while they did one task, the last was {error.last_worker.address}; "
            "their logs or the system's say why (often too little memory, or no ramstream there). What is finished "
            "is kept, the same command goes on from here"
        )
    if isinstance(error, (CancelledError, asyncio.CancelledError, CommClosedError)):
        return lost(address, getattr(error, "reason", None) or error)
    if isinstance(error, ImportError):
        which = f"worker {worker}" if worker else f"a worker of {address}"
        return PlanError(f"{which} lacks ramstream: {error}; install the same on all hosts")
    return error
