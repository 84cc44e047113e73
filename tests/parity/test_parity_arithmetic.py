"""Linear and task arithmetic: real mergekit, ours, and what the papers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import papers
import pytest
from llamas import Family
from sides import Sides, document, errors, ulps

WEIGHTS = 0.5, 0.3, 0.7
BASE_WEIGHT = 0.2


def weighted(family: Family, weights: tuple[float, ...] = WEIGHTS) -> dict[Path, dict[str, Any]]:
    return {path: {"weight": weight} for path, weight in zip(family.paths, weights, strict=True)}


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {}),
        ({"normalize": True}, {"normalize": True}),
        ({"lambda": 0.7}, {"scale": 0.7}),
        ({"normalize": True, "lambda": 1.3}, {"normalize": True, "scale": 1.3}),
    ],
)
def test_task_arithmetic_gives_the_bits_of_mergekit(
    both: Sides, family: Family, parameters: dict[str, Any], options: dict[str, Any]
) -> None:
    ours, theirs = both.both(document("task_arithmetic", weighted(family), family.base_path, parameters))
    assert ulps(ours, theirs) == 0
    exact = papers.of_model(family, papers.task_arithmetic, weights=WEIGHTS, **options)
    assert errors(ours, exact, family) < 5


@pytest.mark.parametrize("weights", [(1.0, -0.6, 0.4), (0.5, 0.25, -0.75), (0.0, 0.0, 1.0)])
def test_task_arithmetic_may_subtract_and_leave_out_models(
    both: Sides, sparse: Family, weights: tuple[float, ...]
) -> None:
    text = document("task_arithmetic", weighted(sparse, weights), sparse.base_path, {"normalize": True})
    ours, theirs = both.both(text)
    assert ulps(ours, theirs) == 0


# mergekit adds up w·θ, and rounds at the size of the weights; ours adds up w·τ, and rounds at that of the changes.
@pytest.mark.parametrize(("normalize", "bound"), [(True, 3), (False, 5)])
def test_linear_is_the_weighted_mean_but_for_rounding(
    both: Sides, family: Family, normalize: bool, bound: float
) -> None:
    models = {family.base_path: {"weight": BASE_WEIGHT}} | weighted(family)
    ours, theirs = both.both(document("linear", models, family.base_path, {"normalize": normalize}))
    weights = BASE_WEIGHT, *WEIGHTS
    exact = papers.of_model(family, papers.linear, weights=weights, normalize=normalize)
    assert errors(ours, exact, family) < bound
    assert errors(theirs, exact, family) < 3


def test_linear_leaves_what_no_model_changed_and_mergekit_rounds_it(both: Sides, sparse: Family) -> None:
    models = {sparse.base_path: {"weight": BASE_WEIGHT}} | weighted(sparse)
    ours, theirs = both.both(document("linear", models, sparse.base_path))
    rounded = 0
    for name, base in sparse.base.items():
        unchanged = np.all([agent[name] == base for agent in sparse.agents], axis=0)
        assert np.array_equal(ours[name][unchanged], base[unchanged])
        rounded += int((theirs[name] != base)[unchanged].sum())
    assert rounded > 0


def test_linear_without_a_base_is_the_mean_of_the_models(both: Sides, sparse: Family) -> None:
    ours, theirs = both.both(document("linear", weighted(sparse)))
    exact = papers.of_model(sparse, papers.linear, weights=(0, *WEIGHTS))
    assert errors(ours, exact, sparse) < 3
    assert errors(theirs, exact, sparse) < 3


def test_linear_takes_the_weight_of_all_models_for_a_base_that_is_not_listed(
    both: Sides, sparse: Family
) -> None:
    models: dict[Path, dict[str, Any]] = {path: {} for path in sparse.paths}
    ours, theirs = both.both(document("linear", models, sparse.base_path, {"weight": 0.5}))
    exact = papers.of_model(sparse, papers.linear, weights=(0.5, 0.5, 0.5, 0.5))
    assert errors(ours, exact, sparse) < 3
    assert errors(theirs, exact, sparse) < 3


def test_weights_of_linear_vary_by_layer_and_name_the_bases_too(both: Sides, sparse: Family) -> None:
    models: dict[Path, dict[str, Any]] = {
        sparse.base_path: {"weight": [1, 0]},
        sparse.paths[0]: {"weight": [{"filter": "mlp", "value": 0.5}, {"value": [0.2, 0.9]}]},
        sparse.paths[1]: {},
    }
    ours, theirs = both.both(document("linear", models, sparse.base_path, {"weight": 0.3}))
    assert errors(ours, {name: values.astype(np.float64) for name, values in theirs.items()}, sparse) < 4
    last = [agent["model.layers.2.input_layernorm.weight"].astype(np.float64) for agent in sparse.agents]
    mean = (0.9 * last[0] + 0.3 * last[1]) / 1.2
    assert np.allclose(ours["model.layers.2.input_layernorm.weight"], mean, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_fewer_agents_give_the_bits_of_mergekit_too(
    both: Sides, sparse: Family, method: str, agents: int
) -> None:
    models = dict(list(weighted(sparse).items())[:agents])
    ours, theirs = both.both(document(method, models, sparse.base_path))
    assert ulps(ours, theirs) == 0
