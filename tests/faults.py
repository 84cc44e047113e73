"""Errors that the system gives at any call of a run, on grains so small that a whole merge takes a moment.

Calls are caught in `os` itself, wherever they are made from. A run is always `ramstream`'s command line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from runs import cli, contents, family, small_steps, units, write_family

from ramstream import queries, record, verify  # before grains shrink: what is loaded then stays so
from ramstream.engine import forecast, worker

__all__ = ["forecast", "queries", "verify"]

SMALL = 4096
"""Elements of a grain here, unless a test says otherwise."""


@contextmanager
def small_grains(size: int = SMALL) -> Iterator[None]:
    """A grain of few elements, in every module that has the number."""
    grain, make = worker.GRAIN, record.make_record
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("ramstream.") and getattr(module, "GRAIN", None) == grain:
                patch.setattr(module, "GRAIN", size)
        patch.setattr(worker, "_WORDS", size // 64)
        patch.setattr(record, "make_record", lambda *parts: replace(make(*parts), grain=size))
        yield


def small_units(size: int = SMALL) -> Any:
    """A fixture of a module: runs of several units in a moment, each vouched for by itself."""

    @pytest.fixture(scope="module", autouse=True)
    def small() -> Iterator[None]:
        with small_grains(size), small_steps(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # nothing crashes, so it need not wait
            yield

    return small


@dataclass(frozen=True)
class Said:
    """How a command ended and what it said."""

    code: int
    err: str
    out: str = ""


def command(*words: object) -> Said:
    """`ramstream WORDS…` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli(*words)
    assert "Traceback" not in err.getvalue()
    return Said(code, err.getvalue(), out.getvalue())


@dataclass
class Family:
    """A base of two files with a folder of side files, and two agents: four grains and a byte range."""

    root: Path
    paths: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        shapes = {
            "a": ("F8_E4M3", (2 * SMALL + 77,)),
            "ids": ("I64", (99,)),
            "b": ("BF16", (3, 501)),
            "c": ("F8_E4M3", (SMALL,)),
        }
        self.paths = write_family(self.root, *family(shapes, agents=2, seed=5), shards=2)
        (self.paths[0] / "1_Pooling").mkdir()
        (self.paths[0] / "1_Pooling" / "config.json").write_text("{}")

    def argv(self, out: Path, *more: object) -> list[object]:
        """Words that merge into `out`."""
        return ["merge", *self.paths, "-o", out, "--device", "cpu", "-q", "--workers", "1", *more]

    def merge(self, out: Path, *more: object) -> Said:
        """Merge into `out`."""
        return command(*self.argv(out, *more))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A family that nobody changes."""
    return Family(tmp_path_factory.mktemp("in"))


def work_of(out: Path) -> Path:
    """Where a merge into `out` is built."""
    return out.with_name(out.name + ".ramstream")


def vouched(out: Path, store: Path | None = None) -> tuple[int, int]:
    """Units that are counted, and those that are merged."""
    kept = store or work_of(out) / "overlap.zarr"
    return units(kept / "journal.jsonl"), units(work_of(out) / "journal.jsonl")


def is_one_of(out: Path, *wanted: dict[str, Any]) -> bool:
    """Whether a whole output is there, and which: one of those that are wanted."""
    return (out / "ramstream.json").exists() and contents(out) in wanted


# Calls of the system


@dataclass(frozen=True)
class Call:
    """A system call, the file it is about relative to what is watched, and the how manieth of these it is."""

    name: str
    file: str
    nth: int = 1

    @property
    def kind(self) -> tuple[str, str]:
        """Calls alike: of whatever chunk, tally or temporary store."""
        file = re.sub(r"\.new-[0-9a-f]+", ".new-N", self.file)
        file = re.sub(r"/c/0/\d+$", "/c/0/N", file)
        return self.name, re.sub(r"zarr/(?!changed|journal|lock|zarr)[a-z].*", "zarr/TALLY", file)


_BY_PATH = ("open", "link", "mkdir", "rename", "replace", "unlink", "remove", "rmdir")
_BY_DESCRIPTOR = ("pwrite", "pwritev", "write", "ftruncate", "posix_fallocate", "fsync", "fdatasync")
CHANGING = (*_BY_PATH, *_BY_DESCRIPTOR)
"""Calls that change a disk; of `open`, those for writing."""

TAKING_SPACE = ("open", "link", "mkdir", "pwrite", "pwritev", "write", "posix_fallocate", "rename", "replace")
"""Those that find no room on a disk that stays full."""


class Calls:
    """Calls on what lies below `root`, in order; `before` is asked ahead of each, and may raise.

    An fsync does nothing: nothing crashes here.
    """

    def __init__(
        self,
        root: Path,
        before: Callable[[Call], None] = lambda call: None,
        names: tuple[str, ...] = CHANGING,
    ) -> None:
        self.root, self.before, self.names = root, before, names
        self.seen: list[Call] = []
        self._times: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Calls:
        self._patch = pytest.MonkeyPatch()
        for name in self.names:
            self._patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrapped(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *rest: Any, **options: Any) -> Any:
            if name != "open" or (rest and rest[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                self._note(name, where)
            return None if name in ("fsync", "fdatasync") else act(where, *rest, **options)

        return call

    def _note(self, name: str, where: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        if not Path(path).is_relative_to(self.root):
            return
        file = os.path.relpath(path, self.root)
        self._times[name, file] = nth = self._times.get((name, file), 0) + 1
        call = Call(name, file, nth)
        self.seen.append(call)
        self.before(call)


def refusal(number: int, call: Call, root: Path) -> OSError:
    """What the system says where `call` fails: with a path, unless the call is about a descriptor."""
    path = [str(root / call.file)] if call.name in _BY_PATH else []
    return OSError(number, os.strerror(number), *path)


@contextmanager
def unreadable(path: Path, begin: int, end: int) -> Iterator[None]:
    """Bytes begin .. end of a file are on a broken part of the disk: reads stop before them, and fail there."""
    preadv = os.preadv

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(path) or not offset < end:
            return preadv(descriptor, buffers, offset)
        if offset >= begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, [buffers[0][: begin - offset]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read)
        yield
