"""The check for whoever has a GPU, run with torch on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import gpu_cases  # noqa: E402
import gpu_check  # noqa: E402

from ramstream import methods  # noqa: E402
from ramstream.kernels import host  # noqa: E402
from ramstream.kernels.torch import TorchMerger  # noqa: E402
from ramstream.types import Dtype, Kind  # noqa: E402

FEW = ["--device", "cpu", "--elements", "2000"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Only some of the strips and no measurements."""
    some = [case for case in gpu_cases.cases() if case.method == "ram"][::12]
    monkeypatch.setattr(gpu_check, "cases", lambda: iter(some))
    for name in ("measure_copies", "measure_kernels", "measure_threads", "check_merges"):
        monkeypatch.setattr(gpu_check, name, skipped)
    return monkeypatch


def skipped(report: gpu_check.Report) -> None:
    pass


@pytest.mark.slow
def test_torch_on_the_cpu_is_equal_everywhere_and_everything_is_measured() -> None:
    command = [sys.executable, str(TOOLS / "gpu_check.py"), *FEW, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["device"] == "cpu"
    assert report["different"] == []
    assert report["checks"] > len(list(gpu_cases.cases())) > 2 * 9 * len(Dtype) * 24
    assert report["speed"].keys() == {
        "memcpy, host to host",
        "kernels, strips of 2000",
        *(f"strips, {threads}" for threads in ("1 thread", "2 threads", "4 threads")),
        *(f"merge -m {m} --device {d}" for m, d in product(methods.available(), ("cpu", "cpu:torch"))),
    }
    assert all(speed > 0 for speed in report["speed"].values())
    assert 0 < report["memory"]["host, a merge, peak"] <= report["memory"]["host, a merge, projected"]


def test_the_cases_are_everything_that_decides_bytes() -> None:
    cases = list(gpu_cases.cases())
    grid = product(methods.available(), Dtype, (1, 3, 9), ("base", "keep"), (True, False), (True, False))
    found = {(c.method, c.base, len(c.kinds), c.policy, c.out == c.base, c.compare is None) for c in cases}
    assert found == {case for case in grid if gpu_cases.accepts(case[0], case[2])}
    for base in Dtype:
        of_base = [case for case in cases if case.base == base]
        assert {case.out for case in of_base} == set(Dtype)
        assert {case.compare for case in of_base} == {None, *Dtype} - {base}
        assert {kind for case in of_base for kind in case.kinds} == {*Dtype, *Kind}
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize("dtype", list(Dtype))
def test_inputs_hold_every_kind_of_value(dtype: Dtype) -> None:
    inputs = gpu_cases.Inputs(gpu_cases.Case("ram", dtype, dtype, (dtype,)), 2000)
    base, agent = (
        torch.from_numpy(np.ascontiguousarray(rows)).view(gpu_cases.TORCH[dtype]).double().flatten()
        for rows in inputs._rows
        if rows is not None
    )
    assert base.isnan().any()
    assert base.isinf().any() == (dtype is not Dtype.F8_E4M3)
    assert (torch.signbit(base) & (base == 0)).any()
    smallest = 2.0 ** (1 - dtype.bias)
    assert ((base.abs() < smallest) & (base != 0)).any()
    assert 0.3 < (base == agent).double().mean() < 0.9


def test_a_wrong_bit_is_found_and_the_case_named(
    quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(FEW) == 0
    assert "32 of 32 checks are equal" in capsys.readouterr().out
    right = TorchMerger.strip

    def wrong(self: TorchMerger, sources: Any, elements: int, *rest: Any) -> None:
        right(self, sources, elements, *rest)
        rest[-1][-1] ^= 1

    quick.setattr(TorchMerger, "strip", wrong)
    assert gpu_check.main([*FEW, "--json"]) == 1
    different = json.loads(capsys.readouterr().out)["different"]
    assert len(different) == 24
    assert different[0].startswith(
        "ram: F32 and F32 x 1 to F32, base: 2 of 2000 elements differ; element 1279"
    )


def test_a_wrong_count_is_found(quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick.setattr(TorchMerger, "take", lambda self: host.Taken(-1, 0, 0.0))
    assert gpu_check.main(FEW) == 1
    assert "differs: ram: F32 and F32 x 1 to F32, base: (overflow, moved) is (-1, 0), not (" in (
        capsys.readouterr().out
    )


def test_other_weights_are_found(tmp_path: Path) -> None:
    for name, data in (("one", b"12"), ("two", b"13"), ("none", None)):
        (tmp_path / name).mkdir()
        if data is not None:
            (tmp_path / name / "model.safetensors").write_bytes(data)
    one, two, none = (tmp_path / name for name in ("one", "two", "none"))
    assert gpu_check.differing(one, one) is None
    assert gpu_check.differing(one, two) == "model.safetensors differ from the CPU's"
    assert gpu_check.differing(none, one) == "model.safetensors differ from the CPU's"


def test_without_a_device_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    message = "no CUDA device; use --device cpu to run the same with torch on the CPU\n"
    assert capsys.readouterr().err == message
    assert gpu_check.main(["--device", "cuda:0"]) == 2
    assert "--device cuda:0: torch sees 0 GPUs here" in capsys.readouterr().err
