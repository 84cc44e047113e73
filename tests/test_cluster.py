"""Merges and counts by the workers of a dask cluster: the same bytes, whatever befalls workers or scheduler."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import deeds
import distributed
import pytest
from clusters import SETTINGS, Machines, until
from runs import (
    Stop,
    cli,
    contents,
    family,
    plan_of,
    run,
    same_store,
    small_steps,
    stop_after,
    units,
    write_family,
)

import ramstream
from ramstream import Limits, count, durable, merge
from ramstream.engine import cluster, connecting, executors, lending, passes, remote
from ramstream.engine.events import Advanced, Event, Note, PassBegan
from ramstream.engine.limits import peak_memory
from ramstream.errors import BudgetError, JournalError, PlanError, RamstreamError, UsageError
from ramstream.types import GRAIN

OUTS = {"ram-plus": {"r": 2}, "ram": {}, "ties": {"density": 0.3, "scope": "model"}}


class Model:
    """Eight grains at one byte an element, and outputs of runs on this machine alone."""

    def __init__(self, root: Path) -> None:
        shapes = {"a": ("F8_E4M3", (8, GRAIN)), "norm": ("F32", (77,)), "ids": ("I64", (1 << 20,))}
        self.root = root
        self.paths = write_family(root, *family(shapes, agents=2))
        self.deeds = root / "deeds"
        self._good: dict[str, Path] = {}

    def plan(self, method: str = "ram-plus", **parameters: object) -> Any:
        return plan_of(self.paths, method, **(parameters or OUTS[method]))

    def good(self, method: str = "ram-plus") -> Path:
        if method not in self._good:
            out = self.root / f"good-{method}"
            run(self.plan(method), out)
            self._good[method] = out
        return self._good[method]

    def do(self, *names: str) -> None:
        """Have workers do deeds."""
        for name in names:
            (self.deeds / name).touch()

    def log(self) -> list[list[str]]:
        file = self.deeds / "log"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Machines]]:
    root = tmp_path_factory.mktemp("cluster")
    machines = Machines(root / "machines")
    try:
        machines.worker("--nworkers", "2")
        model = Model(root / "model")
        yield model, machines.wait(2)
    finally:
        machines.close()
        shutil.rmtree(root)


@pytest.fixture
def model(shared: tuple[Model, Machines]) -> Model:
    found = shared[0]
    shutil.rmtree(found.deeds, ignore_errors=True)
    found.deeds.mkdir()
    return found


@pytest.fixture
def machines(shared: tuple[Model, Machines], monkeypatch: pytest.MonkeyPatch) -> Machines:
    """A scheduler with two workers; whoever is killed is started again."""
    monkeypatch.setattr(passes, "run_task", deeds.run_task)
    monkeypatch.setattr(connecting, "CONNECT", 3.0)
    return shared[1].wait(2)


def on(machines: Machines, **limits: Any) -> Limits:
    return Limits(scheduler=machines.address, **{"device": "cpu", **limits})


def work_of(out: Path) -> Path:
    return out.with_name(out.name + ".ramstream")


def assert_same(out: Path, good: Path) -> None:
    """The same files, the same store, and nothing else left."""
    assert contents(out) == contents(good)
    assert same_store(work_of(out) / "overlap.zarr", work_of(good) / "overlap.zarr")
    assert os.listdir(work_of(out)) == ["overlap.zarr"]
    assert sorted(os.listdir(work_of(out) / "overlap.zarr")) == sorted(
        os.listdir(work_of(good) / "overlap.zarr")
    )


@pytest.mark.parametrize("method", OUTS)
def test_a_cluster_gives_the_same_bytes(
    method: str, model: Model, machines: Machines, tmp_path: Path
) -> None:
    outcome, _ = run(model.plan(method), tmp_path / "out", on(machines))
    assert_same(tmp_path / "out", model.good(method))
    assert outcome.summary["workers"] == 2
    assert len({pid for pid, *_ in model.log()}) == 2, "both worked"


def test_counts_of_a_cluster_are_the_same(model: Model, machines: Machines, tmp_path: Path) -> None:
    plan = model.plan().count
    tallies = count(plan, Limits(), tmp_path / "one.zarr")[1]
    assert count(plan, on(machines))[1].tobytes() == tallies.tobytes()
    assert count(plan, on(machines), tmp_path / "two.zarr")[1].tobytes() == tallies.tobytes()
    assert same_store(tmp_path / "one.zarr", tmp_path / "two.zarr")


def test_workers_take_what_was_projected_and_hold_nothing_when_a_run_is_over(
    model: Model, machines: Machines, tmp_path: Path
) -> None:
    outcome, _ = run(model.plan(), tmp_path / "out", on(machines))
    with distributed.Client(machines.address, set_as_default=False) as client:
        assert max(client.run(peak_memory).values()) <= outcome.summary["projected_memory"]
        until(lambda: set(client.run(deeds.held).values()) == {0})
        until(lambda: not client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)))


@pytest.mark.parametrize("title", ["counting", "merging"])
def test_a_worker_that_is_killed_is_replaced(
    title: str, model: Model, machines: Machines, tmp_path: Path
) -> None:
    model.do(f"kill-{title}-0")
    run(model.plan(), tmp_path / "out", on(machines))
    assert not list(model.deeds.glob("kill-*"))
    assert_same(tmp_path / "out", model.good())


def test_workers_that_keep_dying_end_the_run_and_the_same_command_goes_on(
    model: Model, machines: Machines, tmp_path: Path
) -> None:
    model.do(*(f"kill-merging-{k}" for k in range(20)))
    with pytest.raises(
        RamstreamError, match=r"2 workers in a row ended while they did one task.*goes on"
    ) as error:
        run(model.plan(), tmp_path / "out", on(machines))
    assert error.value.exit_code == 1
    for file in model.deeds.glob("kill-*"):
        file.unlink()
    machines.wait(2)
    _, titles = run(model.plan(), tmp_path / "out", on(machines))
    assert titles == ["merging"]
    assert_same(tmp_path / "out", model.good())


def test_a_worker_that_is_stopped_for_a_while_just_takes_longer(
    model: Model, machines: Machines, tmp_path: Path
) -> None:
    model.do("stop-merging-0")

    def wake() -> None:
        until((model.deeds / "stopped").exists)
        time.sleep(1.0)
        os.kill(int((model.deeds / "stopped").read_text()), signal.SIGCONT)

    waking = threading.Thread(target=wake)
    waking.start()
    run(model.plan(), tmp_path / "out", on(machines))
    waking.join()
    assert_same(tmp_path / "out", model.good())


def test_a_worker_that_wakes_up_late_harms_nobody(model: Model, machines: Machines, tmp_path: Path) -> None:
    """Its run was stopped, and another merge, with other parameters, is done where it was writing."""
    model.do("stop-merging-0", "slow")

    def stop(event: Event) -> None:
        if (model.deeds / "stopped").exists():
            raise Stop

    with small_steps(), pytest.raises(Stop):
        merge(model.plan(), tmp_path / "out", on(machines), listener=stop)
    run(model.plan(r=3.0), tmp_path / "out")
    before = contents(tmp_path / "out")
    assert contents(model.good())["model.safetensors"] != before["model.safetensors"]
    os.kill(int((model.deeds / "stopped").read_text()), signal.SIGCONT)
    until((model.deeds / "woke").exists)
    assert "FileNotFoundError" in (model.deeds / "woke").read_text()
    assert contents(tmp_path / "out") == before
    assert os.listdir(work_of(tmp_path / "out")) == ["overlap.zarr"]


def test_a_late_counter_finds_no_store_to_write_to(model: Model, machines: Machines, tmp_path: Path) -> None:
    model.do("stop-counting-0", "slow")

    def stop(event: Event) -> None:
        if (model.deeds / "stopped").exists():
            raise Stop

    store = tmp_path / "store.zarr"
    with small_steps(), pytest.raises(Stop):
        count(model.plan().count, on(machines), store, stop)
    shutil.rmtree(store)
    count(model.plan(epsilon=0.01).count, Limits(), store)
    chunks = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    os.kill(int((model.deeds / "stopped").read_text()), signal.SIGCONT)
    until((model.deeds / "woke").exists)
    assert chunks == {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_a_worker_may_join_in_the_middle(
    model: Model, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "PATIENCE", 0.0)
    model.do("slow")
    joined: list[subprocess.Popen[bytes]] = []

    def join(event: Event) -> None:
        if isinstance(event, Advanced) and not joined:
            joined.append(machines.worker())
            machines.wait(3)

    def took_part() -> bool:
        return bool(joined) and str(joined[0].pid) in {pid for pid, *_ in model.log()}

    for _ in range(3):  # on a busy machine all tasks may be dealt before dask gives it one
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(work_of(tmp_path / "out"), ignore_errors=True)
        with small_steps():
            merge(model.plan("ram"), tmp_path / "out", on(machines), listener=join)
        assert_same(tmp_path / "out", model.good("ram"))
        if took_part():
            break
        joined.pop().terminate()
        machines.wait(2)
    assert took_part()
    joined[0].terminate()
    machines.wait(2)


def test_fewer_threads_than_there_are(model: Model, machines: Machines, tmp_path: Path) -> None:
    model.do("slow")
    outcome, _ = run(model.plan("ram"), tmp_path / "out", on(machines, workers=1))
    assert outcome.summary["workers"] == 1
    spans = sorted((float(begin), float(end)) for _, begin, end, _ in model.log())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    with pytest.raises(UsageError, match="--workers is 0"):
        run(model.plan("ram"), tmp_path / "no", on(machines, workers=0))


def test_two_commands_for_one_output(model: Model, machines: Machines, tmp_path: Path) -> None:
    refused: list[str] = []

    def second(event: Event) -> None:
        if isinstance(event, Advanced) and not refused:
            with pytest.raises(JournalError, match="is in use by") as error:
                merge(model.plan(), tmp_path / "out", on(machines))
            refused.append(str(error.value))

    merge(model.plan(), tmp_path / "out", on(machines), listener=second)
    assert refused
    assert_same(tmp_path / "out", model.good())


def test_a_run_on_a_cluster_goes_on_here_and_the_other_way_round(
    model: Model, machines: Machines, tmp_path: Path
) -> None:
    with small_steps(), pytest.raises(Stop):
        merge(model.plan(), tmp_path / "out", on(machines), listener=stop_after("merging", 3))
    assert units(work_of(tmp_path / "out") / "journal.jsonl") >= 3
    with small_steps(), pytest.raises(Stop):
        merge(model.plan(), tmp_path / "out", Limits(workers=1), listener=stop_after("merging", 2))
    assert run(model.plan(), tmp_path / "out", on(machines))[1] == ["merging"]
    assert_same(tmp_path / "out", model.good())


def command(model: Model, out: Path, machines: Machines) -> list[str]:
    driver = "from ramstream.engine import passes; import deeds; passes.run_task = deeds.run_task\n"
    driver += "passes.BATCH_SECONDS = 0.0; from ramstream.cli import main; main()"
    words = [
        "merge",
        *map(str, model.paths),
        "-p",
        "r=2",
        "-o",
        str(out),
        "--scheduler",
        machines.address,
        "-q",
    ]
    return [sys.executable, "-c", driver, *words]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_command_that_is_stopped_while_a_worker_hangs_ends_at_once_and_goes_on(
    number: signal.Signals, model: Model, machines: Machines, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    model.do("stop-merging-0", "slow")
    process = subprocess.Popen(
        command(model, out, machines), env={**os.environ, **SETTINGS}, stderr=subprocess.PIPE, text=True
    )
    until((model.deeds / "stopped").exists, 60)
    until(lambda: units(work_of(out) / "journal.jsonl"))
    process.send_signal(number)
    _, said = process.communicate(timeout=15)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number], said
    assert "Traceback" not in said
    assert list(work_of(out).glob("run-*")) == [] or number == signal.SIGKILL
    os.kill(int((model.deeds / "stopped").read_text()), signal.SIGCONT)
    again = subprocess.run(
        command(model, out, machines), env={**os.environ, **SETTINGS}, stderr=subprocess.PIPE, text=True
    )
    assert again.returncode == 0, again.stderr
    assert not again.stderr
    assert_same(out, model.good())


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Machines]]:
    """Makes schedulers without workers."""
    monkeypatch.setattr(passes, "run_task", deeds.run_task)
    monkeypatch.setattr(connecting, "CONNECT", 3.0)
    made: list[Machines] = []

    def make() -> Machines:
        made.append(Machines(tmp_path / f"machines-{len(made)}"))
        return made[-1]

    yield make
    for machines in made:
        machines.close()


@pytest.mark.parametrize("title", [pytest.param("counting", marks=pytest.mark.slow), "merging"])
def test_a_scheduler_that_is_lost_ends_the_run_and_a_new_one_goes_on(
    title: str, model: Model, machines: Machines, alone: Callable[[], Machines], tmp_path: Path
) -> None:
    doomed = alone()
    doomed.worker()
    doomed.wait(1)
    now: list[str] = []

    def kill(event: Event) -> None:
        if isinstance(event, PassBegan):
            now.append(event.title)
        if isinstance(event, Advanced) and now[-1] == title:
            doomed.scheduler.kill()

    out, begun = tmp_path / "out", time.monotonic()
    model.do("slow")
    with (
        small_steps(),
        pytest.raises(RamstreamError, match=f"scheduler {doomed.address} is gone.*goes on") as error,
    ):
        merge(model.plan(), out, on(doomed), listener=kill)
    assert (error.value.exit_code, time.monotonic() - begun < 30) == (1, True)
    journal = work_of(out) / ("overlap.zarr/journal.jsonl" if title == "counting" else "journal.jsonl")
    assert units(journal) >= 1
    run(model.plan(), out, on(machines))
    assert_same(out, model.good())


def test_without_workers_a_run_waits_for_some_and_not_for_ever(
    model: Model, alone: Callable[[], Machines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ABSENCE", 1.0)
    monkeypatch.setattr(cluster, "PATIENCE", 0.1)
    machines, said, workers = alone(), [], []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            said.append(event.text)
        if isinstance(event, Advanced) and workers:
            workers.pop().kill()

    with pytest.raises(PlanError, match=f"{machines.address} has no workers; start some with `dask worker"):
        merge(model.plan(), tmp_path / "out", on(machines), listener=listen)
    assert said == [f"waiting for workers of {machines.address}"]
    assert not work_of(tmp_path / "out").exists()
    workers.append(machines.worker())
    machines.wait(1)
    with small_steps(), pytest.raises(RamstreamError, match=f"{machines.address} had no workers for 1 s"):
        merge(model.plan(), tmp_path / "out", on(machines), listener=listen)
    assert said[1:] == [f"{machines.address} has no workers left; waiting for some"]
    run(model.plan(), tmp_path / "out")
    assert_same(tmp_path / "out", model.good())


def inside(mounting: str) -> list[str]:
    """Words before a command that runs it with other mounts than we have; skips where that is not allowed."""
    unshare = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    return [*unshare, f'{mounting} && exec "$@"', "_"]


@pytest.fixture
def another(machines: Machines) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a third worker."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, **how: Any) -> subprocess.Popen[bytes]:
        started.append(machines.worker(*words, **how))
        machines.wait(2 + len(started))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
    machines.wait(2)


def test_a_worker_that_does_not_see_the_inputs_is_refused_before_anything_is_written(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    another(inside=inside(f"mount -t tmpfs none {model.paths[1]}"))
    file = model.paths[1] / "model.safetensors"
    with pytest.raises(PlanError, match=f"worker tcp://.* on {socket.gethostname()}: .*{file}: No such file"):
        run(model.plan(), tmp_path / "out", on(machines))
    assert not work_of(tmp_path / "out").exists()


@pytest.mark.slow
def test_a_worker_that_sees_other_files_is_refused_and_one_that_sees_copies_is_not(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(model.paths[1], copy)
    another(inside=inside(f"mount --bind {copy} {model.paths[1]}"))
    run(model.plan("ram"), tmp_path / "out", on(machines))
    assert_same(tmp_path / "out", model.good("ram"))
    shutil.copytree(model.paths[2], other)
    another(inside=inside(f"mount --bind {other} {model.paths[1]}"))
    with pytest.raises(PlanError, match=f"agent-1 has other content, sampled in {model.paths[1]}"):
        run(model.plan("ram"), tmp_path / "no", on(machines))


def test_a_worker_that_does_not_see_the_output_is_refused_and_the_same_command_goes_on(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    elsewhere = another(inside=inside(f"mount -t tmpfs none {place}"))
    with pytest.raises(PlanError, match=rf"{place}/out\.ramstream/overlap\.zarr/run-\w+/probe: No such file"):
        run(model.plan(), place / "out", on(machines))
    elsewhere.terminate()
    machines.wait(2)
    run(model.plan(), place / "out", on(machines))
    assert_same(place / "out", model.good())


@pytest.mark.slow
def test_a_worker_that_may_not_write_is_refused(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    another(inside=inside(f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"))
    with pytest.raises(PlanError, match=r"run-\w+/\w+\.probe: Read-only file system"):
        run(model.plan(), place / "out", on(machines))


def test_a_worker_with_other_code_is_refused(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    package = Path(ramstream.__file__).parent
    shutil.copytree(package, tmp_path / "ramstream", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "ramstream" / "types.py", "a") as file:
        file.write("# newer\n")
    another(PYTHONPATH=f"{tmp_path}:{SETTINGS['PYTHONPATH']}")
    with pytest.raises(
        PlanError, match=r"ramstream is 0\S+ with code (\w+) there and 0\S+ with code (?!\1)\w+ here"
    ):
        run(model.plan(), tmp_path / "out", on(machines))


def test_a_worker_without_ramstream_is_refused(
    model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    (tmp_path / "ramstream.py").write_text("raise ImportError('no ramstream here')\n")
    another(PYTHONPATH=str(tmp_path))
    with pytest.raises(
        PlanError, match=r"worker tcp://\S+ lacks ramstream: no ramstream here; install the same on all hosts"
    ):
        run(model.plan(), tmp_path / "out", on(machines))
    assert machines.workers() == 3, "nobody died of it"
    assert not work_of(tmp_path / "out").exists()


def test_every_version_that_may_matter_is_compared() -> None:
    mine = remote.versions()
    assert {"ramstream", "Python", "numpy", "numba", "dask", "distributed"} <= mine.keys()
    assert list(remote._other_versions(mine)) == []
    assert list(remote._other_versions(mine | {"numpy": "1.0"})) == [
        f"numpy is {mine['numpy']} there and 1.0 here"
    ]


@pytest.mark.parametrize(
    ("limit", "memory", "said"),
    [
        ("4GiB", "100MB", r"it needs \d+ MiB with --nthreads 1, and --memory allows 96 MiB; use --memory \d+MiB"),
        ("600MiB", "1GiB", "its memory limit is 600 MiB and --memory allows 1024 MiB; start it with --memory"),
        ("500MiB", None, r"it needs \d+ MiB with --nthreads 1, more than 70% of its memory limit of 500 MiB"),
        ("500MiB", "500MiB", r"it needs .* more than 70% .* 500 MiB.*--memory-limit \d+MiB or more"),
    ],
)  # fmt: skip
def test_a_worker_that_may_take_too_little_memory_is_refused(
    limit: str, memory: str | None, said: str, model: Model, machines: Machines, another: Any, tmp_path: Path
) -> None:
    another("--memory-limit", limit)
    with pytest.raises(BudgetError, match=f"worker tcp://.*: {said}"):
        run(model.plan(), tmp_path / "out", on(machines, memory=memory))
    assert not work_of(tmp_path / "out").exists()


def test_what_a_worker_finds_wrong_names_it(model: Model, machines: Machines, tmp_path: Path) -> None:
    work = remote.Work(0, count=False, merge=False, expected=(1, 2, 3))
    limits = on(machines)
    with executors.connected(limits, print) as workers:
        found = workers(model.plan().count)
        setup = remote.Setup(model.plan().count, "pread")
        with executors.executor(found, setup) as hands:
            error = hands.submit(deeds.run_task, [work], 0).exception()
    assert type(error).__name__ == "IntegrityError"
    assert str(error).startswith("worker tcp://127.0.0.1:")


def test_what_hosts_compiled_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers were refused as soon as one of them had compiled a loop that the command had not."""
    package = Path(ramstream.__file__).parent
    copy = shutil.copytree(package, tmp_path / "ramstream", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ramstream, "__file__", str(copy / "__init__.py"))
    before = remote.versions()
    (copy / "kernels" / "__pycache__" / "cores").mkdir(parents=True)
    (copy / "kernels" / "__pycache__" / "cores" / "ramstream_core_1.py").write_text("# made at run time")
    assert remote.versions() == before
    (copy / "methods" / "mine.py").write_text("# a method")
    assert remote.versions() != before


def test_a_result_that_a_stopped_worker_holds_keeps_nothing_else_up(
    model: Model, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others waited behind it, and a command that was stopped did not end."""
    with executors.connected(on(machines), print) as workers:
        found = workers(model.plan().count)
        hands, held = found.cluster, threading.Event()
        assert hands is not None
        one, two = machines.ask("ncores")
        where = {each: hands.call(os.getpid, key=each, workers=[each]) for each in (one, two)}
        pids = {each: cluster.Call(hands, call).result(20) for each, call in where.items()}
        kept = hands.call(bytes, 1000, key="kept", workers=[one])
        kept.add_done_callback(lambda _: held.set())
        assert held.wait(20)
        os.kill(pids[one], signal.SIGSTOP)
        try:
            waiting = cluster.Call(hands, kept)
            call = cluster.Call(hands, hands.call(abs, -7, key="more", workers=[two]))
            assert call.result(20) == 7
            assert not waiting.done()
            assert waiting.cancel()
        finally:
            os.kill(pids[one], signal.SIGCONT)


@pytest.fixture
def served() -> Iterator[Callable[[bytes], str]]:
    """Addresses where something else answers than a scheduler."""
    open_sockets: list[socket.socket] = []

    def serve(answer: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        open_sockets.append(listening)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                open_sockets.append(connection)
                connection.sendall(answer)

        threading.Thread(target=accept, daemon=True).start()
        return f"tcp://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    for each in open_sockets:
        with suppress(OSError):  # whoever accepts wakes up
            each.shutdown(socket.SHUT_RDWR)
        each.close()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_what_is_no_scheduler_is_refused_soon(
    answer: bytes,
    served: Callable[[bytes], str],
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connecting, "CONNECT", 1.0)
    begun, address = time.monotonic(), served(answer)
    with pytest.raises(PlanError, match=f"--scheduler {address}: no dask scheduler answers there") as error:
        run(model.plan(), tmp_path / "out", Limits(scheduler=address))
    assert error.value.exit_code == 3
    assert time.monotonic() - begun < 10
    assert not work_of(tmp_path / "out").exists()


def test_other_addresses_are_refused(
    model: Model, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "CONNECT", 1.0)
    worker = next(iter(machines.ask("ncores")))
    for address, said in {
        "tcp://127.0.0.1:1": "Connection refused|no answer in time",
        machines.address.replace("tcp", "tls"): "TLS",
        worker: "is a dask worker; give the address of the scheduler",
    }.items():
        with pytest.raises(PlanError, match=said):
            count(model.plan().count, Limits(scheduler=address))


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:8786", "tcp://", "tcp://host", "http://host:80", "tcp://a b:1"]
)
def test_what_is_no_address_is_a_word_that_means_nothing(address: str, model: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="write tcp://HOST:PORT or tls://HOST:PORT"):
        merge(model.plan(), tmp_path / "out", Limits(scheduler=address))


def test_without_the_extra_it_says_what_to_install(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'ramstream\[distributed\]'"):
        merge(model.plan(), tmp_path / "out", Limits(scheduler="tcp://127.0.0.1:1"))


def test_a_run_on_this_machine_loads_nothing_of_dask_distributed() -> None:
    code = (
        "import sys, ramstream.engine.merging, ramstream.engine.forecast; print('distributed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_commands_take_the_option(
    model: Model, machines: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*map(str, model.paths), "--scheduler", machines.address, "-p", "r=2"]
    assert cli("merge", *words, "-o", tmp_path / "out", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 2
    assert cli("merge", *words, "-o", tmp_path / "out", "-q") == 0
    assert cli("stats", *words, "--store", tmp_path / "store.zarr", "-q") == 0
    assert_same(tmp_path / "out", model.good())
    assert same_store(tmp_path / "store.zarr", work_of(model.good()) / "overlap.zarr")
    assert cli("stats", tmp_path / "out", "--scheduler", machines.address) == 2
    assert "options of counting go with a base and its agents" in capsys.readouterr().err


def test_a_file_system_without_hard_links_is_refused_by_name(
    model: Model, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(self: durable.Disk, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(source))

    began: list[Event] = []
    with monkeypatch.context() as patch:
        patch.setattr(durable.Disk, "link", link)
        with pytest.raises(PlanError, match=r"cannot be a hard link .*which --scheduler needs there"):
            merge(model.plan(), tmp_path / "out", on(machines), listener=began.append)
    assert began == [], "it is said before hours of counting"
    run(model.plan(), tmp_path / "out")
    assert_same(tmp_path / "out", model.good())


def test_missing_hard_links_are_found_by_a_look_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending.refuse_no_links(tmp_path)
    assert os.listdir(tmp_path) == []

    numbers = [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK]

    def link(self: durable.Disk, source: Path, target: Path) -> None:
        raise OSError(numbers.pop(), "no links", str(source))

    monkeypatch.setattr(durable.Disk, "link", link)
    while numbers:
        with pytest.raises(
            PlanError, match=rf"^{tmp_path}/.* cannot be a hard link \(no links\), which --sch"
        ):
            lending.refuse_no_links(tmp_path)
    numbers.append(errno.EIO)
    with pytest.raises(OSError, match="no links"):
        lending.refuse_no_links(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_lent_folder_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    folder = lending._made(tmp_path / "run-1")
    assert lending.problem(folder) is None
    assert sorted(os.listdir(folder)) == ["probe"]
    (folder / "probe").write_text("another")
    assert lending.problem(folder) == f"{folder} is another folder there"
    lending.clear(tmp_path)
    assert os.listdir(tmp_path) == []
    assert lending.problem(folder) == f"{folder}/probe: No such file or directory"
