"""The present state of the input files, to be held against what was planned and what was read."""

from __future__ import annotations

from ramstream.errors import IntegrityError
from ramstream.plan import CountPlan

Stats = list[list[list[int]]]
"""[size, mtime in ns, inode, ctime in ns] of every file of every checkpoint.

The last cannot be set: it tells of a file that was written to and given its former time. A change of mode or of
names moves it too, so it is a reason to compare contents, not an error.
"""

_WRITTEN = 3
"""Numbers that tell by themselves that a file is another than before."""


def refuse_changed(plan: CountPlan, before: Stats | None) -> None:
    """IntegrityError where an input file has not the size, time and inode it had before it was read."""
    if before is None:
        return
    for checkpoint, now, then in zip(plan.checkpoints, input_stats(plan), before, strict=True):
        if [file[:_WRITTEN] for file in now] != [file[:_WRITTEN] for file in then]:
            raise IntegrityError(
                f"{checkpoint.label} was written to while it was read (its size, time or inode is another now); "
                "restore it and run the same command again, which compares what was read with what is there"
            )


def input_stats(plan: CountPlan) -> Stats:
    """The present state of every input file. IntegrityError where one is gone or has another size than planned."""
    result: Stats = []
    for checkpoint in plan.checkpoints:
        result.append([])
        for path, (name, size) in zip(checkpoint.paths, checkpoint.files, strict=True):
            try:
                found = path.stat()
            except OSError as error:
                raise IntegrityError(f"{checkpoint.label}/{name} is gone: {error.strerror}") from error
            if found.st_size != size:
                raise IntegrityError(
                    f"{checkpoint.label}/{name} has {found.st_size} bytes, it had {size} when the run was planned; "
                    "restore it"
                )
            result[-1].append([found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns])
    return result
