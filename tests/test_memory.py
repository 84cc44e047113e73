"""Memory arithmetic: every term shows in the sum, and a budget that is too small is refused with both numbers."""

import pytest

from ramstream import memory
from ramstream.engine import limits
from ramstream.engine.limits import Limits, machine_memory, parse_size, resolve_device
from ramstream.errors import BudgetError, PlanError
from ramstream.types import GRAIN, STRIP


def test_reserved_grows_with_tensors_agents_and_tallies() -> None:
    alone = memory.reserved(0, 3, 17, wide=False, torch=False)
    assert alone == memory.PROCESS
    assert memory.reserved(0, 3, 17, wide=True, torch=False) == memory.PROCESS + memory.WIDE
    assert memory.reserved(0, 3, 17, wide=False, torch=True) == memory.PROCESS + memory.TORCH
    assert memory.reserved(5, 3, 17, wide=False, torch=False) - alone == 5 * (4 * memory.PER_TENSOR + 2 * 17)


def test_a_worker_is_the_sum_of_its_parts() -> None:
    agents, itemsize, out_itemsize, kernels, staging = 3, 2, 4, 101, 103
    parts = memory.strips(agents, itemsize, True) + memory.bits(agents) + memory.output(out_itemsize)
    assert memory.worker(agents, itemsize, out_itemsize, kernels, staging) == parts + kernels + staging


def test_a_strip_is_resident_once_mapped_and_once_copied() -> None:
    slack = 5 * memory.MAPPED_SLACK
    assert memory.strips(4, 2, mapped=True) == 2 * 5 * STRIP * 2 + slack + 5 * memory.FOLIO // 8
    assert memory.strips(4, 2, mapped=False) == 5 * (STRIP * 2 + memory.FOLIO // 8)


def test_the_output_buffer_holds_a_strip() -> None:
    assert memory.output(8) == STRIP * 8


def test_bits_are_counted_with_the_copies_that_writing_makes() -> None:
    assert memory.bits(8) == 3 * GRAIN


def test_as_many_workers_as_fit_but_no_more_than_wanted() -> None:
    assert memory.workers_that_fit(100, 30, 20, wanted=8) == 3
    assert memory.workers_that_fit(100, 30, 20, wanted=2) == 2


def test_a_budget_too_small_names_both_numbers_and_the_option() -> None:
    mib = 1 << 20
    with pytest.raises(BudgetError, match=r"needs 50 MiB and --memory allows 40 MiB; use --memory 50MiB"):
        memory.workers_that_fit(40 * mib, 30 * mib, 20 * mib, wanted=1)
    assert memory.workers_that_fit(50 * mib, 30 * mib, 20 * mib, wanted=1) == 1


def test_workers_on_a_gpu_fit_what_is_free_there() -> None:
    assert memory.device_workers(100, 30, wanted=8) == 3
    with pytest.raises(BudgetError, match="needs 2 MiB on the GPU and 1 MiB are free; use --device cpu"):
        memory.device_workers(1 << 20, 2 << 20, wanted=1)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cpu:0", "", "mps"])
def test_a_device_nobody_knows_is_refused(device: str) -> None:
    with pytest.raises(PlanError, match="use auto, cpu, cuda:N, cuda:N,M, cuda:all or cpu:torch"):
        resolve_device(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_gpus", lambda: 1)
    assert resolve_device("cuda") == resolve_device("cuda:0") == "cuda:0"
    with pytest.raises(PlanError, match="--device cuda:1: torch sees 1 GPUs here"):
        resolve_device("cuda:1")


@pytest.mark.parametrize(
    ("shown", "gpus", "device"), [(False, 1, "cpu"), (True, 0, "cpu"), (True, 1, "cuda:0")]
)
def test_auto_is_a_gpu_where_the_machine_shows_one(
    shown: bool, gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_shows_gpu", lambda: shown)
    monkeypatch.setattr(limits, "_gpus", lambda: gpus)
    assert resolve_device("auto") == device


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512 * 10**6),
        ("2GiB", 2 << 30),
        ("1.5 gb", 1_500_000_000),
        ("4096", 4096),
        ("3k", 3000),
        ("1KiB", 1024),
        ("1T", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert Limits(memory=text).budget() == size


@pytest.mark.parametrize("text", ["", "MB", "much", "-1GB", "0", "1XB", "inf", "nan", "1e400GB", "2GBB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="size"):
        parse_size(text)


def test_the_default_budget_is_a_quarter_of_the_machine_and_at_most_4_gb() -> None:
    assert Limits().budget() == min(machine_memory() // 4, 4 * 10**9)


def test_no_workers_is_refused() -> None:
    with pytest.raises(PlanError, match="--workers is 0"):
        Limits(workers=0).wanted_workers()
