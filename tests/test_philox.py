"""Philox: the published vectors, and the same number for an element however, and by whom, it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream.kernels import philox

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Random123's known answers for philox4x32 with 10 rounds: counter, key, output."""

Numbers = NDArray[np.float32] | NDArray[np.float64]
word64 = st.integers(0, 2**64 - 1)
places = st.integers(0, 2**58 - 2**12).map(lambda group: 4 * group)
"""First elements; all that follow are below 2⁶⁰."""


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition, in Python's integers."""
    (a, b, c, d), (k, l) = counter, key  # noqa: E741
    for _ in range(10):
        ac, ca = divmod(0xD2511F53 * a, 2**32), divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = ca[0] ^ b ^ k, ca[1], ac[0] ^ d ^ l, ac[1]
        k, l = (k + 0x9E3779B9) % 2**32, (l + 0xBB67AE85) % 2**32  # noqa: E741
    return [a, b, c, d]


def number(element: int, seed: int, name: int, agent: int) -> float:
    group, word = divmod(element, 4)
    counter = [group % 2**32, agent + group // 2**32 * 64, name % 2**32, name // 2**32]
    return philox4x32(counter, [seed % 2**32, seed // 2**32])[word] // 256 / 2**24


def python(n: int, seed: int, name: int, agent: int, first: int) -> Numbers:
    return np.array([number(first + i, seed, name, agent) for i in range(n)], np.float32)


def numba(n: int, seed: int, name: int, agent: int, first: int, dtype: type = np.float32) -> Numbers:
    row: Numbers = np.full(n // 4 * 4 + 8, -1, dtype)
    philox.uniform(row, n, np.uint64(seed), np.uint64(name), agent, first)
    assert (row[(n + 3) // 4 * 4 :] == -1).all()
    return row[:n]


def torch_form(
    n: int, seed: int, name: int, agent: int, first: int, dtype: torch.dtype = torch.float32
) -> Numbers:
    found: Numbers = philox.uniform_torch(n, seed, name, agent, first, "cpu", dtype).numpy()
    return found


forms = pytest.mark.parametrize("form", [numba, torch_form])
Form = Callable[..., Numbers]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_the_reference_gives_the_published_vectors(counter: str, key: str, output: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(output)


@forms
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_an_element_takes_24_bits_of_the_published_vectors(
    form: Form, counter: str, key: str, output: str
) -> None:
    c0, c1, c2, c3 = words(counter)
    k0, k1 = words(key)
    first = (c1 >> 6 << 34) + (c0 << 2)
    found = form(4, k0 + (k1 << 32), c2 + (c3 << 32), c1 & 63, first)
    assert (found * 2**24).tolist() == [word >> 8 for word in words(output)]


@forms
@settings(deadline=None, max_examples=60)
@given(n=st.integers(0, 70), seed=word64, name=word64, agent=st.integers(0, 63), first=places)
def test_every_form_is_the_reference(
    form: Form, n: int, seed: int, name: int, agent: int, first: int
) -> None:
    assert form(n, seed, name, agent, first).tolist() == python(n, seed, name, agent, first).tolist()


@forms
@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, 64), max_size=4), first=places, spare=st.integers(0, 3))
def test_any_cut_gives_the_same_numbers(form: Form, cuts: list[int], first: int, spare: int) -> None:
    whole = form(256 + spare, 7, 8, 9, first)
    edges = [0, *sorted(4 * cut for cut in cuts), 256 + spare]
    parts = [form(end - start, 7, 8, 9, first + start) for start, end in pairwise(edges)]
    assert np.concatenate(parts).tolist() == whole.tolist()


@settings(deadline=None, max_examples=20)
@given(n=st.integers(0, 9000), seed=word64, first=places)
def test_torch_and_both_widths_of_numba_give_the_same_numbers(n: int, seed: int, first: int) -> None:
    narrow = numba(n, seed, 3, 1, first)
    assert narrow.dtype == np.float32
    assert numba(n, seed, 3, 1, first, np.float64).tolist() == narrow.tolist()
    for dtype in (torch.float32, torch.float64):
        found = philox.uniform_torch(n, seed, 3, 1, first, "cpu", dtype)
        assert found.dtype == dtype
        assert found.tolist() == narrow.tolist()


@forms
def test_elements_around_2_to_the_34th_are_those_of_the_reference(form: Form) -> None:
    first = 2**34 - 8
    found = form(16, 5, 6, 7, first)
    assert found.tolist() == python(16, 5, 6, 7, first).tolist()
    assert found[8:].tolist() != form(8, 5, 6, 7, 0).tolist()


@pytest.mark.parametrize(
    "other",
    [(1 << 40, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 1 << 63, 0, 0), (0, 0, 1, 0), (0, 0, 0, 4096)],
)
def test_another_seed_tensor_agent_or_place_gives_unrelated_numbers(other: tuple[int, int, int, int]) -> None:
    left, right = numba(4096, 0, 0, 0, 0), numba(4096, *other)
    assert (left == right).mean() < 0.01
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / 64


def test_numbers_are_uniform_and_those_of_neighbours_unrelated() -> None:
    n = 1 << 18
    found = numba(n, 1, philox.name_key("model.layers.0.mlp.up_proj.weight"), 2, 0, np.float64)
    assert 0 <= found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    error = n**-0.5
    assert abs(found.mean() - 1 / 2) < 4 * error * 12**-0.5
    assert abs(found.var() - 1 / 12) < 4 * error * 180**-0.5
    counts = np.histogram(found, 64, (0, 1))[0]
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 4 * 126**0.5
    for lag in (1, 2, 3, 4, 4096):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 4 * error


def test_every_number_has_24_bits_at_most_and_some_have_all() -> None:
    steps = numba(4096, 1, 2, 3, 0) * np.float32(2**24)
    assert (steps == np.floor(steps)).all()
    assert (steps % 2 == 1).any()


def test_the_key_of_a_name_is_xxh3_of_its_utf8() -> None:
    assert philox.name_key("") == 0x2D06800538D394C2
    keys = {philox.name_key(name) for name in ("a", "b", "a.b", "é", "层")}
    assert len(keys) == 5
    assert all(0 <= key < 2**64 for key in keys)


def check_a_few() -> None:
    """Run in a process of its own, with the kernels as plain Python and numpy's warnings as errors."""
    for n, seed, name, agent, first in ((5, 0, 0, 0, 0), (9, 2**64 - 1, 2**64 - 1, 63, 2**60 - 16)):
        assert numba(n, seed, name, agent, first).tolist() == python(n, seed, name, agent, first).tolist()


def test_without_the_compiler_the_numbers_are_the_same() -> None:
    subprocess.run(
        [
            sys.executable,
            "-W",
            "error::RuntimeWarning",
            "-c",
            "import test_philox; test_philox.check_a_few()",
        ],
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        check=True,
    )
