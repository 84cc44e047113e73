"""File systems of their own, and what the modes of files allow. Nothing of ramstream is loaded here."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _ran(*words: object) -> bool:
    return subprocess.run(list(map(str, words)), capture_output=True).returncode == 0


@contextmanager
def mounted(place: Path, kind: str, options: str = "", size: int = 4 << 20) -> Iterator[Path]:
    """A file system of its own at `place`: a tmpfs, or an ext4 in `PLACE.image`, made of `size` if it is not there.

    Skips where that is not allowed.
    """
    place.mkdir(exist_ok=True)
    source: str | Path = "none"
    if kind == "ext4":
        source, options = place.with_name(place.name + ".image"), f"loop,{options}".strip(",")
        if not source.exists():
            source.touch()
            os.truncate(source, size)
            if not _ran("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", source):
                pytest.skip("mkfs.ext4 cannot be run here")
    if not _ran("mount", "-t", kind, *(["-o", options] if options else []), source, place):
        pytest.skip(f"mounting a {kind} is not permitted here")
    try:
        yield place
    finally:
        assert _ran("umount", place) or _ran("umount", "-l", place)


def remount(place: Path, options: str) -> None:
    """Mount it otherwise."""
    assert _ran("mount", "-o", f"remount,{options}", place)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """This thread, and those it starts, may do what the modes of files say, also where root runs it."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(0x20080522, 0), (_Sets * 2)()
    if not hasattr(libc, "capset") or libc.capget(ctypes.byref(header), sets):
        pytest.skip("root's rights cannot be put down here")
    before = sets[0].effective
    sets[0].effective &= ~0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0
