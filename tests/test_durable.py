"""File operations whose order makes a run survive."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ramstream import durable
from ramstream.errors import DiskFullError, JournalError, PlanError


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


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), durable.disk_full_is_an_error(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_lock_follows_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with durable.lock(tmp_path / "lock", "OUT"):
            assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    finally:
        os.umask(mask)
