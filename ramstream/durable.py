"""The few file operations whose order makes a run survive: fsync of files and folders, whole-file writes, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ramstream.errors import DiskFullError, JournalError, PlanError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def make_folder(path: Path) -> None:
    """A folder with its parents, if it is not there; PlanError where that is impossible, but for want of space."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise PlanError(f"{path} cannot be made: {error.strerror}; choose another place") from error


def sync(path: Path) -> None:
    """fsync one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin_writing(descriptor: int, begin: int, size: int) -> None:
    """Have the system write a range out now rather than at the fsync that vouches for it, which then finds little
    to do: 0.25 s a GB against 0.4 to 1.5 s. What is written may leave the page cache, inputs are rather kept.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice, which a file system may not take
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below and including `folder`, contents before names."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))


def sync_all(paths: Iterable[Path]) -> None:
    """fsync files, then the folders that hold them, each once."""
    folders = set()
    for path in paths:
        sync(path)
        folders.add(path.parent)
    for folder in folders:
        sync(folder)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name never stands for part of it: a temporary, fsync, rename, fsync."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(data)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """pwrite all of `data`."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


@contextmanager
def lock(path: Path, what: str, shared: bool = False) -> Iterator[Callable[[], None]]:
    """Hold `path` as a lock; JournalError where another process does. The text inside is only for people.

    What is handed out turns it into a shared lock, for readers of what is finished. Where a shared one cannot be
    made, nobody can write there either.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        raise JournalError(f"{what} was in use by a run that just ended; run the command again") from None
    except OSError as error:
        if not shared or error.errno not in _READ_ONLY:
            raise
        yield lambda: None
        return
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise JournalError(f"{what} is in use by {holder}; wait for it or stop it") from None
        if not _is_open(path, descriptor):
            # its holder removed it between our open and our lock, and a third may hold a new one
            raise JournalError(f"{what} was in use by a run that just ended; run the command again")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield lambda: fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _is_open(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


class OpenFiles:
    """A few descriptors of many files, by their index: the one used longest ago is closed for a new one."""

    LIMIT = 2
    """Ranges come in file order, and workers, agents and files multiply."""

    def __init__(self, paths: Sequence[Path], flags: int) -> None:
        self._paths, self._flags = paths, flags
        self._open: dict[int, int] = {}

    def get(self, index: int) -> int:
        """The descriptor of one file. OSError where it cannot be opened."""
        descriptor = self._open.pop(index, None)
        if descriptor is None:
            while len(self._open) >= self.LIMIT:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = os.open(self._paths[index], self._flags | os.O_CLOEXEC)
        self._open[index] = descriptor  # last in order: the one used last
        return descriptor

    def close(self) -> None:
        """Close all; a later `get` opens anew."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


def allow_many_files() -> None:
    """Raise the limit of open files as far as it goes without privileges."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def disk_full_is_an_error(where: Path) -> Iterator[None]:
    """Turn ENOSPC and an exhausted quota into DiskFullError; what is on disk stays."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"{error.filename or where}: {error.strerror}; free some space and run the same command again, "
                "it goes on where it stopped"
            ) from error
        raise
