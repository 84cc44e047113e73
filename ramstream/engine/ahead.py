"""Reading ahead: the system fetches what waiting tasks will read while the running ones compute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from threading import Thread
from typing import TYPE_CHECKING

from ramstream import durable
from ramstream.engine.limits import available_memory
from ramstream.plan import CountPlan

if TYPE_CHECKING:
    from ramstream.engine.worker import Work

MOST = 1 << 30
"""Bytes that are asked for before they are read, at most: what a fast disk gives while kernels load."""

SHARE = 8
"""No more than this part of the memory that the page cache can have."""

STEP = 1 << 17
"""Bytes asked for at once: Linux cuts longer requests to its read-ahead, usually 128 KiB, without a word."""


class ReadAhead:
    """Tells the system which bytes come next, and it reads them into the page cache.

    Its own read-ahead sees every worker jump from task to task in many files, and begins small at each of them.
    Advice only: nothing here fails, whoever reads the bytes says what is wrong with them.
    """

    def __init__(self, plan: CountPlan) -> None:
        self._plan = plan
        self._per_unit = plan.bytes_read // max(plan.units, 1) + 1
        self._most = min(MOST, available_memory() // SHARE) // self._per_unit
        """Units."""
        self._files = [durable.OpenFiles(ref.paths, os.O_RDONLY) for ref in plan.checkpoints]

    def announce(self, works: Sequence[Work], waiting: int = 0) -> None:
        """Ask for all that these works will read, unless as many tasks wait as there is room for."""
        if waiting * len(works) > self._most:
            return
        for work in works:
            for k in range(len(self._files)):
                if k not in work.unchanged:
                    self._fetch(work.unit, k)

    def announce_head(self) -> None:
        """Ask for the first units, as many as there is room for."""
        for unit in range(min(self._plan.units, self._most)):
            for k in range(len(self._files)):
                self._fetch(unit, k)

    def _fetch(self, unit: int, k: int) -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            for file, begin, end in self._plan.reads(unit, k):
                descriptor = self._files[k].get(file)
                for start in range(begin, end, STEP):
                    size = min(STEP, end - start)
                    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_WILLNEED)
        except OSError:
            pass

    def close(self) -> None:
        """Close the files."""
        for files in self._files:
            files.close()


def head_start(plan: CountPlan) -> None:
    """Begin to fetch the first units beside whatever follows: numba, zarr and the kernels take half a second."""

    def fetch() -> None:
        with closing(ReadAhead(plan)) as ahead:
            ahead.announce_head()

    Thread(target=fetch, name="ramstream-head", daemon=True).start()
