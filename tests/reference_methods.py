"""The oracle of the methods: what each of them adds to the base, in plain numpy, slow and clear.

Like `reference`, it imports nothing of ramstream. There is a function for each method: it takes a `View`
(`reference.look`) and the method's numbers, one an agent, and gives the merged delta (n,) in the view's width.
`finished` makes the output of it. A view of float64 (`in_float64`) tells what the exact answer is close to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import Array, View

Numbers = Sequence[float] | NDArray[np.floating[Any]]
MASK = 2**32 - 1


def in_float64(view: View) -> View:
    """The same elements, computed with in float64."""
    return replace(view, base=view.base.astype(np.float64), deltas=view.deltas.astype(np.float64))


def finished(view: View, delta: Array, scale: float = 1.0, moves_unchanged: bool = False) -> Array:
    """The output (n,): base + scale · delta, the base itself where nobody changed it."""
    with np.errstate(all="ignore"):
        moved = view.base + _number(view, scale) * delta
    return moved if moves_unchanged else np.where(view.count == 0, view.base, moved)


def _number(view: View, value: float) -> Any:
    with np.errstate(over="ignore"):
        return view.base.dtype.type(value)


def _numbers(view: View, values: Numbers) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(view.base.dtype)


def _zeros(view: View) -> Array:
    return np.zeros_like(view.base)


# Plain sums


def linear(view: View, weight: Numbers, normalize: bool = True) -> Array:
    """weight (T + 1,), the base's first."""
    own, *others = _numbers(view, weight)
    with np.errstate(all="ignore"):
        below = view.base.dtype.type(0) + own
        total = _zeros(view)
        for delta, w in zip(view.deltas, others, strict=True):
            below = below + w
            total = total + w * delta
        return total / below if normalize else total + (below - 1) * view.base


def task_arithmetic(view: View, weight: Numbers, normalize: bool = False) -> Array:
    """weight (T,)."""
    weights = _numbers(view, weight)
    with np.errstate(all="ignore"):
        below = view.base.dtype.type(0)
        total = _zeros(view)
        for delta, w in zip(view.deltas, weights, strict=True):
            below = below + w
            total = total + w * delta
        if not normalize or abs(below) < view.base.dtype.type(1e-8):
            return total
        return total / below


# TIES


def ties(view: View, weight: Numbers, thresholds: Numbers, normalize: bool = True) -> Array:
    """weight, thresholds (T,); what is smaller than its agent's threshold is trimmed."""
    least = _numbers(view, thresholds)[:, None]
    with np.errstate(invalid="ignore"):
        trimmed = np.where(np.abs(view.deltas) < least, 0, view.deltas)
    return _elected(view, trimmed, weight, normalize)


def thresholds(
    tensors: Sequence[NDArray[Any]], density: NDArray[np.float64], scope: str = "tensor"
) -> NDArray[np.float64]:
    """The least magnitude that every agent keeps, by sorting; (tensors, T).

    It is the k-th largest, k = max(1, int(density · n)), of float32 magnitudes. tensors: deltas (T, n) each.
    density (tensors, T), of the tensor's own n elements, or of those of the whole model.
    """
    result = np.zeros(density.shape)
    for i, t in np.ndindex(*density.shape):
        pool = np.concatenate([deltas[t] for deltas in (tensors if scope == "model" else tensors[i : i + 1])])
        result[i, t] = _threshold(np.abs(pool), density[i, t])
    return result


def _threshold(magnitudes: NDArray[Any], share: float) -> float:
    if share <= 0:
        return np.inf
    if share >= 1 or len(magnitudes) == 0:
        return 0.0
    single = magnitudes.astype(np.float32)
    largest = np.sort(single)[::-1][max(1, int(share * len(single))) - 1]
    return np.inf if np.isnan(largest) else float(np.nanmin(magnitudes[single >= largest]))


def _elected(view: View, deltas: Array, weight: Numbers, normalize: bool) -> Array:
    weights = _numbers(view, weight)
    with np.errstate(all="ignore"):
        values = [w * delta for w, delta in zip(weights, deltas, strict=True)]
        election = _zeros(view)
        for value in values:
            election = election + value
        up = ~(election < 0)
        total, below = _zeros(view), _zeros(view)
        for value, w in zip(values, weights, strict=True):
            winner = np.isnan(value) & up | (value > 0) & up | (value < 0) & ~up
            total = np.where(winner, total + value, total)
            below = np.where(winner, below + w, below)
        return np.where(below == 0, total, total / below) if normalize else total


# DARE


def dare_linear(
    view: View,
    weight: Numbers,
    density: Numbers,
    kept: NDArray[np.bool_],
    rescale: bool = True,
    normalize: bool = False,
) -> Array:
    """weight, density (T,), kept (T, n)."""
    return task_arithmetic(replace(view, deltas=_dropped(view, density, kept, rescale)), weight, normalize)


def dare_ties(
    view: View,
    weight: Numbers,
    density: Numbers,
    kept: NDArray[np.bool_],
    rescale: bool = True,
    normalize: bool = False,
) -> Array:
    """weight, density (T,), kept (T, n)."""
    return _elected(view, _dropped(view, density, kept, rescale), weight, normalize)


def _dropped(view: View, density: Numbers, kept: NDArray[np.bool_], rescale: bool) -> Array:
    with np.errstate(all="ignore"):
        grown = view.deltas / _numbers(view, density)[:, None] if rescale else view.deltas
        return np.where(kept, grown, 0).astype(view.base.dtype)


def draws(seed: int, key: int, agent: int, elements: Sequence[int]) -> NDArray[np.float64]:
    """The uniform numbers of elements of the tensor with this key, for an agent from 0: 24 bits each."""
    words = []
    for e in elements:
        high = (e >> 34) << 6
        counter = ((e >> 2) & MASK, (agent | high) & MASK, key & MASK, key >> 32)
        words.append(philox(counter, (seed & MASK, seed >> 32))[e & 3])
    return np.array([(word >> 8) * 2.0**-24 for word in words])


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., SC 2011, in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for turn in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        left = (k + turn * 0x9E3779B9) & MASK
        right = (m + turn * 0xBB67AE85) & MASK
        a, b, c, d = (second >> 32) ^ b ^ left, second & MASK, (first >> 32) ^ d ^ right, first & MASK
    return a, b, c, d


# RAM and what follows it


def ram(view: View, weight: Numbers, lambdas: Numbers | None = None) -> Array:
    """weight, lambdas (T,); RAM+ with λ, RAM without."""
    ones = np.ones(len(view.deltas))
    total, below, alone = _zeros(view), _zeros(view), _zeros(view)
    weights, rescales = _numbers(view, weight), _numbers(view, ones if lambdas is None else lambdas)
    with np.errstate(all="ignore"):
        for delta, changed, w, rescale in zip(view.deltas, view.changed, weights, rescales, strict=True):
            total = np.where(changed, total + w * delta, total)
            below = np.where(changed, below + w, below)
            alone = np.where(changed, (w * rescale) * delta, alone)
        shared = np.where(below == 0, 0, total / below)
    return np.where(view.count == 1, alone, shared)


def ram_ties(view: View, weight: Numbers) -> Array:
    """weight (T,)."""
    alone = _zeros(view)
    with np.errstate(all="ignore"):
        for delta, changed, w in zip(view.deltas, view.changed, _numbers(view, weight), strict=True):
            alone = np.where(changed, alone + w * delta, alone)
    return np.where(view.count == 1, alone, _elected(view, view.deltas, weight, True))


def ram_unique(view: View, agent: int = 1, dilution: float = 1.0) -> Array:
    """agent from 1."""
    own = (view.count == 1) & view.changed[agent - 1]
    with np.errstate(all="ignore"):
        return np.where(own, view.deltas[agent - 1] / _number(view, dilution), 0)


def papo(view: View, primary: int = 1, weight: float = 1.0) -> Array:
    """primary from 1; weight of what the others changed."""
    own = view.deltas[primary - 1]
    others = [t for t in range(len(view.deltas)) if t != primary - 1]
    rest = replace(view, deltas=view.deltas[others], changed=view.changed[others])
    with np.errstate(all="ignore"):
        pull = _number(view, weight) * ram(rest, np.ones(len(others)))
        conflict = (own > 0) & (pull < 0) | (own < 0) & (pull > 0)
        return np.where(conflict, own / (1 + np.abs(pull) / np.abs(own)), own + pull)


METHODS: dict[str, Callable[..., Array]] = {
    "linear": linear,
    "task-arithmetic": task_arithmetic,
    "ties": ties,
    "dare-linear": dare_linear,
    "dare-ties": dare_ties,
    "ram": ram,
    "ram-plus": ram,
    "ram-ties": ram_ties,
    "ram-unique": ram_unique,
    "papo": papo,
}
"""By command-line name."""
