"""Runs at once on one place, locks, and what a machine may be like: clock, locale, umask, no home, no cache."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from faults import Family, command, vouched, work_of
from forks import Forks
from runs import contents, plan_of, promised
from test_architecture import SOURCES

import ramstream
from ramstream import durable
from ramstream.overlap import OverlapStore

small_units, made = faults.small_units(), faults.made


@pytest.fixture(scope="module")
def good(made: Family) -> dict[str, dict[str, Any]]:
    """Outputs by the r they were made with."""
    found = {}
    for r in ("0.1", "2"):
        assert made.merge(made.root / r, "-p", f"r={r}").code == 0
        found[r] = contents(made.root / r)
    return found


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("forks") / "said") as running:
        yield running


BUSY = "|".join(
    (
        r"error: \S+ is in use by (process \d+ on \S+|another process); wait for it or stop it\n",
        r"error: \S+ was in use by a run that just ended; run the command again\n",
    )
)


def refused(said: str) -> bool:
    """Whether a run says that another is there, and nothing else."""
    return re.fullmatch(BUSY, said) is not None


def nothing(made: Family, forks: Forks, out: Path) -> None:
    """Nothing was there before."""


def half_done(made: Family, forks: Forks, out: Path) -> None:
    """A run that was killed."""
    pid = forks.start(*made.argv(out), slow=0.001)
    while vouched(out)[0] < 2:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid)


def another_output(made: Family, forks: Forks, out: Path) -> None:
    """A model of another merge."""
    assert made.merge(out, "-m", "ram").code == 0


def a_store(made: Family, forks: Forks, out: Path) -> None:
    """What a finished merge kept, without its output."""
    assert made.merge(out).code == 0
    shutil.rmtree(out)


BEFORE = (nothing, half_done, another_output, a_store)


@pytest.mark.parametrize("rounds", [8, pytest.param(60, marks=pytest.mark.soak)])
def test_two_runs_on_one_output_end_with_one_whole_output(
    made: Family, good: dict[str, Any], forks: Forks, rounds: int, tmp_path: Path
) -> None:
    """Started together: one works and the other is refused, or comes when the first is done."""
    rng, ended = random.Random(rounds), Counter[tuple[int, ...]]()
    for number in range(rounds):
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        BEFORE[number % len(BEFORE)](made, forks, out)
        rs = rng.choice([("0.1", "0.1"), ("0.1", "2")])
        options = (
            ["--overwrite", *rng.choice([[], ["--no-keep-store"]])] if number % 4 != 1 else ["--overwrite"]
        )
        slow, late = rng.choice([0.0, 0.001]), rng.choice([0.0, 0.0, rng.random() * 0.2])
        pids = [
            forks.start(*made.argv(out, "-p", f"r={r}", *options), after=0.03 + late * k, slow=slow)
            for k, r in enumerate(rs)
        ]
        codes, said = zip(*(forks.wait(pid) for pid in pids), strict=True)
        ended[tuple(sorted(codes))] += 1
        assert 0 in codes, (number, codes, said)
        assert all(
            code == 0 or (code == 6 and refused(err)) for code, err in zip(codes, said, strict=True)
        ), said
        assert contents(out) in [good[r] for r, code in zip(rs, codes, strict=True) if code == 0]
        left = {path.name for path in work_of(out).iterdir()} if work_of(out).exists() else set()
        assert left <= {"overlap.zarr", "lock"}
    print(dict(ended))
    assert ended[0, 6] >= rounds // 4


@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_two_runs_on_one_store_end_with_whole_outputs(
    made: Family, good: dict[str, dict[str, Any]], forks: Forks, rounds: int, tmp_path: Path
) -> None:
    """And one that only counts; whoever is refused ends right when it comes again."""
    rng, ended = random.Random(rounds), Counter[int]()
    for number in range(rounds):
        root = tmp_path / str(number)
        root.mkdir()
        wanted: list[tuple[list[object], dict[str, Any], Path]] = [
            ([*made.argv(root / r, "-p", f"r={r}", "--store", root / "counts")], good[r], root / r)
            for r in rng.sample(["0.1", "2"], 2)
        ]
        counting = ["stats", *made.paths, "--store", root / "counts", "-q"]
        rows = [words for words, _, _ in wanted]
        rows.insert(rng.randrange(3), counting)
        slow = rng.choice([0.0, 0.001])
        pids = [forks.start(*row, after=0.03 + rng.random() * 0.1, slow=slow) for row in rows]
        for row, (code, said) in zip(rows, [forks.wait(pid) for pid in pids], strict=True):
            ended[code] += 1
            assert code == 0 or (code == 6 and refused(said)), said
            if code:
                assert forks.run(*row) == (0, "")
        for _, output, out in wanted:
            assert contents(out) == output
    assert ended[0] >= rounds
    assert ended[6] >= 1


def test_two_that_make_one_store_at_once_do_not_touch_what_the_other_has_half_made(
    made: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also two processes of one number, of two hosts or containers: nothing is locked that is not there yet."""
    plan, store = plan_of(made.paths).count, tmp_path / "counts"
    monkeypatch.setattr(os, "getpid", lambda: 7)
    write_tree = durable.write_tree

    def overtaken(new: Path, files: Any) -> None:
        write_tree(new, files)
        monkeypatch.setattr(durable, "write_tree", write_tree)
        before = sorted(new.rglob("*"))
        OverlapStore.create(store, plan, bits=True)
        assert sorted(new.rglob("*")) == before

    monkeypatch.setattr(durable, "write_tree", overtaken)
    assert OverlapStore.create(store, plan, bits=True).digest == plan.digest
    assert list(tmp_path.iterdir()) == [store], "nothing is left of whoever was slower"
    assert made.merge(tmp_path / "out", "--store", store).code == 0


def test_questions_while_a_merge_works_are_answered_or_refused_and_do_not_disturb_it(
    made: Family, good: dict[str, dict[str, Any]], forks: Forks, tmp_path: Path
) -> None:
    out, store = tmp_path / "out", tmp_path / "counts"
    wanted = json.loads(command("stats", *made.paths, "--json", "-q").out)["agents"]
    answers: Counter[str] = Counter()
    pid = forks.start(*made.argv(out, "--store", store), slow=0.004)
    while not (out / "ramstream.json").exists():
        for question in (store, out):
            said = command("stats", question, "--json")
            if said.code == 0:
                assert json.loads(said.out)["agents"] == wanted
            elif said.code == 6:
                assert f"{store} is unfinished; run the same command again to complete it" in said.err
            else:
                assert said.code == 3
                assert not store.exists() or question == out
            answers[f"{question.name} {said.code}"] += 1
        assert command("verify", out, "-q").code in (0, 3)
    assert forks.wait(pid) == (0, "")
    assert contents(out) == good["0.1"]
    assert answers["counts 6"] >= 1
    assert answers["counts 0"] >= 1
    assert answers["out 3"] >= 1


def test_a_run_that_counts_into_a_store_that_a_merge_fills_is_refused(
    made: Family, forks: Forks, tmp_path: Path
) -> None:
    pid = forks.start(*made.argv(tmp_path / "out", "--store", tmp_path / "counts"), slow=0.004)
    while vouched(tmp_path / "out", tmp_path / "counts")[0] < 1:
        time.sleep(0.001)
    said = command("stats", *made.paths, "--store", tmp_path / "counts", "-q")
    assert said.code == 6
    assert f"{tmp_path}/counts is in use by process {pid} on " in said.err
    assert forks.wait(pid) == (0, "")


# Locks


def test_a_lock_of_a_process_that_is_gone_is_none(
    made: Family, good: dict[str, dict[str, Any]], forks: Forks, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    half_done(made, forks, out)
    for lock in (work_of(out) / "lock", work_of(out) / "overlap.zarr" / "lock"):
        assert lock.read_text().startswith("process ")
        lock.write_text(f"process {os.getpid()} on node-3")  # one that lives, but has nothing to do with it
    assert made.merge(out).code == 0
    assert contents(out) == good["0.1"]


@pytest.mark.parametrize(
    ("text", "holder"),
    [
        (b"process 7 on node-3", "process 7 on node-3"),
        (b"", "another process"),
        (b"\xff\xfe", "��"),
    ],
)
@pytest.mark.parametrize("where", ["out.ramstream", "out.ramstream/overlap.zarr"])
def test_a_lock_that_is_held_counts_whatever_is_written_in_it(
    made: Family, forks: Forks, where: str, text: bytes, holder: str, tmp_path: Path
) -> None:
    """As where another machine of a shared file system holds it, whose processes nobody here can see."""
    out = tmp_path / "out"
    half_done(made, forks, out)
    before = vouched(out)
    with open(tmp_path / where / "lock", "wb") as lock:
        lock.write(text)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = made.merge(out)
        assert said.code == 6
        assert said.err == f"error: {tmp_path / where} is in use by {holder}; wait for it or stop it\n"
        assert (tmp_path / where / "lock").read_bytes() == text
    assert vouched(out) == before
    assert made.merge(out).code == 0


# The machine


DURATIONS = {"monotonic", "perf_counter", "sleep"}
"""What of `time` no clock that is set, jumps or differs between hosts has a part in."""


def looks_at_a_clock(source: str) -> list[str]:
    """Words of a source that ask for the time of day."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name == "datetime"]
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names = {alias.name for alias in node.names}
            found += sorted(names if node.module == "datetime" else names - DURATIONS)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "time":
            found += [ast.unparse(node)] if node.attr not in DURATIONS else []
    return found


def test_looks_at_a_clock_are_told_from_other_words() -> None:
    source = """
        import datetime, time
        from time import sleep, time_ns
        began, now, later = time.monotonic(), time.time(), time.strftime
        file.time, times.time
    """
    assert sorted(looks_at_a_clock(textwrap.dedent(source))) == [
        "datetime",
        "time.strftime",
        "time.time",
        "time_ns",
    ]


def test_nothing_depends_on_the_time_of_day() -> None:
    """So that a clock may jump, or be another host's."""
    assert {path: words for path in SOURCES if (words := looks_at_a_clock(path.read_text()))} == {}


def test_a_clock_that_was_asleep_changes_nothing(
    made: Family, good: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, real = [0.0], time.monotonic

    def told() -> float:
        looks[0] += 3600
        return real() + looks[0]

    monkeypatch.setattr(time, "monotonic", told)
    assert made.merge(tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == good["0.1"]


@pytest.mark.parametrize("year", [-60, 1, 4 * 10**9], ids=["1969", "1970", "2096"])
def test_inputs_from_any_time_are_merged_and_a_run_goes_on(
    made: Family, good: dict[str, dict[str, Any]], forks: Forks, year: int, tmp_path: Path
) -> None:
    inputs = [Path(shutil.copytree(path, tmp_path / "in" / path.name)) for path in made.paths]
    for path in (tmp_path / "in").rglob("*"):
        os.utime(path, (year, year))
    words = ["merge", *inputs, "-o", tmp_path / "out", "-q", "--device", "cpu", "--workers", "1"]
    pid = forks.start(*words, slow=0.001)
    while vouched(tmp_path / "out")[0] < 2:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid)
    assert command(*words).code == 0
    assert promised(tmp_path / "out").items() <= good["0.1"].items()


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o077, 0o600, 0o700), (0, 0o666, 0o777), (0o027, 0o640, 0o750)]
)
def test_all_that_is_written_follows_the_umask(
    made: Family, good: dict[str, dict[str, Any]], mask: int, file: int, folder: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        assert made.merge(tmp_path / "made" / "out", "--store", tmp_path / "made" / "counts").code == 0
    finally:
        os.umask(before)
    assert contents(tmp_path / "made" / "out") == good["0.1"]
    for path in [tmp_path / "made", *(tmp_path / "made").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file), path


TESTS = str(Path(__file__).parent)
LIBRARIES = os.pathsep.join([TESTS, str(Path(ramstream.__file__).parent.parent)])

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale whose encoding is ASCII, and a Python that does not help itself."""


def process(
    where: Path, code: str, *words: object, **changed: str | None
) -> subprocess.CompletedProcess[bytes]:
    """A process of its own in a folder, with some of the environment changed or taken away."""
    environment = {**os.environ, **{name: value for name, value in changed.items() if value is not None}}
    for name in (name for name, value in changed.items() if value is None):
        environment.pop(name, None)
    argv = [os.fsencode(str(word)) for word in (sys.executable, "-c", code, *words)]
    return subprocess.run(argv, capture_output=True, env=environment, cwd=where)


LIKE_HERE = """
import sys
from faults import small_grains
from ramstream.cli import main
with small_grains():
    main()
"""


def test_names_of_any_letters_and_bytes_are_merged_where_the_locale_knows_none(
    made: Family, good: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """And nothing is read in the locale's encoding."""
    names = ["grundmodell-ü", "agent-λ", os.fsdecode(b"agent-\xff\xfe")]
    inputs = [
        Path(shutil.copytree(path, tmp_path / "in" / name))
        for path, name in zip(made.paths, names, strict=True)
    ]
    card = "---\nlicense: other\nlicense_name: für-alle\n---\n# Größe\n"
    (inputs[0] / "README.md").write_text(card, encoding="utf-8")
    (inputs[0] / "größe.txt").write_text("für alle", encoding="utf-8")
    out = tmp_path / "ergebnis-ß"
    words = ["merge", *inputs, "-o", out, "--device", "cpu"]
    done = process(tmp_path, LIKE_HERE, *words, PYTHONPATH=LIBRARIES, **ASCII)
    assert done.returncode == 0, done.stderr.decode()
    assert promised(out).items() <= good["0.1"].items()
    assert (out / "größe.txt").read_text(encoding="utf-8") == "für alle"
    assert "license_name: für-alle\n" in (out / "README.md").read_text(encoding="utf-8")
    again = process(tmp_path, LIKE_HERE, *words, "-q", PYTHONPATH=LIBRARIES, **ASCII)
    assert b"already complete" in again.stdout
    assert command("verify", out, "--read-data", "-q").code == 0


NOBODY = """
import json, pwd, sys
from disks import bound_by_permissions
def nobody(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nobody
with bound_by_permissions():
    from faults import small_grains
    from runs import cli
    with small_grains():
        for words in json.loads(sys.argv[1]):
            code = cli(*words)
            if code:
                sys.exit(code)
"""
"""`ramstream` several times, as a user of whom the system knows no name."""


def as_nobody(
    where: Path, words: list[list[object]], **changed: str | None
) -> subprocess.CompletedProcess[bytes]:
    """Commands as that user, without a home."""
    bare = dict.fromkeys(("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TERM", "LANG"))
    rows = json.dumps([[str(word) for word in row] for row in words])
    return process(where, NOBODY, rows, **{**bare, **changed})


def test_neither_a_home_nor_a_place_for_temporary_files_is_needed(
    made: Family, good: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    out, counting = tmp_path / "out", ["stats", *made.paths, "--json", "-q"]
    done = as_nobody(
        tmp_path,
        [made.argv(out, "--json"), ["verify", out, "-q"], counting],
        PYTHONPATH=LIBRARIES,
        TMPDIR=str(tmp_path / "gone"),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert contents(out) == good["0.1"]
    assert done.stdout.splitlines()[-1].decode() == command(*counting).out.strip()
    assert not (tmp_path / "~").exists()


@pytest.mark.slow
def test_nothing_need_be_written_beside_the_output(made: Family, tmp_path: Path) -> None:
    """An installation that is read-only, and no home: what is compiled is kept nowhere."""
    package = Path(ramstream.__file__).parent
    library = tmp_path / "library"
    shutil.copytree(package, library / "ramstream", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fixed").mkdir(mode=0o555)
    folders = [library, *(path for path in library.rglob("*") if path.is_dir())]
    before = sorted(library.rglob("*"))
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = as_nobody(
            tmp_path,
            [made.argv(tmp_path / "out", "-m", "ram")],
            PYTHONPATH=os.pathsep.join([str(library), TESTS]),
            PYTHONDONTWRITEBYTECODE="1",
            HOME=str(tmp_path / "fixed"),
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert sorted(library.rglob("*")) == before
    finally:
        for folder in (*folders, tmp_path / "fixed"):
            folder.chmod(0o755)
    assert made.merge(tmp_path / "wanted", "-m", "ram").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
