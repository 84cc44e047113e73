"""TIES: real mergekit, ours, and the paper's procedure; tensor by tensor and over the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llamas
import numpy as np
import papers
import pytest
from llamas import Family, Weights
from numpy.typing import NDArray
from sides import Sides, document, errors, floats, ulps

Values = NDArray[np.float32]

WEIGHTS = 0.5, 0.3, 0.7
DENSITIES = 0.29, 0.55, 0.9


def models(
    family: Family, weights: tuple[float, ...] = WEIGHTS, densities: tuple[float, ...] = DENSITIES
) -> dict[Path, dict[str, Any]]:
    return {
        path: {"weight": weight, "density": density}
        for path, weight, density in zip(family.paths, weights, densities, strict=True)
    }


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({}, {}),
        ({"normalize": False}, {"normalize": False}),
        ({"lambda": 0.6}, {"scale": 0.6}),
        ({"normalize": False, "lambda": 1.2}, {"normalize": False, "scale": 1.2}),
    ],
)
def test_ties_gives_the_bits_of_mergekit(
    both: Sides, family: Family, parameters: dict[str, Any], options: dict[str, Any]
) -> None:
    ours, theirs = both.both(document("ties", models(family), family.base_path, parameters))
    assert ulps(ours, theirs) == 0
    exact = papers.of_model(family, papers.ties, weights=WEIGHTS, densities=DENSITIES, **options)
    assert errors(ours, exact, family) < 5


@pytest.mark.parametrize("densities", [(1.0, 0.5, 0.02), (0.0, 0.3, 1.0), (0.001, 0.001, 0.001)])
def test_ties_keeps_all_nothing_and_at_least_one_as_mergekit_does(
    both: Sides, family: Family, densities: tuple[float, ...]
) -> None:
    ours, theirs = both.both(document("ties", models(family, densities=densities), family.base_path))
    assert ulps(ours, theirs) == 0


@pytest.mark.parametrize("weights", [(1.0, -0.5, 0.8), (0.0, 0.4, 0.6)])
def test_ties_elects_with_negative_and_zero_weights_as_mergekit_does(
    both: Sides, family: Family, weights: tuple[float, ...]
) -> None:
    ours, theirs = both.both(document("ties", models(family, weights), family.base_path))
    assert ulps(ours, theirs) == 0


def test_int8_mask_changes_nothing_on_either_side(both: Sides, sparse: Family) -> None:
    plain = document("ties", models(sparse), sparse.base_path)
    masked = document("ties", models(sparse), sparse.base_path, {"int8_mask": True})
    assert ulps(floats(both.ours(masked)), floats(both.theirs(plain))) == 0
    assert ulps(floats(both.theirs(masked)), floats(both.theirs(plain))) == 0


def test_equal_magnitudes_are_kept_together_while_mergekit_keeps_some_of_them(
    both: Sides, tmp_path: Path
) -> None:
    family = llamas.patterns(tmp_path, [[0.25, 0.125, -0.125, 0.0625]] * 3)
    text = document("ties", models(family, (1, 1, 1), (0.5, 0.5, 0.5)), family.base_path)
    ours, theirs = both.both(text)
    for name, base in family.base.items():
        assert np.array_equal(ours[name] - base, np.resize([0.25, 0.125, -0.125, 0], len(base)))
        assert (theirs[name] != base).sum() == len(base) // 2  # an eighth of them ±0.125, whichever


def test_where_signs_balance_the_positive_ones_win_on_both_sides(both: Sides, tmp_path: Path) -> None:
    family = llamas.patterns(tmp_path, [[0.25, 0.125], [-0.25, 0.125], [0, -0.25]])
    ours, theirs = both.both(document("ties", models(family, (1, 1, 1), (1, 1, 1)), family.base_path))
    assert ulps(ours, theirs) == 0
    for name, base in family.base.items():
        assert np.array_equal(ours[name] - base, np.resize([0.25, 0.125], len(base)))


def whole_model(family: Family, trim: Callable[[Values], NDArray[np.bool_]]) -> Weights:
    """The paper's procedure on the model as one vector, in float32: keep what `trim` says, elect, disjoint mean."""
    base = np.concatenate(list(family.base.values()))
    deltas = np.stack([np.concatenate(list(agent.values())) - base for agent in family.agents])
    deltas = np.stack([np.where(trim(np.abs(row)), row, np.float32(0)) for row in deltas])
    sign = np.where(deltas.sum(axis=0) >= 0, 1, -1)
    agrees = np.sign(deltas) == sign
    mean = np.where(agrees, deltas, 0).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1).astype(np.float32)
    ends = np.cumsum([len(weights) for weights in family.base.values()])[:-1]
    return dict(zip(family.base, np.split(base + mean, ends), strict=True))


def over_model(both: Sides, family: Family, density: float) -> Weights:
    words = ["-m", "ties", "-p", f"density={density!r}", "-p", "scope=model"]
    return floats(both.merged(family.base_path, *family.paths, *words))


@pytest.mark.parametrize("density", [0.2, 0.05, 0.35])
def test_ties_over_the_whole_model_is_the_papers_procedure_on_one_vector(
    both: Sides, family: Family, density: float
) -> None:
    def largest(row: Values) -> NDArray[np.bool_]:
        place = np.argsort(np.argsort(-row, kind="stable"), kind="stable")
        return place < int(density * len(row))

    ours = over_model(both, family, density)
    assert ulps(ours, whole_model(family, largest)) == 0
    by_tensor = document("ties", models(family, (1, 1, 1), (density,) * 3), family.base_path)
    assert ulps(ours, floats(both.ours(by_tensor))) > 0


# The script of the paper's authors takes the (n - k)-th smallest magnitude for the least one, so it keeps k + 1.
def test_the_authors_script_keeps_one_element_more(both: Sides, dense: Family) -> None:
    elements = sum(map(len, dense.base.values()))
    kept = int(0.2 * elements)

    def as_released(row: Values) -> NDArray[np.bool_]:
        return row >= np.sort(row)[elements - kept - 1]

    assert ulps(over_model(both, dense, (kept + 1.5) / elements), whole_model(dense, as_released)) == 0
    assert ulps(over_model(both, dense, 0.2), whole_model(dense, as_released)) > 0
