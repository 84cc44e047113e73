"""The contract of every method, known or new, and the formulas of RAM+."""

import inspect
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream.errors import PlanError
from ramstream.kernels import host
from ramstream.kernels.torch import TorchMerger
from ramstream.methods import Method, available, create
from ramstream.methods.ram_plus import RamPlus
from ramstream.types import Dtype

METHODS = sorted(available().items())
every_method = pytest.mark.parametrize("cls", [cls for _, cls in METHODS], ids=[name for name, _ in METHODS])


@every_method
def test_a_method_is_one_documented_file_named_like_its_command_line_name(cls: type[Method]) -> None:
    file = Path(inspect.getfile(cls))
    assert file.stem.replace("_", "-") == cls.name()
    assert cls.__doc__
    assert "arXiv" in (inspect.getmodule(cls).__doc__ or "")  # type: ignore[union-attr]


@every_method
def test_parameters_are_made_from_the_words_of_the_command_line(cls: type[Method]) -> None:
    method = cls()
    words = {field.name: str(getattr(method, field.name)) for field in fields(method)}
    assert create(cls.name(), words) == method


@every_method
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1", "x", ""])
def test_a_parameter_that_is_no_number_of_its_kind_is_refused(cls: type[Method], value: str) -> None:
    for field in fields(cls):
        with pytest.raises(PlanError, match=field.name):
            create(cls.name(), {field.name: value})


@every_method
def test_an_unknown_parameter_is_refused_with_the_known_ones(cls: type[Method]) -> None:
    with pytest.raises(PlanError, match="has no parameter 'epsilom'; it has epsilon"):
        create(cls.name(), {"epsilom": "1"})


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"no method 'tiez'; use one of .*ram, ram-plus"):
        create("tiez", {})


@every_method
def test_zero_deltas_give_the_base(cls: type[Method]) -> None:
    base = torch.tensor([0.0, -0.0, 1.5, -3e-42])
    for agents in (1, 3):
        merged = torch_form(cls(), base.numpy(), np.zeros((agents, 4), np.float32), np.full(agents, 1.7))
        assert merged.tobytes() == base.numpy().tobytes()


@every_method
def test_the_numba_core_equals_the_torch_form(cls: type[Method]) -> None:
    if cls.kernel is None:
        pytest.skip("a method without a core runs its torch form everywhere")
    random = np.random.default_rng(1)
    for agents in (1, 2, 5):
        base = random.standard_normal(5000).astype(np.float32)
        deltas = random.standard_normal((agents, 5000)) * (random.random((agents, 5000)) < 0.4)
        moved = (base + deltas).astype(np.float32)
        coefficients = 1 + random.random(agents)
        merger = host.Merger(agents, 1e-5, "error", None)
        out = np.empty_like(base)
        merger.strip(cls.kernel, *strip(base, moved), coefficients, False, Dtype.F32, out.view(np.uint8))
        assert out.tobytes() == torch_form(cls(), base, moved - base, coefficients, moved).tobytes()


@every_method
def test_coefficients_have_a_row_for_each_tensor(cls: type[Method]) -> None:
    overlap = np.arange(4 * 3 * 3).reshape(4, 3, 3)
    for empty in (overlap, overlap[:0]):
        coefficients = cls().coefficients(empty)
        assert coefficients.shape == empty.shape[:2]
        assert coefficients.dtype == np.float64


counts = st.integers(0, 2**40)


@given(counts, counts, st.floats(0, 10), st.floats(0, 10), st.sampled_from(["unique", "changed"]))
def test_lambda_is_the_papers_formula(unique: int, shared: int, r: float, alpha: float, ratio: str) -> None:
    (found,) = RamPlus(r=r, alpha=alpha, ratio=ratio).coefficients(np.array([[[unique, shared]]]))  # type: ignore[arg-type]
    below = unique if ratio == "unique" else unique + shared
    rho = shared / below if below else (np.inf if shared else 0.0)
    assert found.tolist() == [1 + r * min(max(rho, 0), alpha)]


def test_scope_tensor_sums_each_tensor_alone_and_model_all_of_them() -> None:
    overlap = np.array([[[10, 5]], [[10, 15]]])
    assert RamPlus(scope="tensor").coefficients(overlap).tolist() == [[1.05], [1.15]]
    assert RamPlus(scope="model").coefficients(overlap).tolist() == [[1.1], [1.1]]


def strip(base: NDArray[np.float32], agents: NDArray[np.float32]) -> tuple[host.Sources, int]:
    """Whole float32 arrays as the sources of one strip; the caller keeps them alive."""
    sources = host.Sources(len(agents))
    for k, values in enumerate((base, *agents)):
        sources.set(k, Dtype.F32, values.ctypes.data, len(base))
    return sources, len(base)


def torch_form(
    method: Method,
    base: NDArray[np.float32],
    deltas: NDArray[np.float32],
    coefficients: NDArray[np.float64],
    moved: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    agents = np.ascontiguousarray(base + deltas if moved is None else moved)
    out = np.empty_like(base)
    merger = TorchMerger(method, len(deltas), 1e-5, "error", None, device="cpu")
    merger.strip(*strip(base, agents), coefficients, False, Dtype.F32, out.view(np.uint8))
    return out
