"""A cgroup with a memory limit, which bounds the page cache that its processes fill. Both versions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


class NotPossible(Exception):
    """There can be no such cgroup here; the text says why."""


def parent(text: str | None, membership: str | None = None, mount: Path = MOUNT) -> Path:
    """The folder to make a cgroup in: as named, or `own` for this process's own, so that its limits stay."""
    if text is None:
        raise NotPossible("needs --cgroup: a memory cgroup that one may be made in, or `own`")
    if text != "own":
        return Path(text)
    lines = (membership or Path("/proc/self/cgroup").read_text()).splitlines()
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
    if "memory" in paths:
        return mount / "memory" / paths["memory"]
    return mount / paths.get("", "")


@contextmanager
def limited(folder: Path, limit: int) -> Iterator[Path]:
    """A new cgroup in `folder` whose processes and page cache take at most `limit` bytes. NotPossible."""
    made = folder / f"ramstream-bench-{os.getpid()}"
    try:
        pass_on(folder)
        made.mkdir()
    except OSError as error:
        raise NotPossible(f"no cgroup in {folder}: {error.strerror}") from None
    try:
        set_limit(made, limit)
        yield made
    finally:
        made.rmdir()


def pass_on(folder: Path) -> None:
    """Version 2: give children the memory controller, where they do not have it yet."""
    control = folder / "cgroup.subtree_control"
    if control.exists() and "memory" not in control.read_text().split():
        control.write_text("+memory")


def set_limit(made: Path, limit: int) -> None:
    """Write the limit in the file of this machine's version, and forbid swap, which would hide it. NotPossible."""
    names = {"memory.limit_in_bytes": "memory.swappiness", "memory.max": "memory.swap.max"}
    name = next((name for name in names if (made / name).exists()), None)
    if name is None:
        raise NotPossible(f"{made.parent} has no memory controller to pass on")
    try:
        (made / name).write_text(f"{limit}\n")
    except OSError as error:
        raise NotPossible(f"{made / name}: {error.strerror}") from None
    with suppress(OSError):  # there may be no swap to forbid
        (made / names[name]).write_text("0\n")
