"""The output's weight files: header first, then ranges at fixed offsets, in any order, from any worker."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream import durable
from ramstream.plan import OutputFile


def create_files(folder: Path, outputs: Sequence[OutputFile]) -> None:
    """Allocate every file to its full size, then write its header; fsynced, `folder` and what is below it too.

    Allocation first: writing into unallocated space is an order of magnitude slower, and a full disk shows
    before any work is done.
    """
    for output in outputs:
        path = folder / output.name
        durable.make_folders(path.parent)
        with durable.naming(path):
            descriptor = durable.disk.create(path)
            try:
                _allocate(descriptor, output.size)
                durable.write_at(descriptor, memoryview(output.header), 0)
            finally:
                os.close(descriptor)
    durable.sync_tree(folder)


def _allocate(descriptor: int, size: int) -> None:
    durable.disk.truncate(descriptor, size)
    try:
        durable.disk.allocate(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot: only slower
            raise


def intact(folder: Path, outputs: Sequence[OutputFile]) -> bool:
    """Whether `create_files` was completed: every file is there in full size under its header."""
    for output in outputs:
        path = folder / output.name
        if not path.is_file() or path.stat().st_size != output.size:
            return False
        with open(path, "rb") as file:
            if file.read(len(output.header)) != output.header:
                return False
    return True


class RangeWriter:
    """Writes ranges of the output's files; one a worker."""

    def __init__(self, folder: Path, outputs: Sequence[OutputFile]) -> None:
        self._paths = [folder / output.name for output in outputs]
        self._files = durable.OpenFiles(self._paths, os.O_WRONLY)

    def write(self, file: int, offset: int, data: NDArray[np.uint8]) -> None:
        """Write all bytes of `data` at an absolute offset."""
        with durable.naming(self._paths[file]):
            durable.write_at(self._files.get(file), memoryview(data), offset)  # type: ignore[arg-type]

    def hand_over(self, file: int, begin: int, end: int) -> None:
        """Have the system write bytes begin .. end to the disk now, while others are made."""
        durable.begin_writing(self._files.get(file), begin, end - begin)

    def sync(self, files: Iterable[int]) -> None:
        """fsync the files with these numbers, by the descriptors that wrote to them.

        Data that is lost is reported once to each descriptor that was open, and to none that is opened later.
        """
        for file in sorted(set(files)):
            with durable.naming(self._paths[file]):
                durable.disk.sync(self._files.get(file))


def sync_files(folder: Path, outputs: Sequence[OutputFile], touched: Iterable[int]) -> None:
    """fsync the files with these numbers."""
    for file in sorted(set(touched)):
        durable.sync(folder / outputs[file].name)


def index(outputs: Sequence[OutputFile], tensors: Iterable[tuple[str, int, int]]) -> dict[str, Any] | None:
    """The content of `model.safetensors.index.json`, or None where the only file is `model.safetensors`.

    `tensors` gives name, file number and bytes of each tensor.
    """
    if [output.name for output in outputs] == ["model.safetensors"]:
        return None
    rows = sorted(tensors)
    return {
        "metadata": {"total_size": sum(size for _, _, size in rows)},
        "weight_map": {name: outputs[file].name for name, file, _ in rows},
    }
