"""Quantiles against sorting: the search by itself, and with the loops that take its histograms."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream.kernels import host
from ramstream.kernels.sifting import Sifter, sifter_bytes
from ramstream.quantiles import (
    CHOSEN,
    KEYS,
    NOTHING,
    Part,
    Queries,
    Stage,
    combined,
    decode,
    encode,
    kth_largest,
    least_double,
    queries,
    thresholds,
)
from ramstream.types import STRIP, Dtype

quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=150,
)

Deltas = Sequence[Sequence[NDArray[np.floating]]]
"""[tensor][agent]"""
Take = Callable[[Queries, int, int, Sequence[NDArray[np.floating]]], list[Part]]
"""The histograms of a tensor's deltas by agent: (queries, tensor, agents, deltas)."""


def expected(deltas: Deltas, density: NDArray[np.float64], scope: str) -> NDArray[np.float64]:
    """The thresholds as float32 values, by sorting."""
    result = np.empty(density.shape)
    with np.errstate(over="ignore"):
        sizes = [[np.abs(agent).astype(np.float32) for agent in tensor] for tensor in deltas]
    for i, t in np.ndindex(*density.shape):
        among = sizes[i][t] if scope == "tensor" else np.concatenate([tensor[t] for tensor in sizes])
        ordered = np.sort(np.where(np.isnan(among), np.inf, among))[::-1]
        share = density[i, t]
        if 0 < share < 1 and len(ordered):
            result[i, t] = ordered[max(1, int(share * len(ordered))) - 1]
        else:
            result[i, t] = 0.0 if share > 0 else np.inf
    return result


def by_numpy(asked: Queries, tensor: int, agents: int, deltas: Sequence[NDArray[np.floating]]) -> list[Part]:
    """Histograms by sorting, each tensor in three parts."""
    parts = []
    for t in np.flatnonzero(asked.wanted(tensor)):
        for piece in np.array_split(deltas[t], 3):
            with np.errstate(over="ignore"):
                bits = np.abs(piece).astype(np.float32).view(np.uint32).astype(np.int64)
            low = bits & 0xFFFF
            keys = (bits >> 16 << 1 | (low > 0))[bits > 0]
            if asked.is_fine:
                buckets = asked.wanted_buckets(asked.group(tensor), t)
                keys = (np.searchsorted(buckets, bits >> 16) * KEYS + low)[
                    np.isin(bits >> 16, buckets) & (low > 0)
                ]
            found, counts = np.unique(keys, return_counts=True)
            parts.append(Part(asked.group(tensor), int(t), found.astype(np.uint32), counts))
    return parts


def by_loops(asked: Queries, tensor: int, agents: int, deltas: Sequence[NDArray[np.floating]]) -> list[Part]:
    """Histograms by a worker's loops, in two strips; the base is 0, so that agents are their deltas."""
    wide = deltas[0].dtype == np.float64
    code, n = Dtype.F64 if wide else Dtype.F32, len(deltas[0])
    sifter, sources, base = (
        Sifter(asked, agents, 0.0, "keep", None),
        host.Sources(agents),
        np.zeros(n, deltas[0].dtype),
    )
    cut = min(n, 4096)
    for begin, end in ((0, cut), (cut, n)):
        for k, values in enumerate([base, *deltas]):
            sources.set(k, code, values.ctypes.data + begin * values.itemsize, end - begin)
        sifter.begin(asked.group(tensor), wide)
        sifter.strip(sources, end - begin)
    return sifter.finish()


def searched(deltas: Deltas, density: NDArray[np.float64], scope: str, take: Take) -> NDArray[np.float64]:
    """The thresholds, by both stages."""
    asked = queries(density, [len(tensor[0]) for tensor in deltas], scope)
    coarse = stage(asked, deltas, take)
    fine = stage(coarse.fine(), deltas, take)
    return thresholds(coarse, fine, np.array([tensor[0].dtype == np.float64 for tensor in deltas]))


def stage(asked: Queries, deltas: Deltas, take: Take) -> Stage:
    result = Stage(asked)
    for tensor, agents in enumerate(deltas):
        if asked.wanted(tensor).any():
            for part in take(asked, tensor, len(agents), agents):
                result.add(part)
    for group in range(len(asked.ranks)):
        result.close(group)
    return result


SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -3e-45,
    1e-40,
    1e-38,
    1.0,
    -1.0,
    1.0 + 2.0**-23,
    0.5,
    3.4e38,
    np.inf,
    -np.inf,
    np.nan,
]


def drawn(rng: np.random.Generator, n: int, how: str, wide: bool) -> NDArray[np.floating]:
    """n deltas of one kind."""
    if how == "equal":
        values = np.full(n, rng.choice(SPECIAL[:11]))
    elif how == "special":
        values = rng.choice(SPECIAL, n)
    elif how == "steps":  # as differences of 16-bit floats are
        values = rng.integers(-4, 5, n) * 2.0 ** rng.integers(-20, -8, n)
    elif how == "near":  # in one bucket, halves of the last float32 bit among them
        values = 1.0 + rng.integers(0, 64, n) * 2.0**-24
    else:
        values = rng.normal(size=n) * np.exp(rng.normal(size=n))
    values = np.where(rng.random(n) < rng.choice([0.0, 0.5, 0.99]), 0.0, values)
    with np.errstate(over="ignore"):
        return values.astype(np.float64 if wide else np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Deltas, NDArray[np.float64], str]:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    agents = draw(st.integers(1, 4))
    shares = st.sampled_from([0.0, 1e-9, 0.01, 0.2, 0.5, 0.999, 1.0])
    deltas, density = [], []
    for _ in range(draw(st.integers(1, 4))):
        n, wide = draw(st.sampled_from([0, 1, 2, 63, 100, 1025])), draw(st.booleans())
        how = draw(st.sampled_from(["equal", "special", "steps", "near", "any"]))
        deltas.append([drawn(rng, n, how, wide) for _ in range(agents)])
        density.append(draw(st.lists(shares, min_size=agents, max_size=agents)))
    return deltas, np.array(density), draw(st.sampled_from(["tensor", "model"]))


@pytest.mark.parametrize("take", [by_numpy, by_loops])
@quick
@given(case=cases())
def test_thresholds_keep_what_sorting_keeps(
    take: Take, case: tuple[Deltas, NDArray[np.float64], str]
) -> None:
    deltas, density, scope = case
    least, found = expected(deltas, density, scope), searched(deltas, density, scope, take)
    for i, t in np.ndindex(*density.shape):
        sizes = np.abs(deltas[i][t])
        with np.errstate(over="ignore"):
            kept = sizes.astype(np.float32) >= least[i, t]
        assert ((sizes >= found[i, t]) == kept).all()
        if sizes.dtype == np.float32:
            assert found[i, t] == least[i, t]


@pytest.mark.parametrize("k", [1, 2, 500, 998, 999, 1000])
def test_every_rank_of_distinct_values_is_exact(k: int) -> None:
    values = np.random.default_rng(k).permutation(np.arange(1000)).astype(np.float32) / np.float32(977)
    density = np.array([[(k + 0.5) / 1000]])
    found = searched([[values]], density, "tensor", by_loops)
    assert found[0, 0] == np.sort(values)[::-1][k - 1]
    assert (np.abs(values) >= found[0, 0]).sum() == k


def test_a_rank_among_the_zeros_keeps_all() -> None:
    values = np.zeros(100, np.float32)
    values[:10] = 3
    assert searched([[values]], np.array([[0.1]]), "tensor", by_loops)[0, 0] == 3
    assert searched([[values]], np.array([[0.11]]), "tensor", by_loops)[0, 0] == 0


def test_nan_counts_as_the_largest() -> None:
    values = np.array([1, np.nan, 2, np.inf, -np.nan, 3, 4, 5, 6, 7], np.float32)
    found = [searched([[values]], np.array([[k / 10]]), "tensor", by_loops)[0, 0] for k in (1, 2, 3, 4)]
    assert found == [np.inf, np.inf, np.inf, 7]


@given(st.integers(1, 0x7F7FFFFE))
@quick
def test_the_least_double_is_the_first_that_rounds_up(bits: int) -> None:
    least = least_double(np.array([bits, bits + 1]))
    rounded, before = least.astype(np.float32), np.nextafter(least, 0).astype(np.float32)
    assert rounded.view(np.uint32).tolist() == [bits, bits + 1]
    assert before.view(np.uint32).tolist() == [bits - 1, bits]


def test_the_least_double_of_infinity_is_the_first_that_overflows() -> None:
    least = least_double(np.array([0x7F800000, 0x7FC00001, 0]))
    assert least.tolist() == [2.0**128 - 2.0**103, 2.0**128 - 2.0**103, 0]
    with np.errstate(over="ignore"):
        assert np.isinf(least[0].astype(np.float32))
        assert np.isfinite(np.nextafter(least[0], 0).astype(np.float32))


def test_differences_of_16_bit_floats_need_no_fine_stage() -> None:
    rng = np.random.default_rng(0)
    base = (rng.normal(size=5000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    agent = base + rng.integers(0, 5, 5000).astype(np.uint16)
    both = [(values.astype(np.uint32) << 16).view(np.float32) for values in (base, agent)]
    asked = queries(np.array([[0.3]]), [5000], "tensor")
    coarse = stage(asked, [[both[1] - both[0]]], by_loops)
    assert coarse.left[0, 0, 0] > 0
    assert not coarse.fine().any
    exact = stage(asked, [[rng.normal(size=5000).astype(np.float32)]], by_loops)
    assert exact.fine().any


def test_nothing_is_asked_where_every_density_is_0_or_1() -> None:
    for scope in ("tensor", "model"):
        asked = queries(np.array([[1.0, 0.0], [2.0, -1.0]]), [5, 7], scope)
        assert not asked.any
        coarse = Stage(asked)
        found = thresholds(coarse, Stage(coarse.fine()), np.array([False, True]))
        assert found.tolist() == [[0, np.inf], [0, np.inf]]


def test_agents_without_a_question_are_not_looked_at() -> None:
    asked = queries(np.array([[0.5, 1.0]]), [3], "tensor")
    values = np.array([1, 2, 3], np.float32)
    assert [part.agent for part in by_loops(asked, 0, 2, [values, values])] == [0]


def test_the_kth_largest_by_counts() -> None:
    keys, counts = np.array([3, 7, 9], np.uint32), np.array([2, 1, 4])
    found, left = kth_largest(keys, counts, np.arange(9))
    assert found.tolist() == [NOTHING, 9, 9, 9, 9, 7, 3, 3, NOTHING]
    assert left.tolist() == [0, 1, 2, 3, 4, 1, 1, 2, 0]
    assert kth_largest(keys[:0], counts[:0], np.array([1, 0]))[0].tolist() == [NOTHING, NOTHING]


def test_answers_of_a_whole_set_replace_its_histogram() -> None:
    values = np.random.default_rng(1).normal(size=300).astype(np.float32)
    asked = queries(np.array([[0.2, 0.4]]), [300], "tensor")
    whole = stage(asked, [[values, -values]], by_loops)
    chosen = np.array([(0, t, whole.keys[0, t, 0], whole.left[0, t, 0]) for t in range(2)], CHOSEN)
    other = Stage(asked)
    other.choose(chosen)
    assert (other.keys == whole.keys).all()
    assert (other.left == whole.left).all()


def test_parts_survive_a_journal_and_add_up() -> None:
    rng = np.random.default_rng(2)
    parts = []
    for group, agent in rng.integers(0, 3, (20, 2)).tolist():
        keys = np.unique(rng.integers(0, 3 * KEYS, 40)).astype(np.uint32)
        parts.append(Part(group, agent, keys, rng.integers(1, 1 << 40, len(keys))))
    chosen = np.array([(5, 3, 77, 1 << 40), (0, 0, NOTHING, 0)], CHOSEN)
    again, answers = decode(encode(parts, chosen))
    assert answers.tobytes() == chosen.tobytes()
    for one, two in zip(parts, again, strict=True):
        assert one[:2] == two[:2]
        assert np.array_equal(one.keys, two.keys)
        assert np.array_equal(one.counts, two.counts)
    total = combined(parts)
    assert [part[:2] for part in total] == sorted({part[:2] for part in parts})
    for part in total:
        dense = np.zeros(3 * KEYS, np.int64)
        for one in parts:
            if one[:2] == part[:2]:
                np.add.at(dense, one.keys, one.counts)
        assert np.array_equal(np.flatnonzero(dense), part.keys)
        assert np.array_equal(dense[part.keys], part.counts)
    assert decode(encode([], chosen[:0]))[0] == []


def test_a_sifter_starts_again_after_each_group() -> None:
    rng = np.random.default_rng(3)
    deltas = [[rng.normal(size=4096).astype(np.float32)] for _ in range(3)]
    asked = queries(np.full((3, 1), 0.3), [4096] * 3, "tensor")
    sifter, sources, base = Sifter(asked, 1, 0.0, "error", None), host.Sources(1), np.zeros(4096, np.float32)
    for _ in range(2):
        for group, (values,) in enumerate(deltas):
            sources.set(0, Dtype.F32, base.ctypes.data, 4096)
            sources.set(1, Dtype.F32, values.ctypes.data, 4096)
            sifter.begin(group, False)
            sifter.strip(sources, 4096)
            (part,) = sifter.finish()
            (fresh,) = by_loops(asked, group, 1, [values])
            assert part.group == group
            assert np.array_equal(part.keys, fresh.keys)
            assert np.array_equal(part.counts, fresh.counts)


@pytest.mark.parametrize("agents", [1, 3, 20])
def test_a_sifter_holds_what_is_projected(agents: int) -> None:
    density = np.linspace(0.1, 0.9, 5)[:, None].repeat(agents, 1)
    for scope, slots in (("tensor", 1), ("model", 5)):
        asked = queries(density, [STRIP] * 5, scope)
        assert asked.slots == slots
        for one in (asked, Stage(asked).fine()):
            sifter = Sifter(one, agents, 0.0, "error", None)
            arrays = [a for wide in (False, True) for a in sifter._width(wide)[0]]
            arrays += [array for array in vars(sifter).values() if isinstance(array, np.ndarray)]
            owned = {id(a.base if a.base is not None else a): a for a in arrays}
            assert sum(a.nbytes for a in owned.values()) <= sifter_bytes(agents, slots)


WITHOUT_NUMBA = """
import numpy as np, test_quantiles as t
rng, density = np.random.default_rng(0), np.array([[0.01, 0.3]])
for how in ("equal", "special", "steps", "near", "any"):
    for wide in (False, True):
        deltas = [[t.drawn(rng, 100, how, wide) for _ in range(2)]]
        for scope in ("tensor", "model"):
            one, two = (t.searched(deltas, density, scope, take) for take in (t.by_numpy, t.by_loops))
            assert one.tolist() == two.tolist(), (how, wide, scope, one, two)
"""


def test_the_loops_run_without_numba() -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "error"}
    subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA], check=True, env=environment, cwd=Path(__file__).parent
    )
