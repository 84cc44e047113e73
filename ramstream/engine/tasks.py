"""The task function: a run of units, done by the worker of the thread that it is called in.

Threads of this process call it, or those of a cluster's processes. Running a task twice writes the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count

from ramstream.engine.worker import Setup, UnitResult, Work, Worker


class _Workers:
    """The workers of one setup in this process, a thread's each; numbered, so that devices are dealt in turn."""

    def __init__(self) -> None:
        self._numbers = count()
        self._of: dict[int, Worker] = {}

    def mine(self, setup: Setup) -> Worker:
        """This thread's, made on first use."""
        thread = threading.get_ident()
        worker = self._of.get(thread)
        if worker is None:
            device = setup.devices[next(self._numbers) % len(setup.devices)]
            worker = self._of[thread] = Worker(setup, device)
        return worker

    def drop_mine(self) -> None:
        """Let go of this thread's."""
        self._of.pop(threading.get_ident(), None)


_workers: dict[str, _Workers] = {}
"""By the setup's token."""


def run_task(setup: Setup, works: Sequence[Work]) -> list[UnitResult]:
    """Do a run of units with this thread's worker, which is made on first use and kept until `release`."""
    workers = _workers.setdefault(setup.token, _Workers())
    worker = workers.mine(setup)
    try:
        return [worker.do(work) for work in works]
    except BaseException:
        workers.drop_mine()  # its kernels hold what the failed unit counted, which belongs to no other
        raise


def sync(setup: Setup, results: Sequence[UnitResult]) -> None:
    """Have what this thread's last task did on disk. OSError where any of it was lost."""
    _workers.setdefault(setup.token, _Workers()).mine(setup).sync(results)


def release(token: str) -> None:
    """Let go of all that a setup's workers hold: buffers, files, kernels."""
    _workers.pop(token, None)
