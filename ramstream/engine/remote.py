"""What happens inside a worker of a cluster: a look around before its first task, and an fsync after each.

A dask worker is a process with some threads. What they share of a pass comes once, as a `Parcel`; each thread then
does tasks as a thread of the driver does (`tasks`).
"""

from __future__ import annotations

import os
import pickle
import platform
import socket
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import ramstream
from ramstream import memory
from ramstream.checkpoint import Checkpoint
from ramstream.engine import lending
from ramstream.engine.executors import Task
from ramstream.engine.inputs import Stats
from ramstream.engine.limits import Capacity, Limits, demand
from ramstream.engine.tasks import release, sync
from ramstream.engine.worker import Setup, UnitResult, Work
from ramstream.errors import BudgetError, CheckpointError, PlanError, RamstreamError
from ramstream.plan import CheckpointRef, CountPlan, MergePlan

_PACKAGES = ("numpy", "numba", "llvmlite", "dask", "distributed")
"""What results or pickles may depend on."""


@dataclass(frozen=True)
class Terms:
    """What every worker of a run has to meet, as the driver sees it."""

    versions: dict[str, str]
    limits: Limits
    count: CountPlan
    merge: MergePlan | None
    inputs: Stats


@dataclass(frozen=True)
class Order:
    """What workers get: once before anything is written, and once a pass."""

    terms: Terms
    setup: Setup | None = None
    folders: tuple[Path, ...] = ()
    """Where they write to."""


class Parcel:
    """An order on its way. What a process makes of it lives as long as its copy, which dask drops with the pass."""

    def __init__(self, order: Order) -> None:
        self._data = zlib.compress(pickle.dumps(order))
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._opened: tuple[Setup | None, Capacity] | None = None

    def __getstate__(self) -> bytes:
        return self._data

    def __setstate__(self, data: bytes) -> None:
        self._data = data
        self._begin()

    def open(self) -> tuple[Setup | None, Capacity]:
        """The setup with this process's devices, and what the process takes. PlanError, BudgetError and the like
        where it cannot take part.
        """
        with self._lock:
            if self._opened is None:
                order: Order = pickle.loads(zlib.decompress(self._data))
                found, setup = _looked_around(order), order.setup
                if setup is not None:
                    setup = replace(setup, devices=found.devices)
                    weakref.finalize(self, release, setup.token)
                self._opened = setup, found
            return self._opened


def same(parcel: Parcel) -> Parcel:
    """A task that has a parcel as its result: dask keeps it, hands it on, and makes it anew where it is lost."""
    return parcel


def arrive(parcel: Parcel) -> Capacity:
    """Look around, before the first task; what this process takes."""
    with _named():
        return parcel.open()[1]


def work(parcel: Parcel, task: Task, works: Sequence[Work]) -> list[UnitResult]:
    """Do a task. What it wrote is on disk on return: the driver's fsync does not cover what this host holds."""
    with _named():
        setup, _ = parcel.open()
        assert setup is not None, "there is something to do"
        results = task(setup, works)
        sync(setup, results)
        return results


@contextmanager
def _named() -> Iterator[None]:
    """Errors say where they happened."""
    where = f"worker {_worker().address} on {socket.gethostname()}"
    try:
        yield
    except RamstreamError as error:
        raise type(error)(f"{where}: {error}") from None
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({where})", error.filename) from None


def _worker() -> Any:
    from distributed import get_worker

    return get_worker()


def versions() -> dict[str, str]:
    """What has to be the same in all processes of a run."""
    found = {"ramstream": _sources(), "Python": ".".join(platform.python_version_tuple()[:2])}
    return {**found, **{name: metadata.version(name) for name in _PACKAGES}}


def _sources() -> str:
    """A name for ramstream's code: a version alone does not change with every change."""
    digest, folder = xxhash.xxh3_64(), Path(ramstream.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if "__pycache__" in path.parts:  # loops that were compiled there, not code
            continue
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return f"{metadata.version('ramstream')} with code {digest.hexdigest()[:8]}"


def _looked_around(order: Order) -> Capacity:
    terms = order.terms
    if problems := list(_other_versions(terms.versions)):
        raise PlanError(f"{', '.join(problems)}; install the same on all hosts")
    problems = [*_unseen(terms), *filter(None, map(lending.problem, order.folders))]
    if problems:
        raise PlanError(
            f"it does not see the files of this run: {'; '.join(problems)}. Inputs and output have to be under the "
            "same paths everywhere, on a file system that all hosts share"
        )
    return _room(terms)


def _other_versions(expected: dict[str, str]) -> Iterator[str]:
    for name, mine in versions().items():
        if mine != expected.get(name):
            yield f"{name} is {mine} there and {expected.get(name)} here"


def _unseen(terms: Terms) -> Iterator[str]:
    """Input files that are not there, or not the driver's: for one written at another time its content decides."""
    for checkpoint, stats in zip(terms.count.checkpoints, terms.inputs, strict=True):
        touched = False
        for path, (size, written, *_) in zip(checkpoint.paths, stats, strict=True):
            try:
                found = os.stat(path)
            except OSError as error:
                yield f"{path}: {error.strerror}"
                continue
            if found.st_size != size:
                yield f"{path} has {found.st_size} bytes, the command sees {size}"
            touched = touched or found.st_mtime_ns != written
        if touched and not _same_content(checkpoint):
            yield f"{checkpoint.label} has other content, sampled in {checkpoint.folder}"


def _same_content(checkpoint: CheckpointRef) -> bool:
    source = checkpoint.paths[0] if checkpoint.single_file else Path(checkpoint.folder)
    try:
        return Checkpoint.open(source).fingerprint() == checkpoint.fingerprint
    except CheckpointError:
        return False


def _room(terms: Terms) -> Capacity:
    """What this process takes with all its threads. BudgetError where that is more than it may."""
    worker, limits = _worker(), terms.limits
    threads, limit, budget = worker.state.nthreads, worker.memory_manager.memory_limit, limits.budget()
    if limit and limits.memory is not None and limit < budget:
        raise BudgetError(
            f"its memory limit is {memory.mebibytes(limit)} and --memory allows {memory.mebibytes(budget)}; start "
            f"it with --memory-limit {budget}, or use --memory {limit}"
        )
    found = demand(limits, threads, terms.count, terms.merge)
    if len(found.devices) < threads:
        raise BudgetError(
            f"it has {threads} threads and its devices have room for {len(found.devices)}; start it with fewer, "
            "or use --device cpu"
        )
    need = found.of(threads) + DASK
    if need > budget:
        raise BudgetError(
            f"it needs {memory.mebibytes(need)} with --nthreads {threads}, and --memory allows "
            f"{memory.mebibytes(budget)}; use --memory {-(-need >> 20)}MiB or more, or start it with fewer threads"
        )
    if limit and need > limit * (share := _share()):
        raise BudgetError(
            f"it needs {memory.mebibytes(need)} with --nthreads {threads}, more than {share:.0%} of its memory "
            f"limit of {memory.mebibytes(limit)}, where dask begins to hold it up; start it with --memory-limit "
            f"{-(-int(need / share) >> 20)}MiB or more, or with fewer threads"
        )
    return Capacity(threads, budget, need, found.devices, limits.io)


DASK = 80 << 20
"""What a dask worker holds beside what a process of ours does."""


def _share() -> float:
    """The part of its memory limit that a worker can take before dask spills, pauses or ends it."""
    import dask

    marks = (dask.config.get(f"distributed.worker.memory.{name}") for name in ("spill", "pause", "terminate"))
    return min((mark for mark in marks if mark), default=1.0)
