"""The output's files as workers write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ramstream import durable
from ramstream.plan import OutputFile
from ramstream.writer import RangeWriter, create_files


def test_ranges_are_fsynced_by_the_descriptors_that_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells of lost data once: whoever opens the file after that hears nothing."""
    outputs = [OutputFile(f"{k}.safetensors", b"header", 64) for k in range(3)]
    create_files(tmp_path, outputs)
    acts: list[tuple[str, int]] = []

    class Noting(durable.Disk):
        def write(self, descriptor: int, data: memoryview, offset: int) -> int:
            acts.append(("write", descriptor))
            return super().write(descriptor, data, offset)

        def sync(self, descriptor: int) -> None:
            acts.append(("sync", descriptor))
            super().sync(descriptor)

    monkeypatch.setattr(durable, "disk", Noting())
    writer = RangeWriter(tmp_path, outputs)
    for file in (2, 0, 2):
        writer.write(file, 6, np.arange(5, dtype=np.uint8))
    writer.sync([2, 0, 2])
    two, zero = acts[0][1], acts[1][1]
    assert acts[3:] == [("sync", zero), ("sync", two)]
