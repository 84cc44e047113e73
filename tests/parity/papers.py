"""The methods as their papers define them, for one tensor (or a whole model laid end to end), in float64.

`base` (n,) and `agents` (T, n) are float64. Nothing of ramstream or mergekit is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llamas import Family
from numpy.typing import NDArray

Values = NDArray[np.float64]


def of_model(family: Family, method: Callable[..., Values], **options: Any) -> dict[str, Values]:
    """`method(base, agents)` for each tensor. Options that are mappings have a value for each tensor."""
    result = {}
    for name, base in family.base.items():
        own = {key: value[name] if isinstance(value, Mapping) else value for key, value in options.items()}
        agents = np.stack([agent[name] for agent in family.agents]).astype(np.float64)
        result[name] = method(base.astype(np.float64), agents, **own)
    return result


def linear(base: Values, agents: Values, weights: Sequence[float], normalize: bool = True) -> Values:
    """Model soups, arXiv 2203.05482: the mean of the models, weighted; `weights` has the base's first."""
    total = weights[0] * base + np.tensordot(weights[1:], agents, 1)
    return total / sum(weights) if normalize else total


def task_arithmetic(
    base: Values, agents: Values, weights: Sequence[float], normalize: bool = False, scale: float = 1.0
) -> Values:
    """arXiv 2212.04089, section 4."""
    total = np.tensordot(weights, agents - base, 1)
    return base + scale * (total / sum(weights) if normalize else total)


def trimmed(deltas: Values, density: float) -> Values:
    """TIES, arXiv 2306.01708, step 1, for one agent: the largest magnitudes, the others 0."""
    kept = np.zeros_like(deltas)
    largest = np.argsort(-np.abs(deltas), kind="stable")[: max(1, int(density * len(deltas)))]
    kept[largest] = deltas[largest]
    return kept


def elected(deltas: Values, weights: Sequence[float], normalize: bool) -> Values:
    """Steps 2 and 3: the deltas that have the sign of the sum, averaged."""
    each = np.asarray(weights, np.float64)[:, None]
    sign = np.where((each * deltas).sum(axis=0) >= 0, 1, -1)
    agrees = np.sign(each * deltas) == sign
    total = (each * deltas * agrees).sum(axis=0)
    below = (each * agrees).sum(axis=0)
    return total / np.where(below == 0, 1, below) if normalize else total


def ties(
    base: Values,
    agents: Values,
    weights: Sequence[float] = (1, 1, 1),
    densities: Sequence[float] = (1, 1, 1),
    normalize: bool = True,
    scale: float = 1.0,
) -> Values:
    """arXiv 2306.01708, algorithm 1, with weights, which are 1 in the paper."""
    deltas = np.stack([trimmed(row, density) for row, density in zip(agents - base, densities, strict=True)])
    return base + scale * elected(deltas, weights, normalize)


def dare(deltas: Values, draws: Values, densities: Sequence[float], rescale: str) -> Values:
    """arXiv 2311.03099, section 3.2: drop what is drawn at or above the density, and rescale the rest.

    `rescale`: `share` divides by the density, which is the paper's; `norm` gives each row its L1 norm back.
    """
    kept = np.where(draws < np.asarray(densities, np.float32)[:, None], deltas, 0)
    if rescale == "norm":
        return kept * (np.abs(deltas).sum(axis=1) / np.abs(kept).sum(axis=1))[:, None]
    return kept / np.asarray(densities, np.float64)[:, None]


def dare_linear(
    base: Values,
    agents: Values,
    draws: Values,
    densities: Sequence[float],
    weights: Sequence[float],
    rescale: str,
    normalize: bool = False,
) -> Values:
    """Task arithmetic of what DARE leaves."""
    return task_arithmetic(base, base + dare(agents - base, draws, densities, rescale), weights, normalize)


def dare_ties(
    base: Values,
    agents: Values,
    draws: Values,
    densities: Sequence[float],
    weights: Sequence[float],
    rescale: str,
    normalize: bool = False,
) -> Values:
    """Steps 2 and 3 of TIES on what DARE leaves."""
    return base + elected(dare(agents - base, draws, densities, rescale), weights, normalize)


def ram(base: Values, agents: Values, lambdas: Sequence[float] = (1, 1, 1), epsilon: float = 1e-5) -> Values:
    """arXiv 2601.13572: the mean of what several changed, λ times what one alone changed."""
    deltas = agents - base
    changed = np.abs(deltas) > epsilon
    deltas = np.where(changed, deltas, 0)
    count = changed.sum(axis=0)
    alone = np.tensordot(lambdas, deltas, 1)
    return base + np.where(count == 1, alone, deltas.sum(axis=0) / np.maximum(count, 1))


def ram_plus_of_tensor(base: Values, agents: Values, r: float, alpha: float, epsilon: float = 1e-5) -> Values:
    """RAM+ with λ = 1 + r · clip(ρ, 0, α), ρ = shared / unique counted in this tensor alone."""
    changed = np.abs(agents - base) > epsilon
    count = changed.sum(axis=0)
    lambdas = []
    for row in changed:
        shared, unique = int((row & (count > 1)).sum()), int((row & (count == 1)).sum())
        rho = shared / unique if unique else np.inf if shared else 0.0
        lambdas.append(1 + r * min(rho, alpha))
    return ram(base, agents, lambdas, epsilon)
