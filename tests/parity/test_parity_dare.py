"""DARE: real mergekit with our random numbers, ours, and the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draws
import numpy as np
import papers
import pytest
from llamas import Family
from sides import Sides, document, errors, floats, ulps

WEIGHTS = 0.5, 0.3, 0.7
DENSITIES = 0.3, 0.5, 0.9
METHODS = {"dare_linear": papers.dare_linear, "dare_ties": papers.dare_ties}


def models(family: Family, densities: tuple[float, ...] = DENSITIES) -> dict[Path, dict[str, Any]]:
    return {
        path: {"weight": weight, "density": density}
        for path, weight, density in zip(family.paths, WEIGHTS, densities, strict=True)
    }


def drawn(family: Family, seed: int = 0) -> dict[str, np.ndarray]:
    """The numbers of each tensor and agent, as mergekit's process takes them."""
    return {
        f"{name}/{agent}": numbers
        for name, rows in draws.of_family(family, seed).items()
        for agent, numbers in enumerate(rows)
    }


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_without_rescale_the_same_draws_give_the_bits_of_mergekit(
    both: Sides, family: Family, method: str, normalize: bool
) -> None:
    parameters = {"rescale": False, "normalize": normalize, "lambda": 0.8}
    text = document(method, models(family), family.base_path, parameters)
    ours, theirs = floats(both.ours(text)), floats(both.theirs(text, drawn(family)))
    assert ulps(ours, theirs) == 0


@pytest.mark.parametrize("densities", [(1.0, 0.5, 0.0), (0.01, 1.0, 1.0)])
@pytest.mark.parametrize("method", METHODS)
def test_all_and_nothing_are_kept_as_mergekit_keeps_them(
    both: Sides, sparse: Family, method: str, densities: tuple[float, ...]
) -> None:
    text = document(method, models(sparse, densities), sparse.base_path, {"rescale": False})
    ours, theirs = floats(both.ours(text)), floats(both.theirs(text, drawn(sparse)))
    assert ulps(ours, theirs) == 0


# mergekit rescales by Σ|τ| / Σ|τ kept| of the tensor; the paper and ours by 1 / density, which that is on average.
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_rescaled_ours_is_the_papers_and_mergekit_keeps_the_l1_norm_instead(
    both: Sides, family: Family, method: str, normalize: bool
) -> None:
    text = document(method, models(family), family.base_path, {"normalize": normalize})
    ours, theirs = floats(both.ours(text)), floats(both.theirs(text, drawn(family)))
    options = {"densities": DENSITIES, "weights": WEIGHTS, "normalize": normalize}
    numbers = draws.of_family(family, 0)
    paper = papers.of_model(family, METHODS[method], draws=numbers, rescale="share", **options)
    norms = papers.of_model(family, METHODS[method], draws=numbers, rescale="norm", **options)
    assert errors(ours, paper, family) < 5
    assert errors(theirs, norms, family) < 10  # its norms are float32 sums
    assert errors(theirs, paper, family) > 100


def test_another_seed_draws_other_elements(both: Sides, sparse: Family) -> None:
    text = document("dare_linear", models(sparse), sparse.base_path)
    words = ["-m", "dare-linear", "-p", "seed=7", "-p", "weight=0.5,0.3,0.7", "-p", "density=0.3,0.5,0.9"]
    seeded = floats(both.merged(sparse.base_path, *sparse.paths, *words))
    options = {"densities": DENSITIES, "weights": WEIGHTS, "rescale": "share"}
    exact = papers.of_model(sparse, papers.dare_linear, draws=draws.of_family(sparse, 7), **options)
    assert errors(seeded, exact, sparse) < 5
    assert ulps(seeded, floats(both.ours(text))) > 0
