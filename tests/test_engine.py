"""How much a run reads, what it asks for ahead, and what a forecast promises."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Stop, Tensor, plan_of, random_bits, stopped, units, write_family

from ramstream import Limits, cli, count, merge, overlap
from ramstream.engine import ahead, forecast, passes, signals, tasks, worker
from ramstream.engine.events import Advanced, Event
from ramstream.engine.limits import capacity
from ramstream.engine.signals import held_back
from ramstream.errors import DiskFullError, IntegrityError, JournalError, RamstreamError
from ramstream.plan import CountPlan, MatchOptions, MergePlan, Space
from ramstream.types import GRAIN, Dtype

SIZE = 2 * GRAIN + 5000


def written(root: Path, **more: Tensor) -> list[Path]:
    """Three grains of a base and two agents that change them all, and more tensors alike in all of them."""
    rng = np.random.default_rng(3)
    base = {
        "a": Tensor("BF16", (SIZE,), random_bits(rng, "BF16", SIZE)),
        "b": Tensor("BF16", (700,), random_bits(rng, "BF16", 700)),
        **more,
    }
    agents = [{**base, "a": Tensor("BF16", (SIZE,), base["a"].bits ^ np.uint16(t))} for t in (1, 2)]
    return write_family(root, base, agents)


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    return written(tmp_path)


def bytes_read(run: Any, *arguments: Any, **options: Any) -> int:
    """What the passes of one call read of the inputs."""
    events: list[Event] = []
    run(*arguments, listener=events.append, **options)
    return sum(event.read for event in events if isinstance(event, Advanced))


def test_a_merge_with_a_store_reads_the_checkpoints_once(model: list[Path], tmp_path: Path) -> None:
    plan, store = plan_of(model), tmp_path / "store"
    assert bytes_read(merge, plan, tmp_path / "out", store=store) == 2 * plan.count.bytes_read
    assert bytes_read(merge, plan_of(model, r=0.3), tmp_path / "other", store=store) == plan.count.bytes_read


def test_a_sweep_over_ten_parameters_reads_the_checkpoints_ten_times(
    model: list[Path], tmp_path: Path
) -> None:
    plan, store = plan_of(model), tmp_path / "store"
    counted = bytes_read(count, plan.count, Limits(), store)
    sweep = [{"r": 0.1 * k} for k in range(5)] + [{"alpha": 0.5 * k} for k in range(5)]
    read = sum(
        bytes_read(merge, plan_of(model, **parameters), tmp_path / f"out-{k}", store=store)
        for k, parameters in enumerate(sweep)
    )
    assert counted == plan.count.bytes_read
    assert read == 10 * plan.count.bytes_read


def test_one_scan_counts_and_merges_where_no_coefficient_needs_counts(
    model: list[Path], tmp_path: Path
) -> None:
    plan = plan_of(model, "ram")
    assert bytes_read(merge, plan, tmp_path / "out") == plan.count.bytes_read


def test_what_is_asked_for_ahead_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def advise(descriptor: int, begin: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            asked.append((os.readlink(f"/proc/self/fd/{descriptor}"), begin, begin + size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read: list[tuple[str, int, int]] = []
    original = worker.Worker._read

    def noted(self: Any, unit: Any, k: int, source: Any, begin: int, n: int) -> Any:
        path = str(self._plan.checkpoints[k].paths[source.file])
        first, end = (source.offset + i * source.stored_itemsize for i in (begin, begin + n))
        read.append((path, first, end))
        return original(self, unit, k, source, begin, n)

    monkeypatch.setattr(worker.Worker, "_read", noted)
    model = written(tmp_path, ids=Tensor("I64", (100,), np.arange(100, dtype=np.uint64)))
    merge(plan_of(model, "ram"), tmp_path / "out", Limits(workers=1))
    assert _joined(asked) == _joined(read)


def _joined(ranges: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Ranges in order, those that touch as one."""
    result: list[tuple[str, int, int]] = []
    for path, begin, end in sorted(ranges):
        if result and result[-1][0] == path and begin <= result[-1][2]:
            result[-1] = path, result[-1][1], max(end, result[-1][2])
        else:
            result.append((path, begin, end))
    return result


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=6), st.data())
@settings(max_examples=50, deadline=None)
def test_reads_cover_every_byte_once(sizes: list[int], data: Any) -> None:
    plan = _plan(sizes, data)
    for k in range(plan.agents + 1):
        ranges = [part for unit in range(plan.units) for part in plan.reads(unit, k)]
        expected = sum(
            source.valid * Dtype[source.dtype].itemsize for t in plan.merged if (source := t.sources[k])
        )
        assert sum(end - begin for _, begin, end in ranges) == expected
        assert all(begin < end for _, begin, end in ranges)


def _plan(sizes: list[int], data: Any) -> CountPlan:
    """A plan of one file a checkpoint; tensors in any order, agents with fewer rows or without some."""
    from ramstream.plan.count import CheckpointRef, PlannedTensor, Source

    offsets = [0] * 3
    tensors = []
    for i, size in enumerate(sizes):
        sources: list[Source | None] = []
        for k in range(3):
            valid = size if k == 0 else data.draw(st.integers(0, size))
            missing = k > 0 and data.draw(st.booleans())
            sources.append(None if missing else Source(0, offsets[k], "BF16", valid))
            offsets[k] += 2 * size + data.draw(st.sampled_from((0, 8)))
        tensors.append(PlannedTensor(f"t{i}", "BF16", (size,), size, 2 * size, tuple(sources)))
    refs = tuple(CheckpointRef(str(k), ".", (("f", 10**6),), "", False) for k in range(3))
    return CountPlan(refs, tuple(tensors), (), MatchOptions(), 1e-5)


def test_reading_ahead_never_fails(model: list[Path]) -> None:
    plan = plan_of(model).count
    model[1].joinpath("model.safetensors").unlink()
    reading = ahead.ReadAhead(plan)
    reading.announce([worker.Work(0, True, False)])
    reading.announce_head()
    reading.close()


def _forecast(plan: MergePlan, out: Path) -> float:
    return float(forecast.forecast(plan, out, Limits())["estimated_seconds"])


def test_a_forecast_follows_from_the_rates(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "_rehearsed", lambda plan, found: (1e6, 2e6))
    plan, before = plan_of(model), sorted(tmp_path.rglob("*"))
    read, written = plan.count.bytes_read, plan.written + overlap.projected_size(plan.count)
    seconds = forecast.STARTUP + read / 1e6 + max(read / 2e6, written / 1e6)
    assert _forecast(plan, tmp_path / "out") == pytest.approx(seconds, abs=0.06)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_small_model_is_not_rehearsed(model: list[Path]) -> None:
    plan = plan_of(model)
    found = capacity(Limits(), plan.count, plan)
    assert forecast._rehearsed(plan.count, found) == (forecast.RATE, forecast.RATE), (
        "three grains are too few"
    )


def test_a_model_that_is_never_compiled_is_forecast_with_the_compiling(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model)
    plain = _forecast(plan, tmp_path / "out")
    monkeypatch.setattr(forecast.jit, "compiled", lambda loop: False)
    assert _forecast(plan, tmp_path / "out") == pytest.approx(plain + forecast.COMPILING, abs=0.2)


def test_the_command_line_begins_to_read_before_it_loads_the_engine(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[CountPlan] = []
    monkeypatch.setattr(ahead, "head_start", begun.append)
    words = ["merge", *map(str, model), "-o", str(tmp_path / "out"), "-q"]
    cli.cli(words, standalone_mode=False)
    cli.cli(words, standalone_mode=False)
    assert len(begun) == 1, "a finished output is not read for"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_the_pass_has_finished_a_step(
    number: signal.Signals, model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised inside the executor's own code it could leave a lock taken, and the run hanging."""
    finished: list[int] = []

    class Stopped(BaseException):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    def announce(self: ahead.ReadAhead, works: object, waiting: int) -> None:
        if not finished:
            signal.raise_signal(number)
        finished.append(1)

    monkeypatch.setattr(ahead.ReadAhead, "announce", announce)
    before = signal.signal(number, stop)
    try:
        with pytest.raises(Stopped):
            merge(plan_of(model), tmp_path / "out", Limits(workers=1))
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert finished, "what the signal interrupted went on"
    monkeypatch.undo()
    assert not merge(plan_of(model), tmp_path / "out", Limits(workers=1)).already_complete


def _twice(called: list[int]) -> None:
    with held_back():
        signal.raise_signal(signal.SIGINT)
        assert not called
        signal.raise_signal(signal.SIGINT)


def test_who_asks_twice_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(signals, "insisted", None)

    def stop(number: int, frame: object) -> None:
        called.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            _twice(called)
        assert called == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is stop
    finally:
        signal.signal(signal.SIGINT, before)


HANGING = """
import os, threading
from ramstream import cli

def hang(*arguments):
    if threading.current_thread() is threading.main_thread():
        return preadv(*arguments)
    print(flush=True)
    threading.Event().wait()

preadv, os.preadv = os.preadv, hang
cli.main()
"""
"""The command on a disk that hangs."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_asked_twice_ends_while_its_reads_hang(
    number: signal.Signals, model: list[Path], tmp_path: Path
) -> None:
    words = ["merge", *map(str, model), "-o", str(tmp_path / "out"), "-q", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        process.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, said) == (128 + number, "stopped; the same command goes on from here\n")
    assert not merge(plan_of(model), tmp_path / "out", Limits(workers=1)).already_complete


@dataclass
class Hands:
    """Does every task at once; that is seen now, at the next look, or too late."""

    setup: worker.Setup
    fates: list[str]
    room: int = 3
    patience: float | None = None
    next: list[Callable[[], None]] = field(default_factory=list)

    def submit(self, task: Any, works: Any, flying: int) -> Any:
        what, when = self.fates.pop(0).split()
        future = Late()
        if what == "lost":
            end = partial(future.set_exception, OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)))
        else:
            end = partial(future.set_result, task(self.setup, works))
        if when == "now":
            end()
        elif when == "next":
            self.next.append(end)
        else:
            future.end = end
        return future

    def watch(self) -> None:
        while self.next:
            self.next.pop()()


class Late(Future[Any]):
    """Ends when it is too late to cancel it."""

    end: Callable[[], None] | None = None

    def cancel(self) -> bool:
        if self.end is not None:
            self.end()
        return False


@pytest.mark.parametrize(
    ("fates", "vouched"),
    [
        (["well now", "lost now", "well now"], 0),
        (["well now", "lost next", "well next"], 0),
        (["lost now", "well late", "well late"], 0),
        (["stop now", "lost late", "well late"], 1),
    ],
    ids=["with it", "before it", "after it", "while it stops"],
)
def test_nothing_is_vouched_for_that_comes_in_about_the_time_of_an_error_of_the_system(
    fates: list[str], vouched: int, model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's fsync, or write, was told of the loss; after that another's of the same file is told of none."""
    plan, out = plan_of(model, "ram"), tmp_path / "out"
    stops = fates[0] == "stop now"

    @contextmanager
    def executor(found: object, setup: worker.Setup) -> Iterator[Hands]:
        yield Hands(setup, list(fates))
        tasks.release(setup.token)

    def listen(event: Event) -> None:
        if stops and isinstance(event, Advanced):
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(passes, "executor", executor)
        patch.setattr(passes, "TASK_UNITS", 1)
        patch.setattr(passes, "BATCH_SECONDS", 0.0 if stops else 3600.0)
        with pytest.raises((Stop, DiskFullError)):
            merge(plan, out, Limits(workers=1, device="cpu"), listener=listen)
    assert units(tmp_path / "out.ramstream" / "journal.jsonl") == vouched
    assert merge(plan, out, Limits(workers=1)).out == out


def test_nothing_is_vouched_for_after_an_fsync_that_failed(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports lost data once: another fsync succeeds, and says nothing about what was lost."""
    plan, out = plan_of(model, "ram"), tmp_path / "out"
    failed: list[int] = []

    def sync_files(*arguments: object) -> None:
        failed.append(1)
        if len(failed) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(passes.writer, "sync_files", sync_files)
    monkeypatch.setattr(passes, "BATCH_SECONDS", 0.0)
    with pytest.raises(RamstreamError, match="Input/output"):
        merge(plan, out, Limits(workers=1))
    assert len(failed) == 1
    assert units(tmp_path / "out.ramstream" / "journal.jsonl") == 0
    monkeypatch.undo()
    assert merge(plan, out, Limits(workers=1)).out == out


def test_advice_that_a_file_system_does_not_take_ends_nothing(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advise(*arguments: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    merge(plan_of(model), tmp_path / "out", Limits(workers=1))


def test_reading_ahead_asks_in_steps_and_no_more_than_there_is_room_for(
    model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, begin, size, advice: asked.append(size))
    monkeypatch.setattr(ahead, "available_memory", lambda: 8 * 30 * GRAIN)
    reading = ahead.ReadAhead(plan_of(model).count)
    works = [worker.Work(unit, True, False) for unit in (0, 1)]
    reading.announce(works, waiting=99)
    assert not asked
    reading.announce(works, waiting=1)
    reading.close()
    assert max(asked) == ahead.STEP
    assert sum(asked) == 2 * 3 * 2 * GRAIN


def test_a_rehearsal_counts_real_units_twice_and_writes_nothing(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    do = worker.Worker.do

    def noted(self: worker.Worker, work: worker.Work) -> worker.UnitResult:
        counted.append(work.unit)
        return do(self, work)

    monkeypatch.setattr(worker.Worker, "do", noted)
    monkeypatch.setattr(Space, "units", 4)  # of which three have elements
    plan, before = plan_of(model), sorted(tmp_path.rglob("*"))
    found = capacity(Limits(), plan.count, plan)
    first, again = forecast._rehearsed(plan.count, found)
    assert first > 0
    assert again > 0
    assert sorted(counted) == [0, 1, 1, 2, 2, 3]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("method", ["ram", "ram-plus"])
def test_an_input_written_to_while_it_is_read_is_an_error(
    method: str, model: list[Path], tmp_path: Path
) -> None:
    """Also in one scan, where no second pass would compare checksums: half of it would be old, half new."""
    weights = model[1] / "model.safetensors"

    def write(event: Event) -> None:
        if isinstance(event, Advanced):
            os.utime(weights, ns=(1, 1))

    with pytest.raises(IntegrityError, match="agent-1 was written to while it was read"):
        merge(plan_of(model, method), tmp_path / "out", Limits(workers=1), listener=write)
    os.utime(weights)
    with pytest.raises(IntegrityError, match="agent-1 was written to while it was read"):
        count(plan_of(model, method).count, Limits(workers=1), listener=write)
    assert not (tmp_path / "out").exists()
    merge(plan_of(model, method), tmp_path / "out", Limits(workers=1))


def test_a_dry_run_refuses_what_an_unfinished_run_makes_impossible(model: list[Path], tmp_path: Path) -> None:
    stopped(plan_of(model), tmp_path / "out", "counting")
    with pytest.raises(JournalError):
        forecast.forecast(plan_of(model[:2]), tmp_path / "out", Limits())
    forecast.forecast(plan_of(model, r=0.5), tmp_path / "out", Limits())


def test_a_worker_whose_task_failed_is_not_used_again(model: list[Path]) -> None:
    """Its kernels hold what the failed unit counted, which would be added to the next one's."""
    setup = worker.Setup(plan_of(model).count, "pread")
    tasks.run_task(setup, [worker.Work(0, True, False)])
    assert len(tasks._workers[setup.token]._of) == 1
    with pytest.raises(IntegrityError, match="changed since it was counted"):
        tasks.run_task(setup, [worker.Work(0, False, False, expected=(1, 2, 3))])
    assert not tasks._workers[setup.token]._of
    tasks.release(setup.token)
    assert setup.token not in tasks._workers
