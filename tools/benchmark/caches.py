"""The page cache before a run: left as it is, without the inputs, or empty."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DROP = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Caches:
    """How files become cold: the whole cache dropped where we may, otherwise the inputs alone."""

    drop: bool

    @classmethod
    def of(cls, how: str) -> Caches:
        """`drop`, `fadvise`, or `auto`: drop where this machine lets us."""
        may = os.access(DROP, os.W_OK)
        if how == "drop" and not may:
            raise SystemExit(f"--cold drop: {DROP} cannot be written to here")
        return cls(may and how != "fadvise")

    @property
    def how(self) -> str:
        return "drop_caches" if self.drop else "posix_fadvise of the inputs"

    def cold(self, inputs: Sequence[Path]) -> Callable[[], None]:
        """What makes `inputs` cold, and with them the interpreter and its libraries where we may."""
        return drop_all if self.drop else lambda: drop_files(inputs)

    def states(self, inputs: Sequence[Path]) -> Iterator[tuple[str, Callable[[], None]]]:
        """The state that counts, then the one in which only the inputs are cold."""
        yield "", self.cold(inputs)
        if self.drop:
            yield ", inputs alone cold", lambda: drop_files(inputs)


def drop_all() -> None:
    os.sync()
    DROP.write_text("3\n")


def drop_files(paths: Sequence[Path]) -> None:
    os.sync()  # dirty pages stay
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fit(nbytes: int) -> bool:
    """Whether so many bytes stay in the page cache while something else works."""
    return nbytes < 0.7 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
