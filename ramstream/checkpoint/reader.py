"""Two ways to read byte ranges of a checkpoint's files: a mapping, or pread into a buffer; same bytes.

A reader belongs to one worker. What `read` returns is read-only and valid until the next `read`, `release` or
`close`. Memory of a reader: one buffer as long as the longest range asked so far (the mapped one only for
ranges whose offset in the file does not fit the alignment), and for the mapped one the pages of the last range
and `memory.MAPPED_SLACK`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramstream.durable import OpenFiles
from ramstream.errors import CheckpointError, IntegrityError, UsageError
from ramstream.memory import FOLIO

Bytes = NDArray[np.uint8]

BUFFER_ALIGNMENT = 64
"""Buffers begin on a multiple of this; the largest alignment that may be asked."""


class Reader(Protocol):
    """Hands out byte ranges of the files it was made for, by their index."""

    def read(self, file: int, offset: int, nbytes: int, alignment: int) -> Bytes:
        """Exactly `nbytes` bytes, read-only, at an address that is a multiple of `alignment` (1, 2, .. 64).

        IntegrityError where the file ends too early, CheckpointError where it cannot be read.
        """
        ...

    def release(self) -> None:
        """Give the memory of the last range back to the system, as far as it is not reused."""
        ...

    def close(self) -> None:
        """Close all files; a later read opens them anew."""
        ...


def open_reader(io: str, paths: Sequence[Path]) -> Reader:
    """A reader by its name on the command line, `mmap` or `pread`. UsageError otherwise."""
    if io == "mmap":
        return MappedReader(paths)
    if io == "pread":
        return PreadReader(paths)
    raise UsageError(f"--io {io}: no such way of reading; use mmap or pread")


class MappedReader:
    """Views of a private read-only mapping; a copy only where the address does not fit the alignment."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._maps: dict[int, mmap.mmap] = {}
        self._buffer = _Buffer()
        self._last: tuple[mmap.mmap, int, int] | None = None

    def read(self, file: int, offset: int, nbytes: int, alignment: int) -> Bytes:
        """See `Reader`. A file that shrank before is an IntegrityError, one that shrinks meanwhile SIGBUS."""
        _check_request(offset, nbytes, alignment)
        self._last = None
        if nbytes == 0:
            return _read_only(self._buffer.take(0))
        mapping = self._open(file, offset)
        size = min(len(mapping), mapping.size())
        if offset + nbytes > size:
            raise _ends_early(self._paths[file], offset, nbytes, size)
        self._last = (mapping, offset, nbytes)
        view = np.frombuffer(mapping, np.uint8, nbytes, offset)
        if offset % alignment:  # a mapping begins on a page, so address and offset agree
            buffer = self._buffer.take(nbytes)
            buffer[:] = view
            view = buffer
        return _read_only(view)

    def release(self) -> None:
        """Drop the pages of the last range, and those the system mapped around it."""
        if self._last is None:
            return
        mapping, offset, nbytes = self._last
        self._last = None
        if hasattr(mmap, "MADV_DONTNEED"):
            begin = max(0, offset - FOLIO) // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(offset + nbytes + FOLIO, len(mapping))
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def close(self) -> None:
        """Let go of the mappings; one that a view still shows lives as long as the view."""
        self._last = None
        self._maps.clear()

    def _open(self, file: int, offset: int) -> mmap.mmap:
        mapping = self._maps.pop(file, None)
        if mapping is None:
            while len(self._maps) >= OpenFiles.LIMIT:
                del self._maps[next(iter(self._maps))]
            mapping = _map(self._paths[file], offset)
        self._maps[file] = mapping  # last in order: the one used last
        return mapping


class PreadReader:
    """Reads into one reused buffer; nothing is mapped, so a file may be truncated meanwhile."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._files = OpenFiles(self._paths, os.O_RDONLY)
        self._buffer = _Buffer()

    def read(self, file: int, offset: int, nbytes: int, alignment: int) -> Bytes:
        """See `Reader`."""
        _check_request(offset, nbytes, alignment)
        buffer = self._buffer.take(nbytes)
        if nbytes:
            try:
                descriptor = self._files.get(file)
            except OSError as error:
                raise _unreadable(self._paths[file], offset, error) from error
            _fill(buffer, descriptor, self._paths[file], offset)
        return _read_only(buffer)

    def release(self) -> None:
        """Nothing to do: the buffer is reused."""

    def close(self) -> None:
        """Close the files and drop the buffer."""
        self._files.close()
        self._buffer = _Buffer()


class _Buffer:
    """Bytes at an aligned address, grown to the longest range asked so far, never shrunk."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """The first `nbytes` bytes; what was taken before is overwritten."""
        if nbytes > self._bytes.size or not self._bytes.size:
            self._bytes = np.empty(0, np.uint8)  # before the new one, or both would count
            grown = np.empty(nbytes + BUFFER_ALIGNMENT, np.uint8)
            start = -grown.ctypes.data % BUFFER_ALIGNMENT
            self._bytes = grown[start : start + max(nbytes, 1)]
        return self._bytes[:nbytes]


def _check_request(offset: int, nbytes: int, alignment: int) -> None:
    if offset < 0 or nbytes < 0 or alignment not in (1, 2, 4, 8, 16, 32, 64):
        raise ValueError(f"offset {offset}, {nbytes} bytes, alignment {alignment}")


def _read_only(view: Bytes) -> Bytes:
    """Both readers alike, so that code compiled for one's arrays fits the other's."""
    result = view.view()
    result.flags.writeable = False
    return result


def _map(path: Path, offset: int) -> mmap.mmap:
    try:
        with path.open("rb") as stream:
            mapping = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except ValueError:  # an empty file
        raise IntegrityError(f"{path}: is empty now; restore it") from None
    except OSError as error:
        raise _unreadable(path, offset, error) from error
    if hasattr(mmap, "MADV_SEQUENTIAL"):
        mapping.madvise(mmap.MADV_SEQUENTIAL)
    return mapping


def _fill(buffer: Bytes, descriptor: int, path: Path, offset: int) -> None:
    """Read until the buffer is full; one call hands out 2 GB at most, and less where it likes."""
    done = 0
    while done < buffer.size:
        try:
            got = os.preadv(descriptor, [buffer[done:].data], offset + done)
        except OSError as error:
            raise _unreadable(path, offset + done, error) from error
        if not got:
            raise _ends_early(path, offset, buffer.size, offset + done)
        done += got


def _ends_early(path: Path, offset: int, nbytes: int, size: int) -> IntegrityError:
    return IntegrityError(
        f"{path}: ends at byte {size:,}, wanted {nbytes:,} bytes at offset {offset:,}; "
        "it was truncated after it was opened, restore it"
    )


def _unreadable(path: Path, offset: int, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read at offset {offset:,}: {error.strerror or error}; "
        "mend that or restore the file, and run the same command again"
    )
