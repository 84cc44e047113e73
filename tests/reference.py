"""The oracle: what a merge is, in plain numpy, slow and clear. It imports nothing of ramstream.

A source of a tensor is a `Source` (dtype name and raw bits, or float32 deltas), or None where an agent lacks
it. One with fewer elements than the base says nothing about the rest. A model is a dict of sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: 1 sign bit, then exponent, then mantissa."""

    exponent: int
    mantissa: int
    nan: int
    """The one NaN that is written for a computed NaN."""
    infinities: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def emin(self) -> int:
        return 2 - 2 ** (self.exponent - 1)

    @property
    def raw(self) -> np.dtype:
        return np.dtype(f"u{self.bits // 8}")

    @property
    def largest(self) -> int:
        """The code of the largest finite value."""
        return (((2**self.exponent - 1) << self.mantissa) - 1) if self.infinities else self.nan - 1


FORMATS = {
    "F64": Format(11, 52, 0x7FF8_0000_0000_0000),
    "F32": Format(8, 23, 0x7FC0_0000),
    "BF16": Format(8, 7, 0x7FC0),
    "F16": Format(5, 10, 0x7E00),
    "F8_E4M3": Format(4, 3, 0x7F, infinities=False),
    "F8_E5M2": Format(5, 2, 0x7F),
}
DELTA = "DELTA"
LANES = 1024


@dataclass(frozen=True)
class Source:
    """What a checkpoint holds of one tensor: raw bits of `dtype`, or float32 deltas (`DELTA`)."""

    dtype: str
    bits: Array

    def __len__(self) -> int:
        return len(self.bits)

    def head(self, begin: int, end: int) -> Source:
        return Source(self.dtype, self.bits[begin:end])


Agents = Sequence[Source | None]


# Widening


def widen(bits: Array, dtype: str, width: str) -> Array:
    """The values as float32 or float64 (`width`), exact; NaNs keep sign and payload."""
    if dtype == width:
        return np.array(bits).view(f"f{bits.itemsize}")
    if FORMATS[dtype].bits <= 16:
        return _table(dtype, width)[bits]
    return _decode(bits, dtype, width)


def _decode(bits: Array, dtype: str, width: str) -> Array:
    source, target = FORMATS[dtype], FORMATS[width]
    code = bits.astype(np.uint64)
    negative = code >> np.uint64(source.bits - 1) == 1
    exponent = (code >> np.uint64(source.mantissa)).astype(np.int64) & (2**source.exponent - 1)
    mantissa = (code & np.uint64(2**source.mantissa - 1)).astype(np.int64)
    normal = exponent > 0
    significand = (mantissa + (normal << source.mantissa)).astype(np.float64)
    scale = np.where(normal, exponent - 1, 0) + source.emin - source.mantissa
    special = (code & np.uint64(2 ** (source.bits - 1) - 1)) > source.largest
    magnitude = np.ldexp(np.where(special, 0, significand), scale).astype(f"f{target.bits // 8}")
    payload = mantissa.astype(np.uint64) << np.uint64(target.mantissa - source.mantissa)
    infinity = np.uint64((2**target.exponent - 1) << target.mantissa)
    raw = np.where(special, infinity | payload, magnitude.view(target.raw).astype(np.uint64))
    sign = negative.astype(np.uint64) << np.uint64(target.bits - 1)
    return (raw | sign).astype(target.raw).view(magnitude.dtype)


@cache
def _table(dtype: str, width: str) -> Array:
    return _decode(np.arange(2 ** FORMATS[dtype].bits), dtype, width)


def dequantise(
    raw: Array, stored: str, scale: Array, block: tuple[int, int], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """float8 codes of a tensor times the scales of their blocks, in its shape; one rounding each.

    scale float32 (.., scale rows, scale columns), with the tensor's leading dimensions or one for all of them.
    """
    rows, columns = (1, 1, *shape)[-2:]
    values = _table(stored, "F32")[raw].reshape(int(np.prod(shape[:-2], dtype=int)), rows, columns)
    each = scale.reshape(int(np.prod(scale.shape[:-2], dtype=int)), *scale.shape[-2:])
    each = each.repeat(block[0], axis=1).repeat(block[1], axis=2)[:, :rows, :columns]
    with np.errstate(all="ignore"):
        return (values * each).reshape(shape)


# Narrowing


@cache
def midpoints(dtype: str) -> NDArray[np.float64]:
    """float64: [k] lies half way between the values of codes k and k+1, as if the range did not end."""
    values = _table(dtype, "F64")[: FORMATS[dtype].largest + 1]
    beyond = values[-1] + (values[-1] - values[-2])
    return (values + np.append(values[1:], beyond)) / 2


def narrow(values: Array, dtype: str) -> Array:
    """The bits of float32 or float64 `values` in `dtype`, to nearest, ties to the even code."""
    form = FORMATS[dtype]
    with np.errstate(all="ignore"):
        finite = np.isfinite(values)
        if form.bits >= 32:
            bits = values.astype(f"f{form.bits // 8}").view(form.raw).copy()
        else:
            values = values.astype(np.float32).astype(np.float64)
            bits = _nearest(np.abs(values), finite, dtype)
            bits |= np.signbit(values).astype(form.raw) << form.raw.type(form.bits - 1)
    bits[np.isnan(values)] = form.nan
    if not form.infinities:
        bits[np.isinf(values) & ~finite] = form.nan
    return bits


def _nearest(magnitude: NDArray[np.float64], finite: NDArray[np.bool_], dtype: str) -> Array:
    form, middle = FORMATS[dtype], midpoints(dtype)
    code = np.searchsorted(middle, magnitude, side="left")  # the midpoints strictly below: ties go down
    tie = middle[np.minimum(code, len(middle) - 1)] == magnitude
    code = code + (tie & (code % 2 == 1))
    last = form.largest + 1 if form.infinities else form.largest
    return np.minimum(code, last).astype(form.raw)


def overflows(values: Array, dtype: str) -> NDArray[np.bool_]:
    """Where narrowing loses the value: finite but beyond the range, or an infinity the format has not."""
    form = FORMATS[dtype]
    finite, infinite = np.isfinite(values), np.isinf(values)
    if form.bits == 64:
        return np.zeros(len(values), bool)
    with np.errstate(all="ignore"):
        values = np.abs(values.astype(np.float32).astype(np.float64))
    if form.infinities:
        return finite & ~np.isfinite(widen(narrow(values, dtype), dtype, "F64"))
    return infinite | (finite & (values > midpoints(dtype)[-1]))


# Who changed what


@dataclass(frozen=True)
class View:
    """One tensor (or piece of it), widened, with the decision who changed each element."""

    base: Array
    deltas: Array
    """(T, n) in the width; 0 where unchanged."""
    changed: NDArray[np.bool_]
    """(T, n)"""
    refused: NDArray[np.bool_]
    """(T + 1, n), base first."""
    nonfinite: NDArray[np.bool_]
    """(T + 1, n), base first."""

    @property
    def count(self) -> NDArray[np.int64]:
        return self.changed.sum(axis=0)


def is_wide(base: Source, agents: Agents) -> bool:
    """A tensor is computed in float64 if any of its sources is."""
    return any(source is not None and source.dtype == "F64" for source in (base, *agents))


def look(
    base: Source,
    agents: Agents,
    epsilon: float,
    on_nonfinite: str,
    compare: str | None,
    wide: bool | None = None,
) -> View:
    """Widen a tensor and decide, element by element, which agents changed it."""
    width = "F64" if (is_wide(base, agents) if wide is None else wide) else "F32"
    values = widen(base.bits, base.dtype, width)
    n, total = len(base), len(agents)
    deltas = np.zeros((total, n), values.dtype)
    changed = np.zeros((total, n), bool)
    refused = np.zeros((total + 1, n), bool)
    nonfinite = np.zeros((total + 1, n), bool)
    nonfinite[0] = ~np.isfinite(values)
    with np.errstate(all="ignore"):
        threshold = values.dtype.type(epsilon)
        for t, agent in enumerate(agents):
            if agent is None or len(agent) == 0:
                continue
            m = min(n, len(agent))
            old = values[:m]
            stored, new, delta, same = _difference(old, agent.head(0, m), width)
            odd = ~np.isfinite(stored)
            nonfinite[t + 1, :m] = odd
            special = odd | nonfinite[0, :m]
            differs = special & ~same
            refused[t + 1, :m] = differs & odd
            refused[0, :m] |= differs & ~odd
            far = _distance(old, new, delta, compare, width) > threshold
            changed[t, :m] = np.where(special, differs & (on_nonfinite == "keep"), far)
            deltas[t, :m] = np.where(changed[t, :m], delta, 0)
    return View(values, deltas, changed, refused, nonfinite)


def _difference(old: Array, agent: Source, width: str) -> tuple[Array, Array, Array, Array]:
    """What the agent stores, its values, its deltas, and where it is the base's very bits."""
    if agent.dtype == DELTA:
        delta = widen(agent.bits.view(np.uint32), "F32", width)
        return delta, old + delta, delta, delta == 0
    new = widen(agent.bits, agent.dtype, width)
    return new, new, new - old, new.view(FORMATS[width].raw) == old.view(FORMATS[width].raw)


def _distance(old: Array, new: Array, delta: Array, compare: str | None, width: str) -> Array:
    if compare is None or FORMATS[compare].bits > FORMATS[width].bits:
        compared = delta if compare is None else new - old
    else:
        rounded = [widen(narrow(x, compare), compare, width) for x in (new, old)]
        compared = rounded[0] - rounded[1]
    return np.abs(compared)


# Counting


def count(
    base: Source,
    agents: Agents,
    epsilon: float = 1e-5,
    on_nonfinite: str = "error",
    compare: str | None = None,
    wide: bool | None = None,
    steps: bool = True,
) -> tuple[dict[str, Array], NDArray[np.bool_]]:
    """The tallies of one piece by field name, and who changed each element, bool (T, n)."""
    view = look(base, agents, epsilon, on_nonfinite, compare, wide)
    tallies = {
        "nonfinite": view.nonfinite.sum(axis=1),
        "refused": view.refused.sum(axis=1),
        "refused_first": np.array([np.flatnonzero(row)[0] if row.any() else -1 for row in view.refused]),
        "steps": _steps(view, base.dtype) if steps else np.zeros((len(agents), 2, 33), np.int64),
        **_overlaps(view),
        **_sums(view),
    }
    return tallies, view.changed


def _overlaps(view: View) -> dict[str, Array]:
    total = len(view.changed)
    overlap, pairs, conflicts = (np.zeros((total, total), np.int64) for _ in range(3))
    for t in range(total):
        for s in range(total):
            overlap[t, s] = np.sum(view.changed[t] & (view.count == s + 1))
            pairs[t, s] = np.sum(view.changed[t] & view.changed[s])
            up, down = view.deltas[t] > 0, view.deltas[s] < 0
            conflicts[t, s] += np.sum(up & down)
            conflicts[s, t] += np.sum(up & down)
    patterns = np.zeros(2**total if total <= 8 else 0, np.int64)
    if total <= 8:
        sets = sum(view.changed[t].astype(np.int64) << t for t in range(total))
        patterns += np.bincount(sets, minlength=2**total)
    return {"overlap": overlap, "pairs": pairs, "sign_conflicts": conflicts, "patterns": patterns}


def _sums(view: View) -> dict[str, Array]:
    with np.errstate(all="ignore"):
        deltas = view.deltas.astype(np.float64)
        total, n = deltas.shape
        l1, dots = np.zeros((total, LANES)), np.zeros((total, total, LANES))
        for begin in range(0, n, LANES):
            row = deltas[:, begin : begin + LANES]
            l1[:, : row.shape[1]] += np.abs(row)
            dots[:, :, : row.shape[1]] += row[:, None] * row[None]
        squares = _halve(dots)
        return {"l1": _halve(l1), "l2": squares.diagonal().copy(), "dots": squares}


def _halve(lanes: NDArray[np.float64]) -> NDArray[np.float64]:
    while lanes.shape[-1] > 1:
        n = lanes.shape[-1] // 2
        lanes = lanes[..., :n] + lanes[..., n:]
    return lanes[..., 0]


def spacing(base: Array, storage: str) -> NDArray[np.float64]:
    """The distance from finite |base| to the next value of `storage` away from 0."""
    form = FORMATS[storage]
    _, exponent = np.frexp(np.where(np.isfinite(base), base, 0).astype(np.float64))
    exponent = np.where(base == 0, form.emin, exponent - 1)
    return np.ldexp(1.0, np.maximum(exponent, form.emin) - form.mantissa)


def _steps(view: View, storage: str) -> NDArray[np.int64]:
    histogram = np.zeros((len(view.changed), 2, 33), np.int64)
    with np.errstate(all="ignore"):
        for t, (changed, delta) in enumerate(zip(view.changed, view.deltas, strict=True)):
            ratio = np.rint(np.abs(delta.astype(np.float64)) / spacing(view.base, storage))
            ratio[~np.isfinite(delta) | ~np.isfinite(view.base)] = 33
            k = np.clip(ratio, 1, 33).astype(np.int64)
            for shared in (0, 1):
                where = changed & ((view.count > 1) == shared)
                histogram[t, shared] = np.bincount(k[where] - 1, minlength=33)
    return histogram


# Merging


@dataclass(frozen=True)
class Merged:
    """Output bits, and the two numbers a merge reports."""

    bits: Array
    overflow: int
    moved: int


def merged_values(view: View, coefficients: Sequence[float]) -> Array:
    """(n,) in the width: what RAM and RAM+ compute for each element; the base where nobody changed it."""
    kind = view.base.dtype.type
    with np.errstate(all="ignore"):
        total = np.zeros_like(view.base)
        alone = np.zeros_like(view.base)
        for delta, changed, coefficient in zip(view.deltas, view.changed, coefficients, strict=True):
            total = np.where(changed, total + delta, total)
            alone = np.where(changed, kind(coefficient) * delta, alone)
        mean = total / view.count.astype(view.base.dtype)
        values = view.base + np.where(view.count == 1, alone, mean)
        return np.where(view.count == 0, view.base, values)


def merge_tensor(
    base: Source,
    agents: Agents,
    coefficients: Sequence[float],
    out: str,
    epsilon: float = 1e-5,
    on_nonfinite: str = "error",
    compare: str | None = None,
    wide: bool | None = None,
) -> Merged:
    """The merge of one tensor with given coefficients (1 everywhere: RAM)."""
    view = look(base, agents, epsilon, on_nonfinite, compare, wide)
    values = merged_values(view, coefficients)
    verbatim = (view.count == 0) & (out == base.dtype)
    bits = narrow(values, out)
    plain = narrow(merged_values(view, np.ones(len(agents))), out)
    arose = ~np.isfinite(values) & ~view.nonfinite.any(axis=0)
    lost = (overflows(values, out) | arose) & ~verbatim
    if out == base.dtype:
        bits = np.where(verbatim, base.bits, bits).astype(bits.dtype)
    moved = (view.count == 1) & (bits != plain)
    return Merged(bits, int(lost.sum()), int(moved.sum()))


def merge_tensor_float64(
    base: Source, agents: Agents, coefficients: Sequence[float], epsilon: float = 1e-5
) -> NDArray[np.float64]:
    """The same merge in float64 throughout, not narrowed: what the exact answer is close to."""
    return merged_values(look(base, agents, epsilon, "error", None, wide=True), coefficients)


def ratio_of(shared: int, below: int) -> float:
    """ρ: infinite where something is shared and the denominator is 0."""
    if below:
        return shared / below
    return float("inf") if shared else 0.0


def lambdas(
    overlaps: Sequence[NDArray[np.int64]], r: float, alpha: float, ratio: str = "unique", scope: str = "model"
) -> NDArray[np.float64]:
    """λ (tensors, T) from each tensor's `overlap`."""
    rows = []
    for overlap in overlaps:
        counts = overlap if scope == "tensor" else sum(overlaps)
        row = []
        for own in counts:
            unique, shared = int(own[0]), int(own[1:].sum())
            rho = ratio_of(shared, unique if ratio == "unique" else unique + shared)
            row.append(1.0 + r * min(max(rho, 0.0), alpha))
        rows.append(row)
    return np.array(rows)


@dataclass(frozen=True)
class MergedModel:
    """Output bits by tensor, λ (tensors, T) in the model's order, and the two numbers a merge reports."""

    bits: dict[str, Array]
    lambdas: NDArray[np.float64]
    overflow: int
    moved: int


def merge(
    base: Mapping[str, Source],
    agents: Sequence[Mapping[str, Source]],
    epsilon: float = 1e-5,
    r: float = 0.1,
    alpha: float = 2.0,
    ratio: str = "unique",
    scope: str = "model",
    on_nonfinite: str = "error",
    out: str | None = None,
    compare: str | None = None,
) -> MergedModel:
    """Merge a model; r = 0 is RAM; `out` None keeps each tensor's dtype; policy `error` merges as `base`."""
    rule = (epsilon, on_nonfinite, compare)
    overlaps, sources = [], {}
    for name, tensor in base.items():
        sources[name] = [agent.get(name) for agent in agents]
        overlaps.append(_overlaps(look(tensor, sources[name], *rule))["overlap"])
    rows = lambdas(overlaps, r, alpha, ratio, scope)
    done = {
        name: merge_tensor(tensor, sources[name], row, out or tensor.dtype, *rule)
        for (name, tensor), row in zip(base.items(), rows, strict=True)
    }
    overflow, moved = (sum(getattr(one, name) for one in done.values()) for name in ("overflow", "moved"))
    return MergedModel({name: one.bits for name, one in done.items()}, rows, overflow, moved)
