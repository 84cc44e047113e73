"""RAM and RAM+: real mergekit, ours, and the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llamas
import numpy as np
import papers
import pytest
from llamas import Family
from sides import Sides, document, errors, floats, sides, ulps


def ram(family: Family, method: str = "ram", **parameters: Any) -> str:
    return document(method, {path: {} for path in family.paths}, family.base_path, parameters)


# mergekit divides each delta by c before it adds them, ours divides their sum: c roundings against one.
@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_ram_is_the_papers_but_for_rounding(both: Sides, family: Family, epsilon: float) -> None:
    ours, theirs = both.both(ram(family, epsilon=epsilon))
    exact = papers.of_model(family, papers.ram, epsilon=epsilon)
    assert errors(ours, exact, family) <= 2
    assert errors(theirs, exact, family) <= 2.5


@pytest.mark.parametrize(
    ("parameters", "r", "alpha"),
    [({}, 0.1, 0.2), ({"r": 0.3, "alpha": 0.9}, 0.3, 0.9), ({"alpha": 5.0}, 0.1, 5)],
)
def test_ramplus_tl_is_the_papers_tensor_by_tensor_but_for_rounding(
    both: Sides, family: Family, parameters: dict[str, float], r: float, alpha: float
) -> None:
    ours, theirs = both.both(ram(family, "ramplus_tl", **parameters))
    exact = papers.of_model(family, papers.ram_plus_of_tensor, r=r, alpha=alpha)
    assert errors(ours, exact, family) <= 2.5
    assert errors(theirs, exact, family) <= 2.5


@pytest.mark.parametrize("method", ["ram", "ramplus_tl"])
def test_what_fewer_than_three_agents_changed_has_mergekits_bits(
    both: Sides, sparse: Family, method: str
) -> None:
    ours, theirs = both.both(ram(sparse, method))
    for name, base in sparse.base.items():
        few = np.sum([np.abs(agent[name] - base) > 1e-5 for agent in sparse.agents], axis=0) < 3
        assert ulps({name: ours[name][few]}, {name: theirs[name][few]}) == 0


def test_where_all_agree_or_nothing_is_unique_both_take_alpha(both: Sides, tmp_path: Path) -> None:
    family = llamas.patterns(tmp_path, [[0.25, 0.5], [0.25, 0.25]])
    ours, theirs = both.both(ram(family, "ramplus_tl"))
    assert ulps(ours, theirs) == 0
    for name, base in family.base.items():
        assert np.array_equal(ours[name] - base, np.resize([0.25, 0.375], len(base)))


@pytest.mark.slow
def test_mergekits_sums_do_not_depend_on_the_hash_seed(both: Sides, dense: Family, tmp_path: Path) -> None:
    with sides(tmp_path, hash_seed=12345) as others:
        for method in ("ram", "ramplus_tl"):
            assert (
                ulps(floats(both.theirs(ram(dense, method))), floats(others.theirs(ram(dense, method)))) == 0
            )
