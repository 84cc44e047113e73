"""Damaged checkpoints by the thousand: they open and merge, or are refused; nothing else ever happens.

Without slow tests some three thousand cases are checked, with them 50,000, or as many as RAMSTREAM_FUZZ says:

    RAMSTREAM_FUZZ=1000000 pytest tests/test_fuzz.py -m slow

Cases are numbered and the same every time. What fails is written into a folder, and looked at, with
`python tests/fuzz.py KIND NUMBER FOLDER`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import fuzz
import numpy as np
import pytest
from hostile import mutated

from ramstream import Checkpoint
from ramstream.errors import CheckpointError

FEW = 2_500
MANY = int(os.environ.get("RAMSTREAM_FUZZ", "50000"))


def check(home: Path, kind: str, cases: int) -> None:
    """No case of these is a finding, and they are no monotony: some are refused, some get as far as a plan."""
    report = fuzz.run(home, kind, range(cases))
    assert not report.findings, "\n".join(report.findings[:20])
    assert sum(report.ends.values()) == cases
    assert report.ends["refused" if kind != "tokenizer" else "planned"] > cases / 20
    assert report.ends["planned"] > cases / 50


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_few_cases_end_as_they_may(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, fuzz.dealt(kind, FEW))


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_many_cases_end_as_they_may(kind: str, tmp_path: Path) -> None:
    check(tmp_path, kind, fuzz.dealt(kind, MANY))


@pytest.mark.parametrize("kind", fuzz.GROWN)
def test_small_files_that_ask_for_much_are_soon_done(kind: str, tmp_path: Path) -> None:
    check_grown(tmp_path, kind, 6)


@pytest.mark.soak
@pytest.mark.parametrize("kind", fuzz.GROWN)
def test_many_small_files_that_ask_for_much_are_soon_done(kind: str, tmp_path: Path) -> None:
    check_grown(tmp_path, kind, 200)


def check_grown(home: Path, kind: str, cases: int) -> None:
    """No case of these is a finding."""
    report = fuzz.run(home, kind, range(cases))
    assert not report.findings, "\n".join(report.findings[:20])
    assert sum(report.ends.values()) == cases


@pytest.mark.parametrize("kind", [*fuzz.KINDS, *fuzz.GROWN])
def test_a_case_is_the_same_every_time(kind: str, tmp_path: Path) -> None:
    written, cases = [], 3 if kind in fuzz.GROWN else 40
    for home in "ab":
        bench = fuzz.Bench(tmp_path / home, kind)
        for number in range(cases):
            role, rng = bench.write(number)
            written.append((role, rng.random(), bench.changed))
    assert written[:cases] == written[cases:]


def test_a_case_can_be_looked_at(tmp_path: Path) -> None:
    command = [sys.executable, fuzz.__file__, "header", "1", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    where, end = done.stdout.splitlines()
    assert Path(where, "model.safetensors").is_file()
    assert end in ("refused", "unplanned", "planned", "unmerged", "merged")


# --- what must be found is found ---


def findings(monkeypatch: pytest.MonkeyPatch, home: Path, instead: Callable[[], object]) -> list[str]:
    """What is found where opening a checkpoint does something else first."""
    real = Checkpoint.open

    def opened(path: Path) -> Checkpoint:
        if path.parent.name == "bad":
            instead()
        return real(path)

    bench = fuzz.Bench(home, "config")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "open", opened)
        try:
            with fuzz.bounded_memory():
                bench.check(4)
        except fuzz.Finding as finding:
            return [str(finding)]
    return []


def _tried(act: Callable[[], object]) -> None:
    with suppress(OSError, ImportError):
        act()


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("instead", "found"),
    [
        (lambda: None, None),
        (lambda: Path("/etc/passwd").read_bytes(), "it did what it may not: open .*passwd"),
        (lambda: _tried(lambda: os.rename("/gone", "/away")), "os.rename"),
        (lambda: _tried(lambda: os.remove("/gone/model")), "os.remove"),
        (lambda: _tried(lambda: Path("/gone/model").write_bytes(b"x")), "open .*gone"),
        (lambda: os.system("true"), "os.system"),
        (lambda: subprocess.run(["true"]), "subprocess.Popen"),
        (lambda: _tried(lambda: __import__("somebodys_model")), "import .*somebodys_model"),
        (lambda: time.sleep(99), "after 0.5 s still going"),
        (lambda: [0] * (1 << 30), "MemoryError"),
        (lambda: np.ones(1 << 28), "MemoryError"),
        (lambda: _raise(KeyError("w")), "KeyError: 'w'"),
        (lambda: _raise(RecursionError("deep")), "RecursionError: deep"),
        (lambda: _raise(CheckpointError("it is bad")), "a message that does not name"),
        (lambda: _raise(CheckpointError("agent: \x1b[2J")), "control characters"),
        (lambda: _raise(CheckpointError("base agent" + "x" * 50_000)), "a text of 50,010 characters"),
    ],
)
def test_the_watch_finds_what_may_not_be(
    instead: Callable[[], object], found: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.5)
    seen = findings(monkeypatch, tmp_path, instead)
    assert (seen == []) == (found is None)
    assert found is None or re.search(found, seen[0]), seen


def test_a_tensor_that_others_read_otherwise_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind, reader in (("header", "_by_safetensors"), ("pickle", "_by_torch")):
        bench = fuzz.Bench(tmp_path, kind)
        theirs = getattr(fuzz, reader)

        def other(path: Path, content: bytes, theirs: object = theirs) -> fuzz.Read | None:
            found = theirs(path, content)
            name = next(iter(found))
            return {**found, name: (*found[name][:2], b"others")}

        with monkeypatch.context() as patch:
            patch.setattr(fuzz, reader, other)
            with pytest.raises(fuzz.Finding, match=r"for others it is .*others"):
                fuzz.compare(bench.good["agent"])


def test_damage_leaves_the_tables_as_they_are() -> None:
    before = repr((mutated.VALUES, mutated.NAMES, mutated.NUMBERS))
    rng = Random(0)
    for _ in range(2_000):
        mutated.json_text(rng, b'{"a": [1, {"b": 2}], "c": [3, 4]}')
    assert repr((mutated.VALUES, mutated.NAMES, mutated.NUMBERS)) == before
