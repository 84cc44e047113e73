"""The method `papo`: RAM of the others, fused with the primary agent's delta."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ramstream.errors import UsageError
from ramstream.kernels.program import trace
from ramstream.methods import Method, create
from ramstream.methods.papo import Papo
from ramstream.methods.ram import Ram
from ramstream.priority import fuse

Array = NDArray[Any]


def run(method: Method, base: Array, deltas: Array) -> Array:
    """What a method makes of masked deltas (T, n), every λ being 1."""
    program = trace(method, len(deltas))
    values = method.settings(["w"], len(deltas)) | {"lambdas": np.ones((1, len(deltas)))}
    if isinstance(method, Papo):
        values["weight"] = np.array([[method.weight]])
    numbers = program.numbers(values)[0].astype(base.dtype)
    found: Array = program.run(
        np, lambda k: [base, *deltas][k], lambda column: numbers[column], base.dtype.type
    )
    return found


def random_deltas(agents: int, n: int = 4000, dtype: type = np.float32) -> Array:
    random = np.random.default_rng(agents)
    return (random.standard_normal((agents, n)) * (random.random((agents, n)) < 0.5)).astype(dtype)


def test_a_conflict_that_ram_averages_to_nothing_keeps_the_primarys_sign() -> None:
    d = np.array([0.5, -0.25], np.float32)
    base, deltas = np.zeros(2, np.float32), np.stack([d, -d])
    assert run(Ram(), base, deltas).tolist() == [0, 0]
    assert run(Papo(), base, deltas).tolist() == (d / 2).tolist()
    assert run(Papo(primary=2), base, deltas).tolist() == (-d / 2).tolist()
    assert run(Papo(weight=3), base, deltas).tolist() == (d / 4).tolist()


@pytest.mark.parametrize("agents", [2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_it_is_fuse_of_the_primary_and_ram_of_the_others(agents: int, dtype: type) -> None:
    base: Array = np.zeros(4000, dtype)
    deltas = random_deltas(agents, dtype=dtype)
    for primary in range(1, agents + 1):
        others = np.delete(deltas, primary - 1, axis=0)
        with np.errstate(invalid="ignore"):
            auxiliary = run(Ram(), base, others)
        for weight in (0.0, 0.75, 2.0):
            found = run(Papo(primary=primary, weight=weight), base, deltas)
            assert found.tolist() == fuse(deltas[primary - 1], auxiliary, weight).tolist()


def test_what_the_primary_changed_alone_is_kept_and_what_others_changed_alone_is_weighted() -> None:
    base = np.full(3, 2, np.float32)
    deltas = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)
    assert run(Papo(weight=0.5), base, deltas).tolist() == [3, 2.5, 2]


def test_an_element_that_nobody_changed_has_the_bases_own_bits() -> None:
    base = np.array([-0.0, 0.0], np.float32)
    assert run(Papo(), base, np.zeros((2, 2), np.float32)).tobytes() == base.tobytes()


@pytest.mark.parametrize("agents", [2, 4])
def test_numpy_and_torch_give_the_same_bits(agents: int) -> None:
    base, deltas = random_deltas(1)[0], random_deltas(agents)
    program = trace(Papo(weight=0.7), agents)
    assert [name for name, _ in program.columns] == ["scale", "weight"]
    numbers = torch.tensor([1.0, 0.7])
    found = program.run(
        torch,
        lambda k: torch.from_numpy(base if k == 0 else deltas[k - 1]),
        lambda column: numbers[column],
        torch.tensor,
    )
    assert found.numpy().tobytes() == run(Papo(weight=0.7), base, deltas).tobytes()


@pytest.mark.parametrize("primary", ["0", "-1"])
def test_a_primary_below_1_is_refused(primary: str) -> None:
    with pytest.raises(UsageError, match=f"papo: primary is {primary}; it must be 1 or more"):
        create("papo", {"primary": primary})


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(UsageError, match=r"papo: weight is -1\.0; it must be 0 or more"):
        create("papo", {"weight": "-1"})


def test_a_primary_beyond_the_agents_is_refused() -> None:
    Papo(primary=3).check_agents(3)
    with pytest.raises(UsageError, match=r"papo: primary is 4, of 3 agents; it must be 1 \.\. 3"):
        Papo(primary=4).check_agents(3)


def test_one_agent_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="there is only 1; give two or more"):
        Papo().check_agents(1)
