"""Folders that a run lends to workers in other processes: who outlives his run finds nothing to write to.

A worker that was stopped or cut off may wake up when its run is long over and another one, of something else,
builds at the same place. So no worker gets a path of the run itself. For every pass the driver makes a folder with
a name of its own beside each thing that is written:

    OUT.ramstream/run-TOKEN/    the output's files once more, as hard links
    STORE/run-TOKEN/            bits of grains, each under a name of its own; the driver gives them their place

With the pass the folder goes. Who opens a path in it later gets an error; who has a file open writes bytes that his
own run, or the same command again, wants just there, or into a file that nobody sees any more.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ramstream import durable
from ramstream.errors import PlanError
from ramstream.overlap import OverlapStore
from ramstream.plan import OutputFile

if TYPE_CHECKING:
    from ramstream.engine.worker import Setup, UnitResult

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems say that have no hard links."""

_PREFIX = "run-"
_PROBE = "probe"
"""Holds the folder's name, so that a worker can tell whether it sees this very folder."""


class _LentStore(OverlapStore):
    """A store whose bits are written elsewhere, and given their place afterwards."""

    def __init__(self, path: Path, lent: Path) -> None:
        super().__init__(path)
        self._lent = lent

    def _chunk(self, grain: int) -> Path:
        return self._lent / f"{grain}-{uuid.uuid4().hex}"

    def take(self, grain: int, file: Path) -> Path:
        """Give the bits of a grain their place in the store; the folder they are in now is not yet fsynced."""
        chunk = super()._chunk(grain)
        durable.disk.rename(file, chunk)
        return chunk


def store_of(path: Path, lent: Path | None) -> OverlapStore:
    """The store that a worker writes bits to."""
    return OverlapStore(path) if lent is None else _LentStore(path, lent)


@dataclass(frozen=True)
class Lent:
    """A setup as workers in other processes get it, and the folders that they write to."""

    setup: Setup
    folders: tuple[Path, ...] = ()

    def take(self, results: list[UnitResult]) -> list[UnitResult]:
        """Give what workers wrote into the folders its place."""
        for result in results:
            if result.chunk is not None:
                result.chunk = str(self._store.take(result.unit, Path(result.chunk)))
        return results

    @cached_property
    def _store(self) -> _LentStore:
        assert self.setup.store is not None, "bits are for a store"
        assert self.setup.lent is not None, "and come from a folder"
        return _LentStore(self.setup.store, self.setup.lent)


@contextmanager
def lend(setup: Setup) -> Iterator[Lent]:
    """Folders for the time of one pass."""
    folders = []
    lent, name = replace(setup, store=None), _PREFIX + setup.token
    try:
        if setup.store is not None and not OverlapStore(setup.store).complete:
            store = setup.store.absolute()
            folders.append(store / name)
            lent = replace(lent, store=store, lent=_made(folders[-1]))
        if setup.merge is not None and setup.out is not None:
            folders.append(setup.out.parent / name)
            _link(setup.out, _made(folders[-1]), setup.merge.outputs)
            lent = replace(lent, out=folders[-1])
        yield Lent(lent, tuple(folders))
    finally:
        for folder in folders:
            _remove(folder)


def _made(folder: Path) -> Path:
    durable.disk.mkdir(folder)
    durable.write(folder / _PROBE, folder.name.encode())
    durable.sync_tree(folder)
    return folder


def _link(out: Path, folder: Path, outputs: tuple[OutputFile, ...]) -> None:
    for output in outputs:
        durable.make_folders((folder / output.name).parent)
        _link_file(out / output.name, folder / output.name)


def _link_file(source: Path, target: Path) -> None:
    try:
        durable.disk.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise PlanError(
            f"{target} cannot be a hard link ({error.strerror}), which --scheduler needs there; "
            "choose an output on another file system, or leave out --scheduler"
        ) from error


def refuse_no_links(place: Path) -> None:
    """PlanError where a file in `place` cannot have a second name: to be asked before hours of counting."""
    folder = place / f"{_PREFIX}{uuid.uuid4().hex}"
    try:
        durable.disk.mkdir(folder)
        durable.write(folder / _PROBE, b"")
        _link_file(folder / _PROBE, folder / f"{_PROBE}-again")
    finally:
        _remove(folder)


def clear(place: Path) -> None:
    """Remove the folders in `place` that runs left there which were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        _remove(folder)


def _remove(folder: Path) -> None:
    with suppress(OSError):  # a worker made a file in it just now; the next run clears it
        durable.remove(folder)


def problem(folder: Path) -> str | None:
    """What keeps this process from working in a lent folder, None where nothing does."""
    mine = folder / f"{uuid.uuid4().hex}.{_PROBE}"
    try:
        if (folder / _PROBE).read_bytes() != folder.name.encode():
            return f"{folder} is another folder there"
        durable.write(mine, b"")
        durable.remove(mine)
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return None
