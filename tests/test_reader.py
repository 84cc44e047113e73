"""Two ways to read: the same bytes, aligned, in bounded memory; a file that ends early is an error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramstream.checkpoint import reader as reader_module
from ramstream.checkpoint.reader import BUFFER_ALIGNMENT, MappedReader, PreadReader, open_reader
from ramstream.durable import OpenFiles
from ramstream.errors import CheckpointError, IntegrityError, UsageError
from ramstream.memory import MAPPED_SLACK

WAYS = ("mmap", "pread")
SIZE = 300_007


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("weights")
    paths = [folder / f"{i}.safetensors" for i in range(7)]
    for i, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(i).bytes(SIZE))
    return paths


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


ranges = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.integers(0, SIZE),
        st.integers(0, 70_000),
        st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=ranges)
def test_both_ways_give_the_bytes_of_the_file(requests, files: list[Path]) -> None:
    readers = [open_reader(way, files) for way in WAYS]
    for file, offset, nbytes, alignment, release in requests:
        nbytes = min(nbytes, SIZE - offset)
        expected = np.fromfile(files[file], np.uint8, nbytes, offset=offset)
        for reader in readers:
            view = reader.read(file, offset, nbytes, alignment)
            assert view.dtype == np.uint8
            assert view.ctypes.data % alignment == 0
            assert not view.flags.writeable
            assert np.array_equal(view, expected)
            if release:
                reader.release()
    for reader in readers:
        reader.close()


def test_bytes_survive_release(way: str, files: list[Path]) -> None:
    """Released pages come back from the page cache: release frees memory, it does not change data."""
    reader = open_reader(way, files)
    view = reader.read(0, 4096, 100_000, 2)
    before = view.copy()
    reader.release()
    assert np.array_equal(view, before)


def test_mapped_reader_copies_only_what_is_not_aligned(files: list[Path]) -> None:
    reader = MappedReader(files)
    reader.read(0, 4096, 50_000, 64)
    reader.read(0, 64, 50_000, 64)
    reader.read(0, 3, 50_000, 1)
    assert reader._buffer._bytes.size == 0
    reader.read(0, 3, 50_000, 2)
    assert reader._buffer._bytes.size == 50_000


def test_buffer_is_as_long_as_the_longest_range(files: list[Path]) -> None:
    reader = PreadReader(files)
    addresses = set()
    for nbytes in (100_000, 7, 99_999, 0, 100_000):
        view = reader.read(1, 5, nbytes, 64)
        if nbytes:
            addresses.add(view.ctypes.data)
    assert reader._buffer._bytes.size == 100_000
    assert reader._buffer._bytes.base is not None
    assert reader._buffer._bytes.base.size == 100_000 + BUFFER_ALIGNMENT
    assert len(addresses) == 1


def test_range_beyond_the_end_is_an_integrity_error(way: str, files: list[Path]) -> None:
    reader = open_reader(way, files)
    for offset, nbytes in ((SIZE - 10, 11), (SIZE, 1), (SIZE + 5000, 1), (0, SIZE + 1)):
        with pytest.raises(
            IntegrityError, match=rf"0.safetensors: .*wanted {nbytes:,} bytes at offset {offset:,}"
        ):
            reader.read(0, offset, nbytes, 1)
    assert reader.read(0, SIZE - 10, 10, 1).size == 10


def test_file_truncated_after_it_was_opened_is_an_integrity_error(way: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(100_000))
    reader = open_reader(way, [path])
    assert reader.read(0, 0, 100_000, 8).size == 100_000
    reader.release()
    os.truncate(path, 60_000)
    with pytest.raises(
        IntegrityError, match=r"w.safetensors: ends at byte 60,000, wanted 50,000 bytes at offset 50,000"
    ):
        reader.read(0, 50_000, 50_000, 8)
    os.truncate(path, 0)
    with pytest.raises(IntegrityError, match=r"w.safetensors"):
        open_reader(way, [path]).read(0, 0, 1, 1)


def test_missing_file_is_a_checkpoint_error(way: str, tmp_path: Path) -> None:
    reader = open_reader(way, [tmp_path / "gone.safetensors"])
    with pytest.raises(
        CheckpointError, match=r"gone.safetensors: cannot be read at offset 128: No such file"
    ):
        reader.read(0, 128, 1, 1)


def test_disk_error_names_file_and_offset(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reader_module.os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"2.safetensors: cannot be read at offset 4,096: Input/output error"
    ):
        PreadReader(files).read(2, 4096, 10, 1)


def test_short_reads_are_continued(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(
        reader_module.os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:1000]], at)
    )
    view = PreadReader(files).read(3, 17, 12_345, 8)
    assert np.array_equal(view, np.fromfile(files[3], np.uint8, 12_345, offset=17))


def test_empty_range_and_empty_file(way: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.touch()
    reader = open_reader(way, [path])
    view = reader.read(0, 0, 0, 64)
    assert view.size == 0
    assert view.ctypes.data % 64 == 0
    reader.release()
    reader.close()


def test_close_with_a_view_alive_and_reading_on(way: str, files: list[Path]) -> None:
    reader = open_reader(way, files)
    view = reader.read(0, 0, 1000, 1)
    before = view.copy()
    reader.close()
    reader.close()
    assert np.array_equal(view, before)
    assert np.array_equal(reader.read(0, 0, 1000, 1), before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux")
def test_few_files_stay_open(way: str, files: list[Path]) -> None:
    before = descriptors()
    reader = open_reader(way, files)
    views = []
    for _ in range(3):
        for file in range(len(files)):
            reader.read(file, 0, 100, 1)
            views.append(descriptors() - before)
    assert max(views) == OpenFiles.LIMIT
    reader.close()
    assert descriptors() == before
    reader.read(0, 0, 1, 1)
    del reader
    assert descriptors() == before


@pytest.mark.parametrize(
    ("offset", "nbytes", "alignment"), [(-1, 1, 1), (0, -1, 1), (0, 1, 3), (0, 1, 128), (0, 1, 0)]
)
def test_impossible_request_is_a_fault_of_ours(
    way: str, offset, nbytes, alignment, files: list[Path]
) -> None:
    with pytest.raises(ValueError):
        open_reader(way, files).read(0, offset, nbytes, alignment)


def test_an_unknown_way_is_a_word_that_means_nothing(files: list[Path]) -> None:
    with pytest.raises(UsageError, match="--io aio: no such way of reading; use mmap or pread"):
        open_reader("aio", files)


RESIDENT = """
import sys
from pathlib import Path
from ramstream.checkpoint.reader import open_reader

def resident():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024

way, path, release, strip, start = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "release", *map(int, sys.argv[4:])
reader = open_reader(way, [path])
reader.read(0, 0, strip, 1).sum()
reader.release()
before, most, size = resident(), 0, path.stat().st_size
for offset in range(start, size, strip):
    reader.read(0, offset, min(strip, size - offset), 2).sum()
    most = max(most, resident())
    if release:
        reader.release()
print(most - before, resident() - before)
"""


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "w.safetensors"
    path.write_bytes(bytes(64 << 20))
    return path


def growth(*arguments: object) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    most, last = done.stdout.split()
    return int(most), int(last)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
@pytest.mark.parametrize("strip", [512 << 10, 300_001])
@pytest.mark.parametrize("start", [0, 5_002])
def test_release_keeps_resident_memory_to_one_range(
    way: str, strip: int, start: int, long_file: Path
) -> None:
    most, last = growth(way, long_file, "release", strip, start)
    assert most < 2 * strip + MAPPED_SLACK + (1 << 20)
    assert last < strip + (1 << 20)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_without_release_a_mapping_grows(long_file: Path) -> None:
    """Otherwise the test above shows nothing."""
    most, _ = growth("mmap", long_file, "keep", 512 << 10, 0)
    assert most > 60 << 20
