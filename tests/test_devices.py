"""Several GPUs: workers are dealt to them in turn, each device has its budget, and the bytes are the same."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import gpus
import pytest
from clusters import Machines
from runs import contents, family, plan_of, run, small_steps, write_family

from ramstream import Limits
from ramstream.engine import limits, passes
from ramstream.engine.limits import capacity, deal, resolve_devices
from ramstream.errors import BudgetError, UsageError
from ramstream.kernels.torch import TorchMerger
from ramstream.plan import MergePlan

UNITS = 12


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One grain, and eleven byte ranges that are copied."""
    shapes = {"w": ("BF16", (70_000,)), "ids": ("I64", (UNITS - 1, 1 << 20))}
    return write_family(tmp_path_factory.mktemp("devices"), *family(shapes, agents=2))


@pytest.fixture
def plan(paths: list[Path]) -> MergePlan:
    return plan_of(paths, r=2)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices of the mergers that were made, on a machine with two GPUs."""
    devices: list[str] = []
    gpus.stand_in(monkeypatch, devices.append)
    return devices


def test_devices_as_people_write_them(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_devices("cuda:all") == resolve_devices("cuda:0,1") == ["cuda:0", "cuda:1"]
    assert resolve_devices("cuda:1,0") == ["cuda:1", "cuda:0"]
    assert resolve_devices("cuda:1") == ["cuda:1"]
    assert resolve_devices("cpu:torch") == ["cpu:torch"]
    for device, said in {
        "cuda:0,2": "--device cuda:2: torch sees 2 GPUs here",
        "cuda:0,0": "--device cuda:0,0 names a device twice",
        "cuda:0,": "use auto, cpu, cuda:N, cuda:N,M, cuda:all or cpu:torch",
        "cuda:all,0": "use auto, cpu, cuda:N, cuda:N,M, cuda:all or cpu:torch",
        "cpu:all": "use auto, cpu, cuda:N, cuda:N,M, cuda:all or cpu:torch",
    }.items():
        with pytest.raises(UsageError, match=said):
            resolve_devices(device)
    monkeypatch.setattr(limits, "_gpus", lambda: 0)
    with pytest.raises(UsageError, match="--device cuda:all: torch sees no GPU here"):
        resolve_devices("cuda:all")


def test_workers_are_dealt_in_turn_as_far_as_each_device_has_room() -> None:
    assert deal([("a", 100), ("b", 100)], 10, wanted=5) == ["a", "b", "a", "b", "a"]
    assert deal([("a", 39), ("b", 10)], 10, wanted=9) == ["a", "b", "a", "a"]
    assert deal([("a", 9), ("b", 20)], 10, wanted=9) == ["b", "b"]
    with pytest.raises(BudgetError, match="on the GPU"):
        deal([("a", 9), ("b", 8)], 10, wanted=1)


def test_the_budget_of_every_device_is_kept(plan: MergePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    each = TorchMerger.device_bytes(plan.program)
    free = {"cuda:0": 3 * each + 5, "cuda:1": each, "cuda:2": each - 1}
    gpus.stand_in(monkeypatch, print, free)
    found = capacity(Limits(memory="9GB", workers=16, device="cuda:all"), plan.count, plan)
    assert found.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:0")
    assert found.workers == 4
    just_three = found.projected - 1
    found = capacity(Limits(memory=just_three, workers=16, device="cuda:all"), plan.count, plan)
    assert found.devices == ("cuda:0", "cuda:1", "cuda:0")
    with pytest.raises(BudgetError, match="are free; use --device cpu"):
        capacity(Limits(memory="9GB", device="cuda:2"), plan.count, plan)


def test_two_devices_give_the_same_bytes_and_share_the_work(
    plan: MergePlan, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan, tmp_path / "good")
    together, do = threading.Barrier(4), passes.run_task
    waited = set()

    def run_task(setup: Any, works: Any) -> Any:
        if setup.out and threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            together.wait(60)  # so that every thread has a worker
        return do(setup, works)

    monkeypatch.setattr(passes, "run_task", run_task)
    with small_steps():
        outcome, _ = run(plan, tmp_path / "out", Limits(memory="9GB", workers=4, device="cuda:all"))
    assert Counter(made) == {"cuda:0": 2, "cuda:1": 2}
    assert outcome.summary["device"] == "cuda:0, cuda:1"
    assert contents(tmp_path / "out") == contents(tmp_path / "good")


@pytest.mark.slow
def test_a_worker_of_a_cluster_uses_its_own_devices(plan: MergePlan, tmp_path: Path) -> None:
    run(plan, tmp_path / "good")
    machines, notes = Machines(tmp_path / "machines"), tmp_path / "notes"
    try:
        machines.worker("--nthreads", "2", "--preload", "gpus", GPUS=str(notes))
        machines.wait(1)
        outcome, _ = run(plan, tmp_path / "out", Limits(scheduler=machines.address, device="cuda:all"))
    finally:
        machines.close()
    assert contents(tmp_path / "out") == contents(tmp_path / "good")
    assert outcome.summary["device"] == "cuda:0, cuda:1"
    assert sorted(line.split()[2] for line in notes.read_text().splitlines()) == ["cuda:0", "cuda:1"]
