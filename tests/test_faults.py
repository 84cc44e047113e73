"""Disks that are full, broken or read-only, and what may not be read or written: said, and nothing lost."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
import pytest
from disks import bound_by_permissions, mounted, remount
from faults import (
    TAKING_SPACE,
    Call,
    Calls,
    Family,
    Said,
    command,
    is_one_of,
    refusal,
    unreadable,
    vouched,
    work_of,
)
from runs import contents, promised

small_units, made = faults.small_units(), faults.made


@pytest.fixture(scope="module")
def good(made: Family) -> dict[str, Any]:
    out = made.root / "good"
    assert made.merge(out).code == 0
    return contents(out)


# Every step of a run fails

FULL = (errno.ENOSPC, errno.EDQUOT)
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENOSPC, errno.EACCES)

PLACES = {
    "removing": r"removed",
    "the store while it is made": r"zarr\.new-N",
    "bits": r"zarr/changed/c/0/N",
    "the count journal": r"zarr/journal\.jsonl",
    "the merge journal": r"^out\.ramstream/journal\.jsonl",
    "the survey journal": r"survey\.jsonl",
    "tallies": r"zarr/TALLY",
    "completing the store": r"zarr/zarr\.json\.new",
    "weights": r"safetensors$",
    "the record": r"out/ramstream\.json$",
    "side files": r"out/.*(json|md)$",
    "the former output": r"^out\.ramstream/old|^out$",
    "the output": r"^out\.ramstream/out",
    "the plan": r"plan\.json",
    "locks": r"lock$",
}
"""What a file is to a run, by the first pattern that is found in its name."""

STEPS = {
    *(("pwrite", place) for place in PLACES if place not in ("removing", "the former output", "the output")),
    *(("fsync", place) for place in PLACES if place not in ("removing", "locks", "the former output")),
    *(("mkdir", place) for place in ("the store while it is made", "tallies", "the output")),
    *(
        ("rename", place)
        for place in ("the store while it is made", "completing the store", "the plan", "the output")
    ),
    *((call, "weights") for call in ("ftruncate", "posix_fallocate")),
    *(("unlink", place) for place in ("removing", "the merge journal", "the plan")),
}
"""What must have failed, however else a run does it."""


@dataclass
class Chain:
    """One command again and again, on a disk where every kind of call fails once, until it is done."""

    run: Callable[[], Said]
    root: Path
    """Where it works; the output is `out`."""
    good: dict[str, Any]
    old: dict[str, Any] = field(default_factory=dict)
    """The former output."""
    store: Path | None = None
    coarse: bool = False
    """Whether files alike fail once together."""
    failed: dict[tuple[str, str], int] = field(default_factory=dict)
    said: Counter[int] = field(default_factory=Counter)

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def template(self) -> Path:
        """What was there at first."""
        return self.root.with_name("template")

    def to_the_end(self) -> None:
        """Until nothing is left that has not failed."""
        shutil.copytree(self.root, self.template)
        before = (0, 0)
        while True:
            self._failure: tuple[int, Call] | None = None
            self._more: set[str] = set()
            with Calls(self.root, self._fail):
                said = self.run()
            if self._failure is None:
                break
            if said.code == 0:  # what is only advice, or tidying up
                assert is_one_of(self.out, self.good), self._failure
                self._begin_anew()
                before = (0, 0)
                continue
            self._check(said, *self._failure)
            if not is_one_of(self.out, self.good) and (work_of(self.out) / "plan.json").exists():
                now = vouched(self.out, self.store)
                assert now >= before, "finished work is vouched for"
                before = now
        assert said.code == 0, said
        self._check_end()

    def _kind(self, call: Call) -> tuple[str, str]:
        name, file = call.kind
        return (name, place_of(file)) if self.coarse else (name, file)

    def _fail(self, call: Call) -> None:
        kind = self._kind(call)
        if self._failure is None and kind not in self.failed:
            number = NUMBERS[len(self.failed) % len(NUMBERS)]
            self.failed[kind] = number
            self._failure = number, call
            raise refusal(number, call, self.root)
        stays_full = len(self.failed) % 2 and self._failure and self._failure[0] in FULL
        if stays_full and self._failure and call.name in TAKING_SPACE:
            self._more.add(str(self.root / call.file))
            raise refusal(self._failure[0], call, self.root)

    def _check(self, said: Said, number: int, call: Call) -> None:
        self.said[said.code] += 1
        at = (errno.errorcode[number], call, said)
        assert os.strerror(number) in said.err, at
        assert any(file in said.err for file in {str(self.root / call.file), *self._more}), at
        if number in FULL:
            assert said.code == 8, at
            assert (
                "; free some space and run the same command again, it goes on where it stopped" in said.err
            ), at
        elif "cannot be made" in said.err:
            assert said.code == 3, at
            assert "; choose another place" in said.err, at
        else:
            assert said.code == 1, at
            assert "; mend that and run the same command again, it goes on where it stopped" in said.err, at
        old_is_there = is_one_of(self.out, self.old) or is_one_of(work_of(self.out) / "old", self.old)
        assert not self.old or old_is_there or is_one_of(self.out, self.good), at

    def _begin_anew(self) -> None:
        shutil.rmtree(self.root)
        shutil.copytree(self.template, self.root)

    def _check_end(self) -> None:
        assert contents(self.out) == self.good
        kept = {path.name for path in work_of(self.out).iterdir()} if work_of(self.out).exists() else set()
        assert kept <= {"overlap.zarr", "lock"}
        assert not [path for path in self.root.rglob("*") if re.search(r"\.new|ramstream-removed", path.name)]

    def steps(self) -> set[tuple[str, str]]:
        """Calls that failed, and what they were about."""
        return {(name, file if self.coarse else place_of(file)) for name, file in self.failed}


def place_of(file: str) -> str:
    """Which of PLACES a file is."""
    return next((place for place, pattern in PLACES.items() if re.search(pattern, file)), file)


def chain_of(
    made: Family, root: Path, words: list[object], before: list[object] | None, coarse: bool
) -> Chain:
    """A merge with these words, over a former output if there are words for that."""
    assert made.merge(root / "wanted" / "out", *words).code == 0
    place = root / "place"
    place.mkdir()
    chain = Chain(lambda: made.merge(place / "out", *words), place, contents(root / "wanted" / "out"))
    chain.coarse = coarse
    if before is not None:
        assert made.merge(chain.out, *before).code == 0
        chain.old = contents(chain.out)
    return chain


def test_each_step_of_an_overwriting_merge_may_fail(made: Family, tmp_path: Path) -> None:
    former = ["-m", "ram", "-p", "epsilon=1e-3"]
    chain = chain_of(made, tmp_path, ["--overwrite"], former, coarse=True)
    chain.to_the_end()
    assert chain.steps() >= STEPS - {("pwrite", "the survey journal")}
    assert ("rename", "the former output") in chain.steps()
    assert chain.said[8] >= 20
    assert chain.said[1] >= 20


SCENARIOS: dict[str, tuple[list[object], list[object] | None]] = {
    "two passes": ([], None),
    "over a former output": (["--overwrite"], ["-m", "ram", "-p", "epsilon=1e-3"]),
    "quantiles and norms": (["-m", "ties", "-p", "density=0.3", "--max-norm", "largest"], None),
    "one scan, tallies only": (["-m", "ram", "--no-keep-store", "--dtype", "f32"], None),
}


@pytest.mark.soak
@pytest.mark.parametrize(("words", "before"), SCENARIOS.values(), ids=SCENARIOS.keys())
def test_each_call_of_a_merge_may_fail(
    made: Family, words: list[object], before: list[object] | None, tmp_path: Path
) -> None:
    chain = chain_of(made, tmp_path, words, before, coarse=False)
    chain.to_the_end()
    print(len(chain.failed), "kinds of calls failed")
    assert len(chain.failed) >= 90
    surveyed = ("pwrite", "the survey journal") in chain.steps()
    assert surveyed == ("ties" in words)


@pytest.mark.soak
def test_each_call_of_counting_into_a_store_may_fail(made: Family, tmp_path: Path) -> None:
    """And a merge takes over what was counted."""
    wanted = made.merge(tmp_path / "wanted")
    assert wanted.code == 0
    place = tmp_path / "place"
    place.mkdir()
    counting = ["stats", *made.paths, "--store", place / "counts.zarr", "-q", "--workers", "1"]

    def both() -> Said:
        said = command(*counting)
        return said if said.code else made.merge(place / "out", "--store", place / "counts.zarr")

    chain = Chain(both, place, contents(tmp_path / "wanted"), store=place / "counts.zarr")
    chain.to_the_end()
    assert len(chain.failed) >= 90


# Disks of their own


def fill(disk: Path, size: int) -> list[Path]:
    """Take all there is by files of `size` bytes; those files."""
    (disk / "ballast").mkdir()
    files: list[Path] = []
    while True:
        files.append(disk / "ballast" / str(len(files)))
        try:
            files[-1].write_bytes(bytes(size))
        except OSError as full:
            if full.errno == errno.ENOSPC:
                return files
            raise


DISKS = {
    "tmpfs": ("tmpfs", "size=1m", 4096),
    "ext4": ("ext4", "", 4096),
    "a tmpfs without inodes": ("tmpfs", "size=16m,nr_inodes=200", 0),
}


@pytest.mark.parametrize(("kind", "options", "size"), DISKS.values(), ids=DISKS.keys())
def test_a_full_disk_with_a_little_room_made_again_and_again(
    made: Family,
    good: dict[str, Any],
    kind: str,
    options: str,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the system said of free space before: others write there too."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    with mounted(tmp_path / "disk", kind, options, size=3 << 20) as disk:
        out, before = disk / "out", (0, 0)
        ballast = fill(disk, size)
        refused = 0
        while (said := made.merge(out)).code:
            assert said.code == 8, said
            assert re.match(
                rf"error: {disk}/out.*: No space left on device; free some space and run", said.err
            )
            now = vouched(out) if (work_of(out) / "plan.json").exists() else before
            assert now >= before
            before = now
            refused += 1
            for _ in range(3):
                ballast.pop().unlink(missing_ok=True)
        assert refused >= 10
        assert contents(out) == good


def test_a_full_disk_of_the_store_alone_is_named(
    made: Family, good: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    with mounted(tmp_path / "disk", "tmpfs", "size=64k") as disk:
        said = made.merge(tmp_path / "out", "--store", disk / "counts")
        assert said.code == 8
        assert said.err.startswith(f"error: {disk}/counts")
        remount(disk, "size=16m")
        assert made.merge(tmp_path / "out", "--store", disk / "counts").code == 0
        assert contents(tmp_path / "out") == good


def test_too_little_free_space_is_said_before_anything_is_written(made: Family, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=8k") as disk:
        said = made.merge(disk / "out")
        assert said.code == 8
        assert "free; free some space, or choose another disk\n" in said.err
        assert list(disk.iterdir()) == []


def test_a_full_place_for_temporary_files_is_named(
    made: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `stats` without a store keeps its journal."""
    with mounted(tmp_path / "disk", "tmpfs", "size=4k") as disk:
        (disk / "ballast").write_bytes(bytes(4096))
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        said = command("stats", *made.paths, "-q")
        assert said.code == 8
        assert said.err.startswith(f"error: {disk}/ramstream-")
        assert "No space left on device; free some space" in said.err
        assert list(disk.iterdir()) == [disk / "ballast"]


# What cannot be read


@pytest.mark.parametrize("method", ["ram-plus", "ram"])
@pytest.mark.parametrize("checkpoint", [0, 2], ids=["base", "agent"])
def test_a_range_that_cannot_be_read_is_named_and_the_run_goes_on_when_it_can(
    made: Family, method: str, checkpoint: int, tmp_path: Path
) -> None:
    assert made.merge(tmp_path / "good", "-m", method).code == 0
    out, words = tmp_path / "out", ("-m", method)
    file = made.paths[checkpoint] / "model-00002-of-00002.safetensors"
    begin = file.stat().st_size - 1000
    with unreadable(file, begin, begin + 512):
        said = made.merge(out, *words)
        assert said.code == 5
        assert said.err == (
            f"error: {file}: cannot be read at offset {begin:,}: Input/output error; "
            "mend that or restore the file, and run the same command again\n"
        )
        counted, merged = vouched(out)
        assert counted >= 2
        assert merged >= 2 or method == "ram-plus"
        assert made.merge(out, *words).err == said.err
        assert vouched(out) >= (counted, merged)
        assert not out.exists()
    assert made.merge(out, *words).code == 0
    assert contents(out) == contents(tmp_path / "good")


def test_a_range_that_cannot_be_read_in_the_second_pass_is_named(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    file = made.paths[1] / "model-00001-of-00002.safetensors"
    out = tmp_path / "out"

    def stop(call: Call) -> None:
        if call.kind == ("pwrite", "out.ramstream/journal.jsonl") and call.nth == 4:
            raise refusal(errno.ENOSPC, call, tmp_path)

    with Calls(tmp_path, stop):
        assert made.merge(out).code == 8
    before = vouched(out)
    with unreadable(file, 2000, 3000):
        said = made.merge(out)
    assert (said.code, said.err[: said.err.index(";")]) == (
        5,
        f"error: {file}: cannot be read at offset 2,000: Input/output error",
    )
    assert vouched(out) >= before
    assert made.merge(out).code == 0
    assert contents(out) == good


def test_a_disk_that_is_broken_under_an_input_is_named(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    place, image, copy = (tmp_path / name for name in ("disk", "disk.image", "copy.image"))
    with mounted(place, "ext4"):
        shutil.copytree(made.paths[2], place / "agent-2")
    shutil.copy(image, copy)
    broken = place / "agent-2" / "model-00002-of-00002.safetensors"
    words = ["merge", *made.paths[:2], broken.parent, "-o", tmp_path / "out", "-q", "--device", "cpu"]
    with mounted(place, "ext4"):
        os.truncate(image, last_block(broken))
        said = command(*words)
        assert said.code == 5
        assert re.match(r"error: \S*agent-2/\S+: .*Input/output error", said.err)
    shutil.copy(copy, image)
    with mounted(place, "ext4"):
        assert command(*words).code == 0
    assert promised(tmp_path / "out") == {name: good[name] for name in promised(tmp_path / "out")}


def last_block(file: Path) -> int:
    """Where the end of a file lies on its disk."""
    size = os.statvfs(file).f_bsize
    number = array.array("i", [(file.stat().st_size - 1) // size])
    with open(file, "rb") as opened:
        fcntl.ioctl(opened, 1, number)  # FIBMAP
    return number[0] * size


# What may not be read or written


def test_folders_that_may_only_be_read_are_enough_for_inputs(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    inputs = [Path(shutil.copytree(path, tmp_path / "in" / path.name)) for path in made.paths]
    for path in sorted((tmp_path / "in").rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "in").chmod(0o555)
    before = {path: path.stat() for path in (tmp_path / "in").rglob("*")}
    try:
        with bound_by_permissions():
            said = command(
                "merge", *inputs, "-o", tmp_path / "out", "-q", "--device", "cpu", "--store", tmp_path / "st"
            )
            assert said.code == 0, said
            assert command("stats", *inputs, "-q").code == 0
            assert command("stats", tmp_path / "st", "--agents", "1").code == 0
        assert {path: path.stat().st_mtime_ns for path in before} == {
            p: s.st_mtime_ns for p, s in before.items()
        }
        wanted = {name: data for name, data in good.items() if name not in ("README.md", "ramstream.json")}
        assert wanted.items() <= contents(tmp_path / "out").items()
        modes = {
            stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()
        }
        assert modes == {0o666 & ~umask()}, "not the inputs' modes"
    finally:
        for path in (tmp_path / "in", *inputs, inputs[0] / "1_Pooling"):
            path.chmod(0o755)


def umask() -> int:
    """The process's umask."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


@pytest.mark.parametrize(
    "where", ["", "model-00001-of-00002.safetensors", "tokenizer.json", "1_Pooling/config.json"]
)
def test_an_input_that_may_not_be_read_is_named(made: Family, where: str, tmp_path: Path) -> None:
    base = Path(shutil.copytree(made.paths[0], tmp_path / "base"))
    mode = (base / where).stat().st_mode
    (base / where).chmod(0)
    words = ["merge", base, *made.paths[1:], "-o", tmp_path / "out", "-q", "--device", "cpu"]
    try:
        with bound_by_permissions():
            said = command(*words)
    finally:
        (base / where).chmod(mode)
    assert said.code == 5
    assert re.match(rf"error: (\S*/)?base/?{re.escape(where)}: .*Permission denied", said.err)
    assert not (tmp_path / "out.ramstream").exists()
    assert command(*words).code == 0


@pytest.fixture
def fixed(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be made."""
    folder = tmp_path / "fixed"
    folder.mkdir()
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def test_a_place_where_nothing_can_be_made_is_named(made: Family, fixed: Path, tmp_path: Path) -> None:
    with bound_by_permissions():
        said = made.merge(fixed / "out")
        assert (said.code, said.err) == (
            3,
            f"error: {fixed}/out.ramstream cannot be made: Permission denied; choose another place\n",
        )
        said = made.merge(tmp_path / "out", "--store", fixed / "deep" / "counts")
        assert (said.code, said.err) == (
            3,
            f"error: {fixed}/deep cannot be made: Permission denied; choose another place\n",
        )
        said = made.merge(tmp_path / "out", "--store", fixed / "counts")
        assert said.code in (1, 3)
        assert f"{fixed}/counts" in said.err
        assert "Permission denied" in said.err
        said = made.merge(tmp_path / "out", "--dry-run", "--config-out", fixed / "merge.yaml")
        assert said.code in (1, 3)
        assert f"{fixed}/merge.yaml" in said.err
    assert list(fixed.iterdir()) == []
    assert made.merge(tmp_path / "out").code == 0


@pytest.mark.parametrize(
    ("counted", "file"),
    [
        (True, "journal.jsonl"),
        (True, "lock"),
        (True, "out/model-00001-of-00002.safetensors"),
        (True, ""),
        (False, "overlap.zarr/journal.jsonl"),
        (False, "overlap.zarr/lock"),
        (False, "overlap.zarr"),
    ],
)
def test_an_unfinished_run_that_may_not_be_written_to_is_named_and_kept(
    made: Family, good: dict[str, Any], counted: bool, file: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    unfinished(made, out, counted)
    before = vouched(out)
    path = work_of(out) / file
    mode = path.stat().st_mode
    path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with bound_by_permissions():
            said = made.merge(out)
    finally:
        path.chmod(mode)
    assert said.code == 1
    assert re.match(
        rf"error: {path}\S*: Permission denied; mend that and run the same command again", said.err
    )
    assert vouched(out) >= before
    assert made.merge(out).code == 0
    assert contents(out) == good


@pytest.mark.parametrize("file", ["overlap.zarr/journal.jsonl", "overlap.zarr/lock", "overlap.zarr"])
def test_a_complete_store_need_not_be_written_to(
    made: Family, good: dict[str, Any], file: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    unfinished(made, out)
    path = work_of(out) / file
    mode = path.stat().st_mode
    path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with bound_by_permissions():
            assert made.merge(out).code == 0
    finally:
        path.chmod(mode)
    assert contents(out) == good


def unfinished(made: Family, out: Path, counted: bool = True) -> None:
    """A merge that stopped when two units were merged, or counted."""
    journal = f"{work_of(out).name}/{'' if counted else 'overlap.zarr/'}journal.jsonl"

    def stop(call: Call) -> None:
        if call.kind == ("pwrite", journal) and call.nth == 4 + counted:
            raise refusal(errno.ENOSPC, call, out.parent)

    with Calls(out.parent, stop):
        assert made.merge(out).code == 8
    assert 2 <= vouched(out)[counted] < 5


# File systems that cannot be written to, or lack something


def test_inputs_on_a_read_only_file_system_are_merged(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs") as disk:
        inputs = [Path(shutil.copytree(path, disk / path.name)) for path in made.paths]
        remount(disk, "ro")
        out = tmp_path / "out"
        assert command("merge", *inputs, "-o", out, "-q", "--device", "cpu", "--io", "mmap").code == 0
        assert promised(out).items() <= good.items()
        said = command("merge", *inputs, "-o", disk / "out", "-q", "--device", "cpu")
        assert (said.code, said.err) == (
            3,
            f"error: {disk}/out.ramstream cannot be made: Read-only file system; choose another place\n",
        )


def test_a_file_system_that_becomes_read_only_loses_nothing(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    """As one does that found itself damaged, or a share that was mounted otherwise meanwhile."""
    with mounted(tmp_path / "disk", "tmpfs") as disk:
        out = disk / "out"
        for counted, file in ((False, "lock"), (True, "lock")):
            unfinished(made, out, counted)
            before = vouched(out)
            remount(disk, "ro")
            said = made.merge(out)
            assert (said.code, said.err) == (
                1,
                f"error: {work_of(out)}/{file}: Read-only file system; mend that and run the same command again, "
                "it goes on where it stopped\n",
            )
            assert vouched(out) == before
            remount(disk, "rw")
        assert made.merge(out).code == 0
        assert contents(out) == good


def test_what_is_finished_is_read_from_a_read_only_file_system(
    made: Family, good: dict[str, Any], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs") as disk:
        out, counts = disk / "out", disk / "counts"
        assert made.merge(out, "--store", counts).code == 0
        remount(disk, "ro")
        assert "already complete" in made.merge(out, "--store", counts).out
        assert command("verify", out, "--read-data", "-q").code == 0
        assert command("stats", out).code == 0
        assert command("stats", counts, "--agents", "2").code == 0
        assert made.merge(tmp_path / "other", "--store", counts).code == 0
        assert contents(tmp_path / "other") == good
        said = made.merge(out, "--store", counts, "--overwrite", "-p", "r=0.5")
        assert (said.code, "Read-only file system" in said.err) == (3, True)
        assert contents(out) == good


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_space_is_only_slower(
    made: Family, good: dict[str, Any], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assert made.merge(tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == good


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("where", ["out.ramstream", "counts"])
def test_a_file_system_without_locks_is_an_error_that_says_so(
    made: Family, number: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def cannot(descriptor: int, operation: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name == where:
            raise OSError(number, os.strerror(number))
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", cannot)
        said = made.merge(tmp_path / "out", "--store", tmp_path / "counts")
    assert said.code == 3
    assert said.err.startswith(f"error: {tmp_path}/{where}/lock cannot be locked: {os.strerror(number)}; ")
    assert "choose a place on a file system that has locks" in said.err
    assert not (tmp_path / "out").exists()
    assert made.merge(tmp_path / "out", "--store", tmp_path / "counts").code == 0
