"""Inputs that change between passes, between runs, or under a run's eyes: no output is part old and part new."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pytest
from faults import Call, Calls, Said, command, refusal, work_of
from runs import Tensor, promised, random_bits, write_family

UNIT = 1 << 16
"""Elements of a grain here."""

SIZE = 11 * UNIT + 100


small_units = faults.small_units(UNIT)


@dataclass
class Inputs:
    """A base and two agents of one file each."""

    paths: list[Path]

    @property
    def agent(self) -> Path:
        """The file that changes."""
        return self.paths[2] / "model.safetensors"

    def merge(self, out: Path, *more: object) -> Said:
        return command("merge", *self.paths, "-o", out, "-q", "--device", "cpu", "--workers", "1", *more)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    rng = np.random.default_rng(9)
    base = random_bits(rng, "F8_E4M3", SIZE)
    models = [{"w": Tensor("F8_E4M3", (SIZE,), base + (rng.random(SIZE) < k / 4))} for k in range(3)]
    return Inputs(write_family(tmp_path_factory.mktemp("in"), models[0], models[1:]))


@pytest.fixture
def inputs(original: Inputs, tmp_path: Path) -> Inputs:
    """Copies that a test may spoil."""
    return Inputs([Path(shutil.copytree(path, tmp_path / "in" / path.name)) for path in original.paths])


def altered(data: bytes) -> bytes:
    """Other weights at both ends of a file, where no sample of its fingerprint is taken."""
    step, found = (len(data) - 4096) // 63, bytearray(data)
    for sample in (1, 61):
        begin = sample * step + 4200
        found[begin : begin + 3000] = bytes(byte ^ 1 for byte in found[begin : begin + 3000])
    return bytes(found)


def write_into(path: Path, data: bytes) -> None:
    """Other bytes in the same file."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def in_place(path: Path) -> None:
    write_into(path, altered(path.read_bytes()))


def in_place_with_its_time(path: Path) -> None:
    before = path.stat()
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def by_rename(path: Path) -> None:
    (path.parent / "new").write_bytes(altered(path.read_bytes()))
    os.rename(path.parent / "new", path)


def by_rename_with_its_time(path: Path) -> None:
    before = path.stat()
    by_rename(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def grown(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(bytes(4096))


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    os.truncate(path, 0)


HARM = (in_place, in_place_with_its_time, by_rename, by_rename_with_its_time, cut, grown, removed, emptied)


def by_its_like(path: Path) -> None:
    """Replaced by a copy."""
    shutil.copy(path, path.parent / "new")
    os.rename(path.parent / "new", path)


def touched(path: Path) -> None:
    os.utime(path)


def made_private(path: Path) -> None:
    """Nothing but the mode, as a backup or a colleague may change it."""
    path.chmod(0o600)


HARMLESS = (by_its_like, touched, made_private)

COUNT, MERGE = "out.ramstream/overlap.zarr/journal.jsonl", "out.ramstream/journal.jsonl"

MOMENTS = {
    "while counting": ("ram-plus", Call("pwrite", COUNT, 5)),
    "between the passes": ("ram-plus", Call("open", "out.ramstream/overlap.zarr/zarr.json.new")),
    "while merging": ("ram-plus", Call("pwrite", MERGE, 6)),
    "in the only scan": ("ram", Call("pwrite", MERGE, 6)),
    "while sifting": ("ties", Call("pwrite", "out.ramstream/survey.jsonl", 4)),
    "while merging what was sifted": ("ties", Call("pwrite", MERGE, 6)),
    "when all is read": ("ram", Call("open", "out.ramstream/out/config.json")),
}
"""The method, and ahead of which call."""

WORDS = {"ram-plus": [], "ram": ["-m", "ram"], "ties": ["-m", "ties", "-p", "density=0.3"]}


Wanted = dict[tuple[str, bool], dict[str, bytes]]
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def wanted(original: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """What comes of the inputs as they were, and as they are when changed, by method."""
    root, found = tmp_path_factory.mktemp("wanted"), {}
    other = Inputs([*original.paths[:2], Path(shutil.copytree(original.paths[2], root / "agent-2"))])
    in_place(other.agent)
    for method, words in WORDS.items():
        for changed, given in ((False, original), (True, other)):
            assert given.merge(root / f"{method}-{changed}", *words).code == 0
            found[method, changed] = promised(root / f"{method}-{changed}")
        assert found[method, False] != found[method, True]
    return found


class Changed(Calls):
    """The second agent's file is changed ahead of one call; with `stop` the run ends there."""

    def __init__(self, inputs: Inputs, root: Path, at: Call, change: Change, stop: bool) -> None:
        def before(call: Call) -> None:
            if call == at:
                self.happened = True
                if stop:
                    raise refusal(errno.ENOSPC, call, root)
                change(inputs.agent)

        super().__init__(root, before)
        self.happened = False


def check(said: Said, out: Path, outcomes: list[dict[str, bytes]]) -> None:
    """Either an error that names the agent, or an output that is wholly of the one or wholly of the other."""
    if said.code:
        assert said.code in (5, 6, 7), said
        assert "agent-2" in said.err
        assert not out.exists()
    else:
        assert promised(out) in outcomes


QUICK = 16
"""Of so many cases one is not slow."""


def cases(ways: Sequence[str]) -> list[Any]:
    """Every moment with every change, and the ways of reading; a file cut under a mapping has a test of its own."""
    found = []
    for name, (method, at) in MOMENTS.items():
        for change in (*HARM, *HARMLESS):
            for io in ways:
                if io == "mmap" and change in (cut, emptied):
                    continue
                silent = change is in_place_with_its_time and name == "in the only scan" and io == "pread"
                quick = silent or len(found) % QUICK == 0
                words = [*WORDS[method], "--io", io]
                marks = () if quick else pytest.mark.soak
                found.append(
                    pytest.param(
                        method, words, at, change, id=f"{change.__name__}, {name}, {io}", marks=marks
                    )
                )
    return found


@pytest.mark.parametrize(("method", "words", "at", "change"), cases(["pread", "mmap"]))
def test_an_input_that_changes_under_a_run(
    inputs: Inputs, wanted: Wanted, method: str, words: list[str], at: Call, change: Change, tmp_path: Path
) -> None:
    out, data = tmp_path / "out", inputs.agent.read_bytes()
    with Changed(inputs, tmp_path, at, change, stop=False) as changed:
        said = inputs.merge(out, *words)
    assert changed.happened
    check(said, out, [wanted[method, False]])
    if change is made_private:
        assert said.code == 0
    if change not in HARMLESS:
        restore(inputs, data)
    finish(inputs, out, words)
    assert promised(out) == wanted[method, False]


@pytest.mark.parametrize(("method", "words", "at", "change"), cases(["pread"]))
def test_an_input_that_changes_between_two_runs(
    inputs: Inputs, wanted: Wanted, method: str, words: list[str], at: Call, change: Change, tmp_path: Path
) -> None:
    out, data = tmp_path / "out", inputs.agent.read_bytes()
    with Changed(inputs, tmp_path, at, change, stop=True) as changed:
        assert inputs.merge(out, *words).code == 8
    assert changed.happened
    change(inputs.agent)
    said = inputs.merge(out, *words)
    check(said, out, [wanted[method, False], wanted[method, True]])
    if change in HARMLESS:
        assert said.code == 0
    if said.code:
        restore(inputs, data)
        assert inputs.merge(out, *words).code == 0
        assert promised(out) == wanted[method, False]


def finish(inputs: Inputs, out: Path, words: list[str]) -> None:
    """The same command again; and once more without its work, where it says that some was done from other bytes."""
    said = inputs.merge(out, *words)
    if said.code:
        assert said.code == 7
        assert "restore it, or remove " in said.err
        shutil.rmtree(work_of(out))
        said = inputs.merge(out, *words)
    assert said.code == 0, said


def restore(inputs: Inputs, data: bytes) -> None:
    """The file as it was, though a new one where it was removed."""
    if inputs.agent.exists():
        write_into(inputs.agent, data)
    else:
        inputs.agent.write_bytes(data)


@pytest.mark.parametrize("stored", [False, True], ids=["", "into a store"])
@pytest.mark.parametrize("change", [in_place, in_place_with_its_time, by_rename, cut, made_private])
def test_an_input_that_changes_while_it_is_counted(
    inputs: Inputs, change: Change, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, words = inputs.agent.read_bytes(), ["stats", *inputs.paths, "--json", "-q", "--workers", "1"]
    wanted = command(*words)
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))

    def before(call: Call) -> None:
        if call.name == "pwrite" and call.file.endswith("journal.jsonl") and call.nth == 6:
            change(inputs.agent)

    more = ["--store", place / "counts"] if stored else []
    with Calls(place, before):
        said = command(*words, *more)
    if change is made_private:
        assert said == wanted
        return
    assert said.code == 7
    assert "agent-2" in said.err
    restore(inputs, data)
    again = command(*words, *more)
    if again.code:
        assert f"restore it, or remove {place}/counts, which was made of the former" in again.err
        shutil.rmtree(place / "counts")
    assert command(*words, *more) == wanted


MAPPED = """
import os, sys
from faults import small_grains
from ramstream.checkpoint.reader import MappedReader
from ramstream.cli import main
unit, path, left, read = int(sys.argv.pop(1)), sys.argv.pop(1), [3], MappedReader.read
def cut(self, file, *rest):
    found = read(self, file, *rest)
    if str(self._paths[file]) == path:
        left[0] -= 1
        if not left[0]:
            os.truncate(path, 4096)
    return found
MappedReader.read = cut
with small_grains(unit):
    main()
"""
"""`ramstream`, that cuts a file when it has just been handed its third range of it."""


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="no SIGBUS here")
def test_a_mapped_file_that_is_cut_ends_the_process_and_the_next_run_names_it(
    inputs: Inputs, tmp_path: Path
) -> None:
    """And the same command goes on when it is restored."""
    data, out = inputs.agent.read_bytes(), tmp_path / "out"
    words = ["merge", *inputs.paths, "-o", out, "-q", "--device", "cpu", "--workers", "1", "--io", "mmap"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", MAPPED, str(UNIT), inputs.agent, *map(str, words)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == -signal.SIGBUS, ended
    assert not out.exists()
    said = command(*words)
    assert said.code == 5
    assert "agent-2/model.safetensors" in said.err
    restore(inputs, data)
    assert command(*words).code == 0
