"""Killed, stopped, refused and resumed: the same command again ends with the same bytes."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from runs import (
    Stop,
    Tensor,
    cli,
    contents,
    family,
    plan_of,
    promised,
    run,
    same_store,
    small_steps,
    stop_after,
    stopped,
    units,
    write_family,
)

from ramstream import Limits, count, durable, journal, merge, overlap, writer
from ramstream.engine.events import Event, PassBegan, PassEnded
from ramstream.engine.ledgers import Ledger, MergeLedger
from ramstream.engine.place import Place
from ramstream.engine.worker import UnitResult, Work, Worker
from ramstream.errors import DiskFullError, IntegrityError, JournalError, PlanError, RamstreamError
from ramstream.types import GRAIN

DRIVER = """
import sys, time
from ramstream.engine import passes
from ramstream.cli import main
pause, passes.TASK_UNITS, passes.BATCH_SECONDS = float(sys.argv.pop(1)), int(sys.argv.pop(1)), 0.0
do = passes.run_task
def run_task(setup, works):
    time.sleep(pause)
    return do(setup, works)
passes.run_task = run_task
main()
"""
"""`ramstream`, with every task a little slower and vouched for at once, so that kills find a pass half done."""

COUNT, MERGE = "overlap.zarr/journal.jsonl", "journal.jsonl"


@dataclass
class Large:
    """24 grains and two byte ranges at one byte an element, and the output of an undisturbed run."""

    root: Path
    paths: list[Path] = field(init=False)
    good: Path = field(init=False)

    def __post_init__(self) -> None:
        wide = ("F8_E4M3", (8, GRAIN))
        shapes = {"a": wide, "norm": ("F8_E4M3", (77,)), "b": wide, "ids": ("I64", (1 << 20,)), "c": wide}
        base, agents = family(shapes, agents=2)
        base["c"] = Tensor("F8_E4M3", (7 * GRAIN,), base["c"].bits[: 7 * GRAIN])
        for agent in agents:
            agent["c"] = Tensor("F8_E4M3", (7 * GRAIN,), agent["c"].bits[: 7 * GRAIN])
        self.paths = write_family(self.root, base, agents, shards=2)
        self.good = self.root / "good"
        self.finish(self.good)
        self.units = plan_of(self.paths).count.units

    def start(
        self,
        out: Path,
        method: str = "ram-plus",
        memory: str = "1GB",
        workers: int = 2,
        pause: float = 0.0,
        task_bytes: int = 1,
        batched: bool = False,
    ) -> subprocess.Popen[str]:
        """A process that merges into `out`; `batched` is the command line as it is."""
        driver = ["-m", "ramstream"] if batched else ["-c", DRIVER, str(pause), str(task_bytes)]
        words = ["-m", method, "-o", out, "--memory", memory, "--workers", workers, "--device", "cpu", "-q"]
        argv = [sys.executable, *driver, "merge", *self.paths, *words]
        words = [*argv, *(["-p", "r=2"] if method == "ram-plus" else [])]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        # What a shell starts in the background ignores Ctrl-C, and hands that on.
        heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(list(map(str, words)), text=True, preexec_fn=heeding, **pipes)

    def finish(self, out: Path, **options: Any) -> None:
        """The command line as it is, to the end."""
        process = self.start(out, batched=True, **options)
        said = process.communicate()[1]
        assert process.returncode == 0, said


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Large]:
    root = tmp_path_factory.mktemp("large")
    yield Large(root)
    shutil.rmtree(root)


def work_of(out: Path) -> Path:
    return out.with_name(out.name + ".ramstream")


def wait_for_units(process: subprocess.Popen[str], journal: Path, n: int) -> None:
    """Return when `n` units are vouched for, or the process ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and units(journal) < n:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal; exit status and what was said."""
    process.send_signal(number)
    said = process.communicate()[1]
    return process.returncode, said


def tear(path: Path, rng: random.Random) -> str:
    """Leave the end of a journal as a crash may: cut, or followed by what was never a line."""
    data = path.read_bytes()
    how = rng.choice(["cut", "half a line", "noise", "zeros", "no"])
    if how == "cut":
        last = data[:-1].rfind(b"\n") + 1
        path.write_bytes(data[: rng.randrange(last, len(data))])
    elif how == "half a line":
        line = data.splitlines(True)[-1]
        path.write_bytes(data + line[: rng.randrange(1, len(line))])
    elif how != "no":
        path.write_bytes(data + (rng.randbytes(rng.randrange(1, 300)) if how == "noise" else bytes(100)))
    return how


# kill -9


def kill_once(large: Large, out: Path, where: str, method: str, rng: random.Random) -> tuple[bool, str]:
    """Kill a run after a random number of units of a pass; whether some but not all of them were done."""
    journal = work_of(out) / where
    limits = {"memory": rng.choice(["400MB", "1GB", "2GB"]), "workers": rng.choice([1, 2, 5])}
    task = rng.choice([1, 1, 40 << 20])
    process = large.start(out, method, pause=0.01, task_bytes=task, **limits)
    wait_for_units(process, journal, rng.randrange(1, large.units - 6))
    time.sleep(rng.random() * 0.02)
    status, said = end(process, signal.SIGKILL)
    assert status == -signal.SIGKILL, said
    inside = 0 < units(journal) < large.units
    return inside, tear(journal, rng) if inside else "no"


@pytest.mark.slow
def test_25_kills_leave_what_can_be_resumed(large: Large, tmp_path: Path) -> None:
    rng = random.Random(20261130)
    inside: Counter[str] = Counter()
    torn: Counter[str] = Counter()
    kills = 0
    for chain in range(20):  # nine, unless the machine was so slow that kills came after a pass had ended
        if kills >= 25 and min(inside[COUNT], inside[MERGE]) >= 8 and kills - torn["no"] >= 10:
            break
        out = tmp_path / "out"
        for where in (COUNT, MERGE, rng.choice([COUNT, MERGE, MERGE]))[: 3 if chain < 7 else 2]:
            if where == COUNT and units(work_of(out) / MERGE):
                where = MERGE
            hit, how = kill_once(large, out, where, "ram-plus", rng)
            kills += 1
            inside[where] += hit
            torn[how] += 1
        large.finish(out, memory=rng.choice(["400MB", "3GB"]), workers=rng.choice([1, 3]))
        assert contents(out) == contents(large.good)
        assert same_store(work_of(out) / "overlap.zarr", work_of(large.good) / "overlap.zarr")
        shutil.rmtree(out)
        shutil.rmtree(work_of(out))
    print(f"{kills} kills, inside {dict(inside)}, torn {dict(torn)}")
    assert kills >= 25
    assert inside[COUNT] >= 8
    assert inside[MERGE] >= 8
    assert kills - torn["no"] >= 10


def test_kills_in_one_scan_leave_what_can_be_resumed(large: Large, tmp_path: Path) -> None:
    rng = random.Random(7)
    good, out = tmp_path / "good", tmp_path / "out"
    large.finish(good, method="ram")
    for _ in range(3):
        assert kill_once(large, out, MERGE, "ram", rng)[0]
    large.finish(out, method="ram", workers=1)
    assert contents(out) == contents(good)
    assert same_store(work_of(out) / "overlap.zarr", work_of(good) / "overlap.zarr")


@pytest.mark.slow
def test_kills_at_any_time_leave_what_can_be_resumed(large: Large, tmp_path: Path) -> None:
    rng = random.Random(11)
    out = tmp_path / "out"
    for _ in range(10):
        process = large.start(out, workers=rng.choice([1, 2]), batched=True)
        time.sleep(rng.uniform(0.2, 2.5))
        end(process, signal.SIGKILL)
    large.finish(out)
    assert contents(out) == contents(large.good)
    assert same_store(work_of(out) / "overlap.zarr", work_of(large.good) / "overlap.zarr")


# Signals, and who may run


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_a_resumable_run(large: Large, tmp_path: Path, number: int, status: int) -> None:
    out = tmp_path / "out"
    for where in (COUNT, MERGE):
        process = large.start(out, pause=0.03)
        wait_for_units(process, work_of(out) / where, 5)
        found, said = end(process, number)
        assert found == status
        assert "Traceback" not in said
        assert 5 <= units(work_of(out) / where) < large.units
        assert not out.exists()
    large.finish(out)
    assert contents(out) == contents(large.good)


def test_a_second_run_names_the_first(large: Large, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = large.start(out, pause=0.05)
    wait_for_units(first, work_of(out) / COUNT, 1)
    second = large.start(out)
    said = second.communicate()[1]
    assert second.returncode == 6
    assert f"in use by process {first.pid} on " in said
    assert first.poll() is None
    end(first, signal.SIGKILL)
    large.finish(out)
    assert contents(out) == contents(large.good)


def test_a_second_run_on_the_same_store_names_the_first(tmp_path: Path, small: Small) -> None:
    store = tmp_path / "store"
    run(small.plan(), tmp_path / "one", store=store)
    with (
        durable.lock(store / "lock", "it"),
        pytest.raises(JournalError, match=f"store is in use by process {os.getpid()} on "),
    ):
        merge(small.plan(r=0.2), tmp_path / "two", store=store)


# Inputs that change


class Small:
    """Five grains and a byte range, its output, and folders of its own that a test may spoil."""

    shapes = {  # noqa: RUF012
        "a": ("F8_E4M3", (2 * GRAIN + 77,)),
        "ids": ("I64", (99,)),
        "b": ("BF16", (3, 1001)),
        "c": ("F8_E4M3", (2 * GRAIN,)),
    }

    def __init__(self, root: Path, like: Small | None = None) -> None:
        self.root = root
        if like is None:
            self.paths = write_family(root, *family(self.shapes, agents=2, seed=5), shards=2)
            self.good = root / "good"
            run(self.plan(), self.good)
        else:
            self.paths = [Path(shutil.copytree(path, root / path.name)) for path in like.paths]
            self.good = like.good
        self.out = root / "out"
        self.work = work_of(self.out)

    def plan(self, method: str = "ram-plus", **parameters: Any) -> Any:
        return plan_of(self.paths, method, **parameters)

    def argv(self, *more: object) -> list[object]:
        return ["merge", *self.paths, "-o", self.out, "--device", "cpu", "-q", *more]

    def staged_whole(self) -> bool:
        return (self.work / "out" / "ramstream.json").exists()

    def finish(self) -> list[str]:
        """The same command again; the titles of its passes."""
        _, titles = run(self.plan(), self.out)
        assert contents(self.out) == contents(self.good)
        assert same_store(self.work / "overlap.zarr", work_of(self.good) / "overlap.zarr")
        return titles

    def flip(self, agent: int, tensor: str, element: int) -> Callable[[], None]:
        """Change a byte that no sample of the fingerprint sees; what undoes it is returned."""
        tensors = self.plan().count.merged
        source = next(t for t in tensors if t.name == tensor).sources[agent]
        path = self.plan().count.checkpoints[agent].paths[source.file]

        def turn() -> None:
            with open(path, "r+b") as file:
                file.seek(source.offset + element)
                byte = file.read(1)[0]
                file.seek(source.offset + element)
                file.write(bytes([byte ^ 1]))

        turn()
        return turn


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def small(original: Small, tmp_path: Path) -> Small:
    return Small(tmp_path, original)


class Tiny(Small):
    """One grain, a byte range, and two side files, for what does not depend on work being half done."""

    shapes = {"a": ("BF16", (77, 30)), "ids": ("I64", (99,)), "b": ("BF16", (3, 1001))}  # noqa: RUF012


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


@pytest.mark.parametrize("title", ["counting", "merging"])
def test_touched_inputs_are_compared_and_the_run_goes_on(small: Small, title: str) -> None:
    stopped(small.plan(), small.out, title, 2)
    assert 2 <= units(small.work / (COUNT if title == "counting" else MERGE)) < 6
    assert not small.out.exists()
    for path in small.paths[1].iterdir():
        os.utime(path, (1, 1))
    wanted = ["checking", "counting", "merging"] if title == "counting" else ["checking", "merging"]
    assert small.finish() == wanted


def test_untouched_inputs_are_not_compared(small: Small) -> None:
    stopped(small.plan(), small.out, "counting", 2)
    assert small.finish() == ["counting", "merging"]


def test_a_changed_byte_in_a_finished_grain_is_found(small: Small) -> None:
    stopped(small.plan(), small.out, "counting", 2)
    before = (small.work / COUNT).read_bytes()
    undo = small.flip(2, "a", 150_000)
    assert small.plan().count.digest == small.plan().count.digest
    with pytest.raises(IntegrityError, match="agent-2 changed since it was counted: around a "):
        run(small.plan(), small.out)
    assert (small.work / COUNT).read_bytes() == before
    undo()
    assert small.finish()[0] == "checking"


def test_a_changed_sample_is_found_and_named(small: Small) -> None:
    stopped(small.plan(), small.out, "merging", 2)
    undo = small.flip(1, "a", 0)
    with pytest.raises(IntegrityError, match=r"agent-1 changed since .*out.ramstream was begun; restore"):
        run(small.plan(), small.out)
    assert cli(*small.argv()) == 7
    assert units(small.work / MERGE) >= 2
    undo()
    assert small.finish() == ["checking", "merging"]


def spoil_between_passes(act: Callable[[], object]) -> Callable[[Event], None]:
    done: list[object] = []

    def listen(event: Event) -> None:
        if isinstance(event, PassEnded) and not done:
            done.append(act())

    return listen


def test_a_byte_changed_between_the_passes_is_found(small: Small) -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, PassBegan) and event.title == "merging":
            small.flip(1, "c", 150_000)

    with pytest.raises(IntegrityError, match="agent-1 changed since it was counted: around a "):
        merge(small.plan(), small.out, Limits(workers=1, device="cpu"), listener=spoil)
    assert not small.out.exists()
    small.flip(1, "c", 150_000)
    assert small.finish()[-1] == "merging"


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_an_input_truncated_between_the_passes_is_found(small: Small, io: Any) -> None:
    shard = small.paths[2] / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    listener = spoil_between_passes(lambda: os.truncate(shard, len(data) - 1))
    with pytest.raises(IntegrityError, match=f"agent-2/{shard.name} has {len(data) - 1} bytes, it had "):
        merge(small.plan(), small.out, Limits(device="cpu", io=io), listener=listener)
    assert cli(*small.argv()) == 5
    shard.write_bytes(data)
    assert small.finish()[-1] == "merging"


def test_an_input_that_is_gone_between_the_passes_is_named(small: Small) -> None:
    shard = small.paths[0] / "model-00001-of-00002.safetensors"
    listener = spoil_between_passes(lambda: shard.rename(shard.with_name("moved")))
    with pytest.raises(IntegrityError, match=f"base/{shard.name} is gone"):
        merge(small.plan(), small.out, Limits(device="cpu"), listener=listener)


# Another merge over an unfinished one


def test_other_counts_are_refused_with_both_values(small: Small) -> None:
    stopped(small.plan(), small.out, "counting", 2)
    before = (small.work / COUNT).read_bytes()
    with pytest.raises(JournalError, match=r"epsilon is 0\.5 here and 1e-05 there"):
        run(small.plan(epsilon=0.5), small.out)
    assert cli(*small.argv("-p", "epsilon=0.5")) == 6
    base, one, two = small.paths
    for others in ([base, two, one], [base, one]):
        with pytest.raises(JournalError, match=r"of other inputs, .*agent-2.*, and this is one of .*agent-1"):
            run(plan_of(others), small.out)
    assert (small.work / COUNT).read_bytes() == before
    small.finish()


@pytest.mark.parametrize("title", ["counting", "merging"])
def test_another_r_keeps_what_was_counted(small: Small, title: str) -> None:
    stopped(small.plan(), small.out, title, 2)
    before = units(small.work / COUNT)
    _, titles = run(small.plan(r=0.5), small.out)
    assert titles == (["counting", "merging"] if title == "counting" else ["merging"])
    assert (before == 6) == (title == "merging")
    assert units(small.work / COUNT) == 6  # none was counted twice
    run(small.plan(r=0.5), small.root / "clean")
    assert contents(small.out) == contents(small.root / "clean")


def test_a_kill_while_the_old_pass_2_is_dropped_loses_nothing(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nth in (1, 2, 3):
        stopped(small.plan(), small.out, "merging", 2)
        with interrupted_disk(monkeypatch, nth), pytest.raises(Interrupted):
            run(small.plan(r=0.5), small.out)
        small.finish()
        shutil.rmtree(small.out)
        shutil.rmtree(small.work)


def test_a_store_of_something_else_is_refused(small: Small) -> None:
    store = small.root / "store"
    run(small.plan(), small.root / "one", store=store)
    with pytest.raises(PlanError, match=r"epsilon is 0\.001 here and 1e-05 there; use another --store"):
        run(small.plan(epsilon=1e-3), small.out, store=store)
    assert cli(*small.argv("-p", "epsilon=1e-3", "--store", store)) == 3
    (small.root / "folder").mkdir()
    with pytest.raises(PlanError, match="is not an overlap store"):
        run(small.plan(), small.out, store=small.root / "folder")


def test_a_store_is_used_and_left_as_it_is(small: Small) -> None:
    store = small.root / "store"
    run(small.plan(), small.root / "one", store=store)
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "lock"}
    outcome, titles = run(small.plan(r=0.7), small.out, store=store)
    assert titles == ["merging"]
    assert outcome.summary["store"] == str(store)
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and p.name != "lock"} == before
    assert not small.work.exists()


def test_bits_that_were_not_kept_from_the_start_are_not_promised(small: Small) -> None:
    stopped(small.plan(), small.out, "counting", 2, keep_store=False)
    with pytest.raises(PlanError, match="keeps tallies only"):
        run(small.plan(), small.out, keep_store=True)
    run(small.plan(), small.out, keep_store=False)
    assert contents(small.out) == contents(small.good)
    assert not small.work.exists()


def test_counting_alone_goes_on_and_a_merge_takes_it_over(small: Small) -> None:
    store, plan = small.root / "counts", small.plan().count
    for _ in range(2):
        with small_steps(), pytest.raises(Stop):
            count(plan, Limits(workers=1), store, stop_after("counting", 1))
    done = units(store / "journal.jsonl")
    assert 2 <= done < 6
    _, titles = run(small.plan(), small.out, store=store)
    assert titles == ["counting", "merging"]
    assert units(store / "journal.jsonl") == 6
    assert contents(small.out) == contents(small.good)
    assert same_store(store, work_of(small.good) / "overlap.zarr")
    _, tallies = count(plan, Limits(workers=1), store, stop_after("counting", 1))
    assert tallies.tobytes() == count(plan, Limits(workers=2))[1].tobytes()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(overlap.OverlapStore, "create"), (journal, "write_at"), (overlap.OverlapStore, "finish")],
)
def test_counting_on_a_full_disk_says_so(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    plan, store = tiny.plan().count, tiny.root / "counts"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), 0))
        with pytest.raises(DiskFullError, match="free some space"):
            count(plan, None, store)
    assert count(plan, None, store)[1].tobytes() == count(plan)[1].tobytes()


def test_a_store_that_does_not_fit_leaves_nothing_behind(tiny: Tiny) -> None:
    store = tiny.root / "counts"
    count(tiny.plan().count, None, store)
    with pytest.raises(PlanError):
        run(tiny.plan(epsilon=1e-3), tiny.out, store=store)
    assert not tiny.work.exists()


# Publishing


class Interrupted(BaseException):
    """The process is gone."""


class interrupted_disk:
    """The nth operation that renames or removes something does not happen, nor any after it."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int) -> None:
        self.patch, self.left = patch, nth

    def __enter__(self) -> interrupted_disk:
        for module, name in (
            (os, "rename"),
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
            (shutil, "rmtree"),
        ):
            self.patch.setattr(module, name, self.wrapped(getattr(module, name)))
        for name in ("rename", "unlink", "rmdir"):
            self.patch.setattr(Path, name, self.wrapped(getattr(Path, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def wrapped(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **options: Any) -> Any:
            if "overlap.zarr" in str(args[0]):
                return act(*args, **options)
            self.left -= 1
            if self.left <= 0:
                raise Interrupted
            return act(*args, **options)

        return maybe


def outputs_somewhere(tiny: Tiny, old: dict[str, Any], new: dict[str, Any]) -> None:
    """The old output is whole in one of its two places until the new one has its name."""
    places = [p for p in (tiny.out, tiny.work / "old") if (p / "ramstream.json").exists()]
    found = [contents(place) for place in places]
    assert (tiny.out.exists() and contents(tiny.out) == new) or old in found


def test_publishing_can_be_interrupted_anywhere(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tiny.plan("ram"), tiny.root / "template")
    old, new = contents(tiny.root / "template"), contents(tiny.good)
    states = set()
    for nth in range(1, 60):
        shutil.copytree(tiny.root / "template", tiny.out)
        with interrupted_disk(monkeypatch, nth):
            try:
                run(tiny.plan(), tiny.out, overwrite=True)
                over = True
            except Interrupted:
                over = False
        states.add((tiny.out.exists(), (tiny.work / "old").exists(), tiny.staged_whole()))
        outputs_somewhere(tiny, old, new)
        named = tiny.out.exists() and contents(tiny.out) == new
        outcome, titles = run(tiny.plan(), tiny.out, overwrite=True)
        assert not (named and titles)
        assert contents(tiny.out) == new
        assert not (tiny.work / "old").exists()
        assert not (tiny.work / "plan.json").exists()
        shutil.rmtree(tiny.out)
        shutil.rmtree(tiny.work)
        if over:
            assert outcome.already_complete
            break
    assert over
    assert states >= {(True, False, True), (False, True, True), (True, True, False), (True, False, False)}


def test_an_output_in_the_way_is_kept_without_overwrite(tiny: Tiny) -> None:
    run(tiny.plan("ram"), tiny.out)
    before = contents(tiny.out)
    with pytest.raises(PlanError, match="exists; use --overwrite"):
        run(tiny.plan(), tiny.out)
    assert cli(*tiny.argv()) == 3
    assert contents(tiny.out) == before
    run(tiny.plan(), tiny.out, overwrite=True)
    assert contents(tiny.out) == contents(tiny.good)


def state_of(folder: Path) -> dict[Path, tuple[int, int, int]]:
    return {p: (s.st_mtime_ns, s.st_ino, s.st_size) for p in [folder, *folder.rglob("*")] if (s := p.stat())}


def test_a_finished_output_is_left_alone(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny.plan(), tiny.out)
    before = state_of(tiny.out) | state_of(tiny.work)
    outcome, titles = run(tiny.plan(), tiny.out)
    assert outcome.already_complete
    assert titles == []
    assert cli(*tiny.argv()) == 0
    assert "already complete" in capsys.readouterr().out
    assert cli(*tiny.argv("--overwrite")) == 0
    assert state_of(tiny.out) | state_of(tiny.work) == before


def test_a_finished_output_is_complete_whatever_else_is_unfinished_there(small: Small) -> None:
    run(small.plan(), small.out)
    before = state_of(small.out)
    stopped(small.plan(r=0.9), small.out, "merging", 2, overwrite=True)
    assert run(small.plan(), small.out)[0].already_complete
    assert state_of(small.out) == before
    _, titles = run(small.plan(r=0.9), small.out, overwrite=True)
    assert titles == ["merging"]


def test_an_output_that_appears_meanwhile_is_kept(tiny: Tiny) -> None:
    def appear(event: Event) -> None:
        tiny.out.mkdir(exist_ok=True)

    with pytest.raises(PlanError, match="appeared meanwhile; use --overwrite"):
        merge(tiny.plan(), tiny.out, listener=appear)
    assert list(tiny.out.iterdir()) == []
    _, titles = run(tiny.plan(), tiny.out, overwrite=True)
    assert titles == []
    assert contents(tiny.out) == contents(tiny.good)


@pytest.mark.parametrize("name", ["", "novel.txt"])
def test_what_appears_meanwhile_and_is_no_model_is_not_overwritten(tiny: Tiny, name: str) -> None:
    def appear(event: Event) -> None:
        if name:
            tiny.out.mkdir(exist_ok=True)
        (tiny.out / name).write_text("years of work")

    with pytest.raises(PlanError, match=r"holds files but no model|is not a folder"):
        merge(tiny.plan(), tiny.out, overwrite=True, listener=appear)
    assert (tiny.out / name).read_text() == "years of work"
    tiny.out.rename(tiny.root / "elsewhere")
    run(tiny.plan(), tiny.out)
    assert contents(tiny.out) == contents(tiny.good)


@pytest.mark.parametrize("options", [{"epsilon": 0.3}, {}])
def test_a_store_is_not_taken_away_from_who_reads_it(tiny: Tiny, options: dict[str, float]) -> None:
    """By a merge of other counts, that sets it aside, or one that does not keep it."""
    run(tiny.plan(), tiny.out)
    keep = None if options else False
    with durable.lock(tiny.work / "overlap.zarr" / "lock", "it", shared=True):
        before = os.listdir(tiny.work / "overlap.zarr")
        with pytest.raises(JournalError, match=r"overlap\.zarr is in use by"):
            run(tiny.plan(r=0.3, **options), tiny.out, overwrite=True, keep_store=keep)
        assert os.listdir(tiny.work / "overlap.zarr") == before
    run(tiny.plan(r=0.3, **options), tiny.out, overwrite=True, keep_store=keep)
    assert (tiny.work / "overlap.zarr").exists() == (keep is None)


def test_files_whose_header_no_fsync_vouched_for_are_made_again(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look whole to whoever reads them, from the page cache."""
    written: list[int] = []

    class Failing(durable.Disk):
        def sync(self, descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
                raise OSError(errno.EIO, "Input/output error")
            super().sync(descriptor)

    class Noting(durable.Disk):
        def write(self, descriptor: int, data: memoryview, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
                written.append(offset)
            return super().write(descriptor, data, offset)

    monkeypatch.setattr(durable, "disk", Failing())
    with pytest.raises(RamstreamError, match="Input/output error"):
        run(tiny.plan(), tiny.out)
    monkeypatch.setattr(durable, "disk", Noting())
    run(tiny.plan(), tiny.out)
    assert written[0] == 0
    assert contents(tiny.out) == contents(tiny.good)


def test_a_store_lies_apart_from_output_and_inputs(tiny: Tiny) -> None:
    for store in (tiny.out, tiny.out / "st", tiny.work / "out", tiny.work, tiny.root):
        with pytest.raises(PlanError, match="overlap"):
            run(tiny.plan(), tiny.out, store=store)
    with pytest.raises(PlanError, match=r"base/st and the input base .* overlap"):
        run(tiny.plan(), tiny.out, store=tiny.paths[0] / "st")
    assert not tiny.work.exists()
    assert cli(*tiny.argv("--store", tiny.work / "overlap.zarr")) == 0
    assert (tiny.work / "overlap.zarr").exists()


def test_a_place_that_cannot_be_made_is_refused(tiny: Tiny) -> None:
    (tiny.root / "file").touch()
    with pytest.raises(PlanError, match=r"file/out\.ramstream cannot be made: Not a directory"):
        run(tiny.plan(), tiny.root / "file" / "out")
    with pytest.raises(PlanError, match="file cannot be made: "):
        run(tiny.plan(), tiny.out, store=tiny.root / "file" / "st")
    tiny.finish()


def test_staged_files_that_are_gone_are_missed(small: Small) -> None:
    stopped(small.plan(), small.out, "merging", 2)
    (small.work / "out" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match="lacks files that its journal vouches for; remove "):
        run(small.plan(), small.out)


# The order of durable steps


@pytest.mark.parametrize("method", ["ram", "ram-plus"])
def test_data_is_on_disk_before_a_line_vouches_for_it(
    small: Small, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    clock = itertools.count(1)
    synced: dict[Path, int] = {}
    done: dict[tuple[int, bool], tuple[int, list[Path]]] = {}
    do, sync, add = Worker.do, durable.sync, Ledger.add
    checked: Counter[str] = Counter()

    def watched_do(worker: Worker, work: Work) -> UnitResult:
        result = do(worker, work)
        names = [worker.setup.merge.outputs[f].name for f in result.files] if worker.setup.merge else []
        chunk = [Path(result.chunk), Path(result.chunk).parent] if result.chunk else []
        done[work.unit, False] = next(clock), chunk
        done[work.unit, True] = next(clock), [small.work / "out" / name for name in names]
        return result

    def watched_sync(path: Path) -> None:
        sync(path)
        synced[path] = next(clock)

    def watched_add(ledger: Ledger, records: Any) -> None:
        for line in records:
            if "unit" in line:
                when, paths = done[line["unit"], isinstance(ledger, MergeLedger)]
                for path in paths:
                    assert synced[path] > when, path
                    checked[ledger.kind] += 1
        add(ledger, records)

    monkeypatch.setattr(Worker, "do", watched_do)
    monkeypatch.setattr(durable, "sync", watched_sync)
    monkeypatch.setattr(Ledger, "add", watched_add)
    with small_steps():
        run(small.plan(method), small.out)
    assert checked["count"] == 2 * 5  # chunk and folder of every grain
    assert checked["merge"] >= 6


# A full disk


def failing(act: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = iter(range(after))

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise OSError(28, os.strerror(28))
        return act(*args, **options)

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (writer.RangeWriter, "write", 0),
        (writer.RangeWriter, "write", 4),
        (overlap.OverlapStore, "write_bits", 0),
        (overlap.OverlapStore, "write_bits", 3),
        (journal, "write_at", 0),
        (journal, "write_at", 3),
        (journal, "write_at", 9),
        (os, "posix_fallocate", 0),
        (os, "posix_fallocate", 1),
        (durable, "write_whole", 0),
        (durable, "write_whole", 1),
        (overlap.OverlapStore, "create", 0),
        (overlap.OverlapStore, "finish", 0),
        (Path, "mkdir", 0),
    ],
)
def test_a_full_disk_keeps_what_is_done(
    small: Small, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int
) -> None:
    with small_steps(), monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), after))
        with pytest.raises(DiskFullError, match="free some space and run the same command again"):
            run(small.plan(), small.out)
    assert not small.out.exists()
    small.finish()


def test_half_a_journal_line_on_a_full_disk_is_cut_off_by_the_next_run(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def half(descriptor: int, data: memoryview, offset: int) -> None:
        calls.append(offset)
        if len(calls) == 5:
            os.pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(28, os.strerror(28))
        durable.write_at(descriptor, data, offset)

    with small_steps(), monkeypatch.context() as patch:
        patch.setattr(journal, "write_at", half)
        with pytest.raises(DiskFullError):
            run(small.plan(), small.out, Limits(workers=2, device="cpu"))
    assert len(calls) == 5, "nothing is vouched for after a failure"
    assert units(small.work / COUNT) == 2  # two heads before, and the half line after
    small.finish()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_really_full(small: Small, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tiny_disk / "out"
    words = [out if word == small.out else word for word in small.argv()]
    assert cli(*words) == 8  # said before anything is done
    assert list(tiny_disk.iterdir()) == []
    monkeypatch.setattr("ramstream.engine.merging.check_disk", lambda *_: None)
    with open(tiny_disk / "ballast", "wb") as ballast:
        ballast.write(bytes(5 << 20))
    assert cli(*words) == 8  # the store's bits, or the output's files, find no room
    assert not out.exists()
    assert cli(*words) == 8
    (tiny_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", tiny_disk], check=True)
    assert cli(*words) == 0
    assert promised(out) == promised(small.good)


# Small things


def test_the_place_of_an_output_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert Place.of(tmp_path / "link" / "out").work == tmp_path / "real" / "out.ramstream"


def test_a_listener_that_raises_ends_the_run_and_keeps_its_work(small: Small) -> None:
    stopped(small.plan("ram"), small.out, "counting and merging", 3)
    assert 3 <= units(small.work / MERGE) < 6
    _, titles = run(small.plan("ram"), small.out)
    assert titles == ["counting and merging"]
