"""File operations whose order makes a run survive."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from crash import found
from disks import bound_by_permissions
from test_architecture import PACKAGE, SOURCES

from ramstream import durable
from ramstream.errors import DiskFullError, JournalError, PlanError, RamstreamError
from ramstream.journal import Journal
from ramstream.overlap import _array


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is synced and renamed, in order."""
    seen: list[str] = []

    class Noted(durable.Disk):
        def sync(self, descriptor: int) -> None:
            seen.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
            super().sync(descriptor)

        def rename(self, source: Path, target: Path) -> None:
            seen.append(f"{source.name} becomes {target.name}")
            super().rename(source, target)

    monkeypatch.setattr(durable, "disk", Noted())
    return seen


def test_a_whole_file_is_on_disk_before_its_name(tmp_path: Path, acts: list[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")
    durable.write_whole(path, b"after")
    assert path.read_bytes() == b"after"
    assert acts == ["sync plan.json.new", "plan.json.new becomes plan.json", f"sync {tmp_path.name}"]
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_synced_before_the_folders_that_name_them(tmp_path: Path, acts: list[str]) -> None:
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    for name in ("deep/deeper/a", "deep/b", "c"):
        (tmp_path / name).touch()
    durable.sync_tree(tmp_path)
    assert acts == ["sync a", "sync deeper", "sync b", "sync deep", "sync c", f"sync {tmp_path.name}"]
    acts.clear()
    durable.sync_all([tmp_path / "deep" / "b", tmp_path / "deep" / "deeper" / "a"])
    assert acts[:2] == ["sync b", "sync a"]
    assert sorted(acts[2:]) == ["sync deep", "sync deeper"]


def test_a_folder_that_cannot_be_made_is_the_users_business(tmp_path: Path) -> None:
    durable.make_folder(tmp_path / "a" / "b")
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="file/b cannot be made: Not a directory; choose another place"):
        durable.make_folder(tmp_path / "file" / "b")


def test_all_bytes_are_written_however_few_go_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    with open(tmp_path / "file", "wb") as file:
        durable.write_at(file.fileno(), memoryview(b"0123456789"), 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


def test_a_lock_is_held_by_one_process_and_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = f"""
from pathlib import Path
from ramstream import durable
with durable.lock(Path({str(path)!r}), "OUT"):
    print(flush=True)
    input()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    message = f"OUT is in use by process {holder.pid} on .*; wait for it or stop it"
    with pytest.raises(JournalError, match=message), durable.lock(path, "OUT"):
        pass
    holder.kill()
    holder.communicate()
    with durable.lock(path, "OUT"):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    with durable.lock(path, "OUT"):
        pass


def test_a_shared_lock_without_the_right_to_write_is_one(tmp_path: Path) -> None:
    """Whoever has the right may still hold it, or want it."""
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o444)
    with open(path) as other, bound_by_permissions():
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(JournalError, match="is in use by"), durable.lock(path, "STORE", shared=True):
            pass
        fcntl.flock(other, fcntl.LOCK_UN)
        with durable.lock(path, "STORE", shared=True) as share:
            share()
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(PermissionError), durable.lock(path, "STORE"):
            pass


def test_what_nobody_ever_locked_and_nobody_may_write_to_needs_no_lock(tmp_path: Path) -> None:
    """As a store that was copied without its lock to a disk that is read-only."""
    tmp_path.chmod(0o555)
    try:
        with bound_by_permissions(), durable.lock(tmp_path / "lock", "STORE", shared=True) as share:
            share()
            assert list(tmp_path.iterdir()) == []
    finally:
        tmp_path.chmod(0o755)
    with (
        pytest.raises(JournalError, match="in use by a run that just ended"),
        durable.lock(tmp_path / "gone" / "lock", "STORE", shared=True),
    ):
        pass


def test_a_lock_that_its_holder_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(JournalError, match="run the command again"), durable.lock(path, "OUT"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_of_our_errors(tmp_path: Path, number: int) -> None:
    message = f"{tmp_path}: {os.strerror(number)}; free some space"
    with pytest.raises(DiskFullError, match=message), durable.disk_full_is_an_error(tmp_path):
        raise OSError(number, os.strerror(number))
    with pytest.raises(DiskFullError, match=r"^it: "), durable.disk_full_is_an_error(tmp_path):
        raise OSError(number, os.strerror(number), "it")


class Full(durable.Disk):
    """No file can be made."""

    def create(self, path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_journal_that_finds_no_room_is_not_taken_for_one_that_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "disk", Full())
    with pytest.raises(DiskFullError, match="journal: No space"), durable.disk_full_is_an_error(tmp_path):
        Journal(tmp_path / "journal")


def test_a_failed_append_leaves_nothing_that_could_follow_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")

    class Broken(durable.Disk):
        def sync(self, descriptor: int) -> None:
            raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "disk", Broken())
        with pytest.raises(OSError, match="no"):
            journal.append([{"unit": 1}, {"unit": 2}])
    journal.append([{"unit": 3}])
    journal.close()
    assert [line for _, line in Journal(tmp_path / "journal").replay()] == [{"unit": 3}]


def test_folders_are_on_disk_with_all_that_were_made_for_them(tmp_path: Path, acts: list[str]) -> None:
    durable.make_folder(tmp_path / "a" / "b")
    assert sorted(acts) == sorted([f"sync {tmp_path.name}", "sync a"])
    acts.clear()
    durable.make_folder(tmp_path / "a" / "b")
    assert acts == ["sync a"]


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()])
@pytest.mark.parametrize("fill", [0, 7])
def test_an_array_of_a_store_has_the_bytes_that_zarr_writes(
    tmp_path: Path, shape: tuple[int, ...], fill: int
) -> None:
    values = np.full(shape, fill, np.int64)
    array = zarr.create_array(
        tmp_path / "zarr",
        shape=shape,
        dtype=np.int64,
        chunks=tuple(max(size, 1) for size in shape),
        compressors=None,
        fill_value=0,
    )
    array[...] = values
    durable.write_tree(tmp_path / "ours", _array(shape, values.dtype, shape, values))
    assert found(tmp_path / "ours") == found(tmp_path / "zarr")


def test_other_errors_of_the_system_are_ours_too(tmp_path: Path) -> None:
    message = (
        r"^it: Permission denied; mend that and run the same command again, it goes on where it stopped$"
    )
    with pytest.raises(RamstreamError, match=message), durable.disk_full_is_an_error(tmp_path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "it")


def test_a_lock_follows_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with durable.lock(tmp_path / "lock", "OUT"):
            assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    finally:
        os.umask(mask)


CHANGES = """
mkdir makedirs mkdtemp mkstemp TemporaryDirectory NamedTemporaryFile TemporaryFile
write_bytes write_text touch truncate ftruncate posix_fallocate fallocate pwrite pwritev writev sendfile
copy_file_range tofile memmap save savez save_file copyfile copyfileobj copy2 copytree chmod chown utime
unlink rmdir removedirs rmtree rename renames link symlink symlink_to hardlink_to
fsync fdatasync sync_file_range LocalStore
"""
"""Names of functions that change a disk, whatever they are called on."""

OF_MODULES = {
    "os": {"remove", "replace", "write", "mknod", "mkfifo"},
    "shutil": {"copy", "move"},
    "zarr": {"save", "create", "create_array", "create_group", "open", "array", "zeros", "empty", "group"},
}
"""Names that other things have too."""

EXEMPT = {Path("durable.py"), Path("kernels/jit.py"), Path("kernels/cores.py")}
"""The seam, and the cache of compiled loops, which may be lost and belongs to no run."""


def changes_beside_the_seam(source: str) -> list[str]:
    """Calls in a source that change a disk and do not go through `durable`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if _changes(call)]


def _changes(call: ast.Call) -> bool:
    """Whether a call changes a disk beside the seam, or could."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if owner in ("durable", "durable.disk"):
        return False
    if name == "open" and owner == "os":
        return ast.unparse(call.args[1]) != "os.O_RDONLY"
    if name in ("open", "open_array", "open_group"):
        words = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
        if owner == "zarr":
            return [ast.unparse(word) for word in words] != ["'r'"]
        words += call.args[0 if owner else 1 :][:1]
        said = [word.value if isinstance(word, ast.Constant) else None for word in words]
        return any(word not in ("r", "rb") for word in said if word is not None or not owner)
    if owner == "zarr" and any(ast.unparse(arg).startswith("MemoryStore(") for arg in call.args):
        return False
    return name in CHANGES.split() or name in OF_MODULES.get(owner, ())


CHANGING = """
open(p, 'w')
open(p, mode='r+b')
open(p, how)
p.open('ab')
os.open(p, os.O_RDWR | os.O_CREAT)
os.replace(p, q)
os.pwrite(d, b, 0)
p.write_bytes(b'')
p.unlink()
p.mkdir()
shutil.rmtree(p)
zarr.create_array(p, shape=s)
zarr.open_array(p, mode='r+')
zarr.open_group(p)
"""

HARMLESS = """
open(p)
open(p, 'rb')
p.open('rb', buffering=0)
it.open()
Checkpoint.open(p)
os.open(p, os.O_RDONLY)
text.replace(a, b)
names.remove(n)
durable.write(p, b'')
durable.disk.rename(p, q)
zarr.create_group(MemoryStore(files))
zarr.open_array(p, mode='r')
"""


def test_calls_that_change_a_disk_are_told_from_others() -> None:
    for call in CHANGING.strip().splitlines():
        assert changes_beside_the_seam(f"def f():\n    return {call}") == [call]
    assert changes_beside_the_seam(HARMLESS) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_changes_a_disk_beside_the_seam(path: Path) -> None:
    if path.relative_to(PACKAGE) not in EXEMPT:
        assert changes_beside_the_seam(path.read_text()) == []
