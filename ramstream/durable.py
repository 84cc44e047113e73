"""Every change that ramstream makes on a disk, and the order that makes a run survive.

`Disk` is the seam: one method a system call, and nothing else in ramstream changes a file or a folder (but numba's
cache of compiled loops). The rest is made of it: what is on disk when a function returns says its docstring.

What a crash leaves is thought of like this. Of a file: what was there at its last fsync, and of what was done to it
since, any part. Of a folder: the names at its last fsync, and of the changes since, any. A rename is one change; it
is on disk when the folder of the new name is. An fsync of a file says nothing of its name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ramstream.errors import DiskFullError, JournalError, PlanError, RamstreamError

READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
"""What the system says where we may not write."""

REMOVED = ".ramstream-removed"
"""Ends the name of a folder that is being removed."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """The system calls that change a disk."""

    def create(self, path: Path) -> int:
        """A descriptor of a file, to be read and written; made empty, with the umask's mode, if there is none."""
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """pwrite; how many bytes of `data` were written."""
        return os.pwrite(descriptor, data, offset)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file, or extend it by zeros."""
        os.ftruncate(descriptor, size)

    def allocate(self, descriptor: int, size: int) -> None:
        """Reserve a file's first `size` bytes, where the system can."""
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)

    def sync(self, descriptor: int) -> None:
        """fsync of a file or folder."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name; a file that has it loses it."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file one more name."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Take away a file's name."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make a folder."""
        path.mkdir()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)


disk = Disk()
"""The one in use."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the system say which file it is about; one about a descriptor does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise


def sync(path: Path) -> None:
    """fsync one file or folder."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            disk.sync(descriptor)
        finally:
            os.close(descriptor)


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


def begin_writing(descriptor: int, begin: int, size: int) -> None:
    """Have the system write a range out now rather than at the fsync that vouches for it, which then finds little
    to do: 0.25 s a GB against 0.4 to 1.5 s. What is written may leave the page cache, inputs are rather kept.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice, which a file system may not take
            os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)


def make_folder(path: Path) -> None:
    """A folder with its parents, if it is not there, on disk; PlanError where that is impossible, but for want of
    space.
    """
    try:
        for folder in dict.fromkeys((path, *make_folders(path))):
            sync(folder.parent)  # also where it is there: whoever made it may have had no time to
    except OSError as error:
        if error.errno in _FULL:
            raise
        raise PlanError(f"{path} cannot be made: {error.strerror}; choose another place") from error


def make_folders(path: Path) -> list[Path]:
    """A folder with its parents, if it is not there; those that were made."""
    missing = [] if path.is_dir() else [path]
    while missing and not os.path.lexists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        try:
            disk.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():  # otherwise another was quicker
                raise
    return missing


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """pwrite all of `data`."""
    while data:
        written = disk.write(descriptor, data, offset)
        data, offset = data[written:], offset + written


def write(path: Path, data: bytes | memoryview, early: bool = False) -> None:
    """Write a file anew, not yet on disk; with `early` on its way there (see `begin_writing`)."""
    with naming(path):
        descriptor = disk.create(path)
        try:
            disk.truncate(descriptor, 0)
            write_at(descriptor, memoryview(data), 0)
            if early:
                begin_writing(descriptor, 0, len(data))
        finally:
            os.close(descriptor)


def write_tree(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their paths below a folder, and the folders they are in; not yet on disk."""
    for name, data in files.items():
        make_folders((folder / name).parent)
        write(folder / name, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name never stands for part of it; on disk on return."""
    temporary = path.with_name(path.name + ".new")
    write(temporary, data)
    sync(temporary)
    move(temporary, path)


def move(source: Path, target: Path) -> None:
    """Give a file or folder another name, on disk on return."""
    disk.rename(source, target)
    for folder in dict.fromkeys((target.parent, source.parent)):
        sync(folder)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there.

    A folder loses its name first, on disk, so that nothing ever finds a part of it under that name; what a crash
    leaves of it goes with the next removal of that name.
    """
    aside = path.with_name(path.name + REMOVED)
    remove_tree(aside)
    if path.is_dir() and not path.is_symlink():
        move(path, aside)
        remove_tree(aside)
    else:
        with suppress(FileNotFoundError):
            disk.unlink(path)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there; a crash leaves a part of it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        inside = [(Path(entry), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in inside:
        if is_folder:
            remove_tree(path)
        else:
            disk.unlink(path)
    disk.rmdir(folder)


def temporary_folder() -> AbstractContextManager[str]:
    """A folder for what need not survive, gone at the end."""
    return TemporaryDirectory(prefix="ramstream-")


@contextmanager
def lock(path: Path, what: str, shared: bool = False) -> Iterator[Callable[[], None]]:
    """Hold `path` as a lock; JournalError where another process does. The text inside is only for people.

    What is handed out turns it into a shared lock, for readers of what is finished. Those may also be without the
    right to write: they hold the file as it is, and nothing where nobody ever made one.
    """
    try:
        descriptor, writable = _lock_file(path, shared)
    except FileNotFoundError:
        if shared and path.parent.is_dir():
            yield lambda: None
            return
        raise JournalError(f"{what} was in use by a run that just ended; run the command again") from None
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise PlanError(
                    f"{path} cannot be locked: {error.strerror}; two runs could spoil each other there, choose a "
                    "place on a file system that has locks"
                ) from error
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise JournalError(f"{what} is in use by {holder}; wait for it or stop it") from None
        if not _is_open(path, descriptor):
            # its holder removed it between our open and our lock, and a third may hold a new one
            raise JournalError(f"{what} was in use by a run that just ended; run the command again")
        if writable:
            with naming(path):
                disk.truncate(descriptor, 0)
                write_at(
                    descriptor, memoryview(f"process {os.getpid()} on {socket.gethostname()}".encode()), 0
                )
        yield lambda: fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock_file(path: Path, shared: bool) -> tuple[int, bool]:
    """A lock's descriptor, made if it is not there, and whether it may be written to: a shared one need not."""
    try:
        return disk.create(path), True
    except OSError as error:
        if not shared or error.errno not in READ_ONLY:
            raise
        return os.open(path, os.O_RDONLY), False


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
    """Turn ENOSPC and an exhausted quota into DiskFullError, other errors of the system into RamstreamError; what
    is on disk stays.
    """
    try:
        yield
    except OSError as error:
        kind, remedy = (
            (DiskFullError, "free some space") if error.errno in _FULL else (RamstreamError, "mend that")
        )
        raise kind(
            f"{error.filename or where}: {error.strerror or error}; {remedy} and run the same command again, "
            "it goes on where it stopped"
        ) from error
