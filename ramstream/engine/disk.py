"""Free space, before anything is written."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from ramstream import memory, overlap
from ramstream.engine.place import Place
from ramstream.errors import DiskFullError, PlanError
from ramstream.plan import MergePlan


def free_disk(path: Path) -> int:
    """Bytes free where `path` is or would be made."""
    return shutil.disk_usage(_existing(path)).free


def check_disk(plan: MergePlan, place: Place, store: Path | None) -> None:
    """DiskFullError where what is left to write does not fit what is free on a disk, naming both numbers.

    `store` is where the overlap store's bits go, None where none are kept.
    """
    side = sum(file.size for file in plan.side_files)
    parts = [(place.out.parent, plan.written + side - _allocated(place.staged))]
    if store is not None and not _is_complete(store):
        parts.append((store, overlap.projected_size(plan.count) - _allocated(store)))
    needs: dict[int, int] = {}
    for path, need in parts:
        disk = _existing(path).stat().st_dev
        needs[disk] = needs.get(disk, 0) + max(need, 0)
        if needs[disk] > (free := free_disk(path)):
            without = ", or use --no-keep-store" if path == store and needs[disk] - need <= free else ""
            raise DiskFullError(
                f"{path}: the run writes {memory.mebibytes(needs[disk])} there and {memory.mebibytes(free)} are "
                f"free; free some space, or choose another disk{without}"
            )


def _is_complete(store: Path) -> bool:
    try:
        return overlap.OverlapStore(store).complete
    except PlanError:
        return False


def _existing(path: Path) -> Path:
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if os.path.exists(parent))


def _allocated(path: Path) -> int:
    """Bytes that a folder's files take; what another run removes meanwhile takes none."""
    taken = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                taken += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return taken
