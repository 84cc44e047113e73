"""Every pattern: all 2^32 float32 through each narrowing, every 16- and 8-bit pattern through each widening.

A merge whose agents are all absent converts the base to the output's dtype. Narrowing is monotone on the bits of
positive numbers, so what to expect is runs of equal codes whose ends, the midpoints, are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import reference as ref

from ramstream.kernels import host
from ramstream.kernels.program import COPY
from ramstream.kernels.torch import TorchMerger
from ramstream.types import STRIP, Dtype

NARROW = ["BF16", "F16", "F8_E4M3", "F8_E5M2"]
INFINITY, SIGN = 0x7F80_0000, 0x8000_0000
WORKERS = 2


def numba_converter() -> tuple[Callable, Callable]:
    merger = host.Merger(COPY, 0.0, "error", None)
    return merger.strip, merger.take


def torch_converter() -> tuple[Callable, Callable]:
    merger = TorchMerger(COPY, 0.0, "error", None, device="cpu")
    return merger.strip, merger.take


FORMS = pytest.mark.parametrize("form", [numba_converter, torch_converter])


def base_alone(bits: np.ndarray, dtype: str) -> host.Sources:
    sources = host.Sources(0)
    sources.set(0, int(Dtype[dtype]), bits.ctypes.data, len(bits))
    return sources


def convert(strip: Callable, bits: np.ndarray, dtype: str, out: str) -> np.ndarray:
    """`bits` of `dtype`, at most a strip of them, as the kernels write them in `out`."""
    room = np.empty(len(bits) * Dtype[out].itemsize, np.uint8)
    strip(base_alone(bits, dtype), len(bits), np.ones(1), dtype == "F64", Dtype[out], room)
    return room.view(ref.FORMATS[out].raw)


def convert_all(form: Callable, bits: np.ndarray, dtype: str, out: str) -> np.ndarray:
    strip, _ = form()
    parts = [bits[begin : begin + STRIP] for begin in range(0, len(bits), STRIP)]
    return np.concatenate([convert(strip, part, dtype, out) for part in parts])


# Narrowing float32


@dataclass(frozen=True)
class Runs:
    """What the positive float32 patterns become: `codes[i]` from pattern `starts[i]` on."""

    starts: np.ndarray
    codes: np.ndarray
    lost: int
    """Patterns of one sign that are beyond the range."""

    def expected(self, begin: int, end: int, sign: np.unsignedinteger) -> np.ndarray:
        first = np.searchsorted(self.starts, begin, "right") - 1
        last = np.searchsorted(self.starts, end, "left")
        edges = np.clip(np.append(self.starts[first:last], end), begin, end)
        return np.repeat(self.signed(self.codes[first:last], sign), np.diff(edges))

    def signed(self, codes: np.ndarray, sign: np.unsignedinteger) -> np.ndarray:
        """NaN, the last code, is written positive."""
        return np.where(codes == self.codes[-1], codes, codes | sign)

    def at(self, patterns: np.ndarray) -> np.ndarray:
        """The codes of any patterns, of both signs."""
        positive = self.codes[np.searchsorted(self.starts, patterns & (SIGN - 1), "right") - 1]
        sign = self.codes.dtype.type(1 << 8 * self.codes.itemsize - 1)
        return np.where(patterns >= SIGN, self.signed(positive, sign), positive)


def runs(dtype: str) -> Runs:
    form = ref.FORMATS[dtype]
    middle = ref.midpoints(dtype)
    single = middle.astype(np.float32)
    assert (single == middle).all()
    ties_down = np.arange(len(middle)) % 2 == 0
    starts = single.view(np.uint32).astype(np.int64) + ties_down
    lost = INFINITY - int(starts[-1])
    if not form.infinities:
        starts, lost = starts[:-1], lost + 1
    codes = np.append(np.arange(len(starts) + 1), form.nan).astype(form.raw)
    nan = INFINITY + 1 if form.infinities else INFINITY
    return Runs(np.concatenate([[0], starts, [nan]]), codes, lost)


def check_share(dtype: str, worker: int) -> int:
    """Compare every WORKERS-th strip of positive patterns, and their negatives; returns the overflow."""
    strip, take = numba_converter()
    known = runs(dtype)
    minus = known.codes.dtype.type(1 << 8 * known.codes.itemsize - 1)
    for begin in range(worker * STRIP, SIGN, WORKERS * STRIP):
        end = begin + STRIP
        bits = np.arange(begin, end, dtype=np.uint32)
        for sign, pattern in ((minus.dtype.type(0), bits), (minus, bits | np.uint32(SIGN))):
            got = convert(strip, pattern, "F32", dtype)
            assert np.array_equal(got, known.expected(begin, end, sign)), (dtype, hex(int(pattern[0])))
    return take()[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", NARROW)
def test_every_float32_narrows_to_the_nearest(dtype: str) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        overflow = sum(pool.map(partial(check_share, dtype), range(WORKERS)))
    assert overflow == 2 * runs(dtype).lost


def telling_patterns(dtype: str) -> np.ndarray:
    """Every high half with some low halves, and the edges of all runs with their neighbours, of both signs."""
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    halves = (np.arange(1 << 16)[:, None] << 16 | low).ravel()
    edges = (runs(dtype).starts[1:, None] + np.arange(-2, 3)).ravel()
    return np.concatenate([halves, edges, edges | SIGN]).astype(np.uint32)


@FORMS
@pytest.mark.parametrize("dtype", NARROW)
def test_telling_float32_patterns_narrow_to_the_nearest(form: Callable, dtype: str) -> None:
    patterns = telling_patterns(dtype)
    np.testing.assert_array_equal(convert_all(form, patterns, "F32", dtype), runs(dtype).at(patterns))


@pytest.mark.parametrize("dtype", NARROW)
def test_runs_are_the_oracles(dtype: str) -> None:
    patterns = telling_patterns(dtype)
    np.testing.assert_array_equal(runs(dtype).at(patterns), ref.narrow(patterns.view(np.float32), dtype))


@pytest.mark.parametrize("dtype", NARROW)
def test_runs_of_a_strip_are_the_codes_of_its_patterns(dtype: str) -> None:
    known = runs(dtype)
    minus = known.codes.dtype.type(1 << 8 * known.codes.itemsize - 1)
    for begin in range(0, SIGN, 509 * 997 * 1009):
        patterns = np.arange(begin, begin + 70_000)
        got = [known.expected(begin, begin + 70_000, sign) for sign in (minus * 0, minus)]
        np.testing.assert_array_equal(np.concatenate(got), known.at(np.append(patterns, patterns | SIGN)))


# Narrowing float64, through float32


def telling_doubles(dtype: str) -> np.ndarray:
    """Midpoints of the target and of float32 near them, with the next float64 on each side, and the extremes."""
    if dtype == "F32":
        codes = np.random.default_rng(0).integers(0, INFINITY, 1 << 16, np.uint32)
        below, above = ((codes + k).astype(np.uint32).view(np.float32).astype(np.float64) for k in (0, 1))
        middle = np.append((below + above) / 2, 2.0**128 - 2.0**103)
    else:
        single = ref.midpoints(dtype).astype(np.float32)
        around = [np.nextafter(single, np.float32(side)).astype(np.float64) for side in (0, np.inf)]
        middle = np.concatenate([single.astype(np.float64), *((single + other) / 2 for other in around)])
    values = [
        middle,
        np.nextafter(middle, 0),
        np.nextafter(middle, np.inf),
        [0, 5e-324, 1e300, np.inf, np.nan],
    ]
    return np.concatenate([*values, *(np.negative(v) for v in values)])


@FORMS
@pytest.mark.parametrize("dtype", ["F32", *NARROW])
def test_float64_narrows_through_float32(form: Callable, dtype: str) -> None:
    values = telling_doubles(dtype)
    got = convert_all(form, values.view(np.uint64), "F64", dtype)
    np.testing.assert_array_equal(got, ref.narrow(values, dtype))


# Widening


def every(dtype: str) -> np.ndarray:
    return np.arange(1 << ref.FORMATS[dtype].bits).astype(ref.FORMATS[dtype].raw)


@FORMS
@pytest.mark.parametrize("width", ["F32", "F64"])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_widens_exactly(form: Callable, dtype: str, width: str) -> None:
    wide = ref.widen(every(dtype), dtype, width)
    expected = np.where(np.isnan(wide), ref.FORMATS[width].nan, wide.view(ref.FORMATS[width].raw))
    np.testing.assert_array_equal(convert_all(form, every(dtype), dtype, width), expected)


def two_sources(base: np.ndarray, dtype: str, agent: np.ndarray, width: str) -> host.Sources:
    sources = host.Sources(1)
    sources.set(0, int(Dtype[dtype]), base.ctypes.data, len(base))
    sources.set(1, int(Dtype[width]), agent.ctypes.data, len(agent))
    return sources


def tally(base: np.ndarray, dtype: str, agent: np.ndarray, width: str) -> tuple[int, int]:
    """How many elements are changed, and how many refused."""
    counter = host.Counter(1, 0.0, "error", None)
    counter.begin(Dtype[dtype], width == "F64", False)
    bits = np.zeros((1, -(-len(base) // 64)), np.uint64)
    counter.strip(two_sources(base, dtype, agent, width), len(base), bits)
    record = counter.finish()
    return int(record["pairs"][0, 0]), int(record["refused"][1])


@pytest.mark.parametrize("width", ["F32", "F64"])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_nan_widens_with_its_payload(dtype: str, width: str) -> None:
    wide = ref.widen(every(dtype), dtype, width)
    nan = np.isnan(wide)
    same = wide.view(ref.FORMATS[width].raw)
    assert tally(every(dtype), dtype, same, width) == (0, 0)
    assert tally(every(dtype), dtype, same ^ nan.astype(same.dtype), width) == (0, nan.sum())
