"""Crash states: what may be on a disk after a crash, and whether the same command goes on from there.

A run is recorded at the seam (`durable.Disk`). The model of a disk, which no file system undercuts that is fit for
anything, and most surpass:

* Bytes written, and a file's size, are on disk after an fsync of that file. Until then a write may be there or not,
  up to any byte, or in any of its sectors with the rest as it was or zeros; a change of size may be there or not.
  What was written later may be there without what was written before. Bytes outside of a write never change.
* A name that was given or taken away (create, mkdir, rename, unlink, rmdir) is on disk after an fsync of its
  folder. Until then it may be or not, whatever became of others. A file's fsync says nothing of its name.
* A rename is one change: the node has one name or the other, never both or none. It is on disk after an fsync of
  the folder of the new name; one of the old name's folder alone says nothing.
* A folder whose name is lost is lost with all that is in it.
* A process that is killed loses nothing at once: the next one sees all, and a later crash may still take it.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ramstream import durable

SECTOR = 512


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever its names."""

    is_folder: bool


@dataclass(frozen=True)
class Name:
    """A node is given a name, and loses those it had unless it is one `more`; or has it taken away."""

    folder: Node
    name: str
    node: Node
    given: bool = True
    more: bool = False

    @property
    def settled_by(self) -> Node:
        """Whose fsync puts it on disk."""
        return self.folder


@dataclass(frozen=True)
class Bytes:
    """Bytes of a file."""

    node: Node
    offset: int
    data: bytes

    @property
    def settled_by(self) -> Node:
        """Whose fsync puts it on disk."""
        return self.node


@dataclass(frozen=True)
class Size:
    """A file's size; with `grows` it never gets smaller."""

    node: Node
    size: int
    grows: bool = False

    @property
    def settled_by(self) -> Node:
        """Whose fsync puts it on disk."""
        return self.node


Change = Name | Bytes | Size


@dataclass(frozen=True)
class Synced:
    """An fsync."""

    node: Node


Tree = dict[str, bytes | None]
"""Files by their path, None for a folder."""


class Killed(BaseException):
    """The process is gone."""


class Recorder(durable.Disk):
    """Notes every change below `root` while it is made; when `gone` says so, the process is."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(True)
        self.log: list[Change | Synced] = []
        self.acts: list[str] = []
        """The log in words: `new PATH`, `gone PATH`, `write PATH`, `size PATH`, `sync PATH`."""
        self.gone: Callable[[], bool] = lambda: False
        self._where: dict[Node, tuple[Node, str]] = {}
        self._nodes = {root.stat().st_ino: self.top}
        self._locks: set[Node] = set()
        """What is written in a lock is only for people, and not noted."""
        self._lock = threading.RLock()
        for path in sorted(root.rglob("*")):
            self._name(path, Node(path.is_dir()))
            if path.is_file() and path.name != "lock":
                self._note(Bytes(self._nodes[path.stat().st_ino], 0, path.read_bytes()))
        for node in self._nodes.values():
            self._note(Synced(node))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        with self._lock:
            if self.gone():
                raise Killed
            yield

    def _note(self, act: Change | Synced) -> None:
        self.log.append(act)
        if isinstance(act, Name):
            self._where[act.node] = act.folder, act.name
            word = "new" if act.given else "gone"
        else:
            word = {Bytes: "write", Size: "size", Synced: "sync"}[type(act)]
        self.acts.append(f"{word} {self._path(act.node)}")

    def _path(self, node: Node) -> str:
        parts = []
        while node is not self.top:
            node, name = self._where[node]
            parts.append(name)
        return "/".join(reversed(parts))

    def _node(self, where: Path | int) -> Node | None:
        found = os.fstat(where) if isinstance(where, int) else os.lstat(where)
        node = self._nodes.get(found.st_ino)
        beside = node is None and isinstance(where, Path) and self.root in where.parents
        assert not beside, f"{where} was made beside the seam"
        return node

    def _name(self, path: Path, node: Node, more: bool = False) -> None:
        folder = self._node(path.parent)
        self._nodes.pop(path.lstat().st_ino, None)  # the system gives numbers out again
        if folder is not None:
            self._nodes[path.lstat().st_ino] = node
            if path.name == "lock":
                self._locks.add(node)
            self._note(Name(folder, path.name, node, more=more))

    def _unname(self, path: Path, take_away: Callable[[Path], None]) -> None:
        folder, node, was = self._node(path.parent), self._node(path), path.lstat()
        take_away(path)
        if was.st_nlink == 1 or stat.S_ISDIR(was.st_mode):
            self._nodes.pop(was.st_ino, None)
        if folder is not None and node is not None:
            self._note(Name(folder, path.name, node, given=False))

    def create(self, path: Path) -> int:
        with self._alive():
            new = not os.path.lexists(path)
            descriptor = super().create(path)
            if new:
                self._name(path, Node(False))
            return descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._alive():
            written = super().write(descriptor, data, offset)
            node = self._node(descriptor)
            if node is not None and node not in self._locks:
                self._note(Bytes(node, offset, bytes(data[:written])))
            return written

    def truncate(self, descriptor: int, size: int) -> None:
        with self._alive():
            node, before = self._node(descriptor), os.fstat(descriptor).st_size
            super().truncate(descriptor, size)
            if node is not None and size != before and node not in self._locks:
                self._note(Size(node, size))

    def allocate(self, descriptor: int, size: int) -> None:
        with self._alive():
            node, before = self._node(descriptor), os.fstat(descriptor).st_size
            super().truncate(descriptor, max(size, before))
            if node is not None and size > before:
                self._note(Size(node, size, grows=True))

    def sync(self, descriptor: int) -> None:
        with self._alive():
            node = self._node(descriptor)
            if node is not None:
                self._note(Synced(node))

    def rename(self, source: Path, target: Path) -> None:
        with self._alive():
            node = self._node(source)
            if target.is_file():
                self._nodes.pop(target.stat().st_ino, None)
            super().rename(source, target)
            self._name(target, node or Node(target.is_dir()))

    def link(self, source: Path, target: Path) -> None:
        with self._alive():
            node = self._node(source)
            super().link(source, target)
            self._name(target, node or Node(False), more=True)

    def unlink(self, path: Path) -> None:
        with self._alive():
            self._unname(path, super().unlink)

    def rmdir(self, path: Path) -> None:
        with self._alive():
            self._unname(path, super().rmdir)

    def mkdir(self, path: Path) -> None:
        with self._alive():
            super().mkdir(path)
            self._name(path, Node(True))


@dataclass
class World:
    """What is on a disk."""

    top: Node
    names: dict[tuple[Node, str], Node] = field(default_factory=dict)
    """By folder and name."""
    bytes: dict[Node, bytes] = field(default_factory=dict)

    def with_changes(self, changes: Iterable[Change]) -> World:
        """Another, in which these are there too."""
        world = World(self.top, dict(self.names), dict(self.bytes))
        for change in changes:
            world.apply(change)
        return world

    def apply(self, change: Change) -> None:
        """Let it be there."""
        if isinstance(change, Name):
            self._name(change)
            return
        data = self.bytes.get(change.node, b"")
        if isinstance(change, Bytes):
            end = change.offset + len(change.data)
            data = data[: change.offset].ljust(change.offset, b"\0") + change.data + data[end:]
        elif change.size > len(data):
            data = data.ljust(change.size, b"\0")
        elif not change.grows:
            data = data[: change.size]
        self.bytes[change.node] = data

    def _name(self, change: Name) -> None:
        if change.given:
            names = [where for where, node in self.names.items() if node is change.node]
            for where in names if not change.more else ():
                del self.names[where]
            self.names[change.folder, change.name] = change.node
        elif self.names.get((change.folder, change.name)) is change.node:
            del self.names[change.folder, change.name]

    def tree(self) -> Tree:
        """Its files and folders."""
        inside: dict[Node, dict[str, Node]] = {}
        for (folder, name), node in self.names.items():
            inside.setdefault(folder, {})[name] = node
        found: Tree = {}
        left = [("", self.top)]
        while left:
            path, folder = left.pop()
            for name, node in inside.get(folder, {}).items():
                found[path + name] = None if node.is_folder else self.bytes.get(node, b"")
                if node.is_folder:
                    left.append((f"{path}{name}/", node))
        return found


def states(
    recorder: Recorder, begin: int, rng: random.Random, subsets: int = 32, share: float = 1.0
) -> Iterator[Tree]:
    """What may be on disk after a crash anywhere in the log from `begin` on, once each.

    `share` of the moments are looked at.
    """
    seen: set[bytes] = set()
    for end, solid, recent in _moments(recorder):
        if end < begin or rng.random() >= share:
            continue
        for chosen in _choices(recent, rng, subsets):
            tree = solid.with_changes(chosen).tree()
            name = _digest(tree)
            if name not in seen:
                seen.add(name)
                yield tree


def at_the_end(recorder: Recorder, kept: bool) -> Tree:
    """What is there after the log, all of it, or only what is on disk for certain."""
    *_, (_, solid, recent) = _moments(recorder)
    return solid.with_changes([change for change, on_disk in recent if kept or on_disk]).tree()


Recent = list[tuple[Change, bool]]
"""Changes, and whether they are on disk."""


def _moments(recorder: Recorder) -> Iterator[tuple[int, World, Recent]]:
    """After how many acts: what is on disk, and the changes since the first of those that are not."""
    solid, recent = World(recorder.top), Recent()
    yield 0, solid, recent
    for end, act in enumerate(recorder.log, start=1):
        if isinstance(act, Synced):
            recent = [(change, on_disk or change.settled_by is act.node) for change, on_disk in recent]
        else:
            recent = [*recent, (act, False)]
        while recent and recent[0][1]:
            solid.apply(recent.pop(0)[0])
        yield end, solid, recent


def _choices(recent: Recent, rng: random.Random, subsets: int) -> Iterator[list[Change]]:
    """Lists of changes that may be there: those that are on disk, and some of the others or parts of them."""
    loose = [i for i, (_, on_disk) in enumerate(recent) if not on_disk]

    def having(parts: dict[int, list[Change]], others: bool) -> list[Change]:
        made: list[Change] = []
        for i, (change, on_disk) in enumerate(recent):
            made += parts.get(i, [change] if on_disk or others else [])
        return made

    yield having({}, True)
    yield having({}, False)
    for i in loose:
        change = recent[i][0]
        yield having({i: []}, True)
        yield having({i: [change]}, False)
        if isinstance(change, Bytes):
            yield having({i: _cut(change, rng)}, True)
            yield having({i: _scattered(change, rng)}, True)
            yield having({i: _cut(change, rng)}, False)
    for _ in range(subsets if len(loose) > 1 else 0):
        yield having({i: _some(recent[i][0], rng) for i in loose}, True)


def _some(change: Change, rng: random.Random) -> list[Change]:
    if rng.random() < 0.5:
        return []
    if isinstance(change, Bytes) and rng.random() < 0.3:
        return rng.choice([_cut, _scattered])(change, rng)
    return [change]


def _cut(change: Bytes, rng: random.Random) -> list[Change]:
    """A write of which only the beginning is there."""
    return [replace(change, data=change.data[: rng.randrange(len(change.data) + 1)])]


def _scattered(change: Bytes, rng: random.Random) -> list[Change]:
    """A write that made the file as long as it should be, and of which some sectors are there."""
    begin, end = change.offset, change.offset + len(change.data)
    parts: list[Change] = [Size(change.node, end, grows=True)]
    for sector in range(begin // SECTOR, -(-end // SECTOR)):
        first, last = max(sector * SECTOR, begin), min((sector + 1) * SECTOR, end)
        if rng.random() < 0.5:
            parts.append(Bytes(change.node, first, change.data[first - begin : last - begin]))
    return parts


def _digest(tree: Tree) -> bytes:
    """Equal for trees that are alike."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        data = tree[path]
        found.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return found.digest()


def found(root: Path) -> Tree:
    """What is there, but for what is written in locks."""
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*")}
    texts = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    return {name: b"" if path.name == "lock" else texts.get(name) for name, path in paths.items()}


def put(tree: Tree, root: Path) -> None:
    """Make a state real, in a folder that has nothing else in it."""
    if root.exists():
        shutil.rmtree(root)
    root.mkdir()
    for path in sorted(tree):
        data = tree[path]
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


@contextmanager
def in_place(disk: durable.Disk) -> Iterator[None]:
    """Have ramstream use this disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "disk", disk)
        yield


class Hasty(durable.Disk):
    """A disk that is as it should be, without the waiting: nothing crashes here."""

    def sync(self, descriptor: int) -> None:
        """Nothing."""

    def allocate(self, descriptor: int, size: int) -> None:
        """Nothing."""
