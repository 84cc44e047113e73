"""`fuse`: the properties that its docstring promises, over ordinary, extreme and degenerate values."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream.errors import UsageError
from ramstream.priority import fuse, group_normalised

WIDTHS = [np.float32, np.float64]
widths = pytest.mark.parametrize("width", WIDTHS)
Array = NDArray[Any]

any_number = st.floats(allow_nan=False, allow_infinity=False, width=32)
moderate = st.floats(2.0**-20, 2.0**20, width=32)
weights = st.floats(0, 2.0**10, width=32)

EXTREMES = [0.0, 1e-45, 1e-38, 1.2e-38, 1e-19, 1e-5, 0.3, 1.0, 7.0, 1e19, 1e38, 3.4e38]


def grid(width: type, numbers: list[float] = EXTREMES) -> tuple[Array, Array]:
    """All pairs of the numbers and their opposites."""
    line: Array = np.array([sign * number for number in numbers for sign in (1, -1)], width)
    p, a = np.meshgrid(line, line)
    return p.ravel(), a.ravel()


def wide_grid(width: type) -> tuple[Array, Array]:
    return grid(width, EXTREMES + ([5e-324, 1e-300, 1e300, 1.7e308] if width is np.float64 else []))


def exact(p: float, a: float, w: float) -> Fraction:
    """The formula in rational numbers."""
    fp, fa, fw = Fraction(p), Fraction(a), Fraction(w)
    if fp * fa >= 0:
        return fp + fw * fa
    return fp * abs(fp) / (abs(fp) + fw * abs(fa))


@given(any_number, any_number, weights)
def test_a_pair_gives_the_formula(p: float, a: float, w: float) -> None:
    found, wanted = Fraction(fuse(p, a, w)), exact(p, a, w)
    assert abs(found - wanted) <= abs(wanted) * Fraction(4, 2**52)


def test_worked_values() -> None:
    assert fuse(2.0, 1.0) == 3
    assert fuse(2.0, 1.0, 0.25) == 2.25
    assert fuse(1.0, -1.0) == 0.5
    assert fuse(-1.0, 3.0) == -0.25
    assert fuse(1.0, -3.0, 5) == 1 / 16
    assert fuse(4, -12) == 1


@widths
@pytest.mark.parametrize("w", [0.0, 0.5, 1.0, 3.0])
def test_the_primarys_sign_is_kept_even_at_extreme_magnitudes(width: type, w: float) -> None:
    p, a = wide_grid(width)
    fused = fuse(p, a, w)
    assert fused.dtype == width
    assert not np.isnan(fused).any()
    assert (np.sign(fused)[p != 0] == np.sign(p)[p != 0]).all()


@given(any_number.filter(bool), any_number, weights)
def test_the_primarys_sign_is_kept(p: float, a: float, w: float) -> None:
    for fused in (fuse(p, a, w), fuse(np.float32(p), np.float32(a), w)):
        assert math.copysign(1, fused) == math.copysign(1, p)
        assert fused != 0


@given(st.lists(st.tuples(any_number.filter(bool), any_number), min_size=2, max_size=30), weights)
def test_every_sample_with_a_positive_primary_is_above_every_one_with_a_negative(
    samples: list[tuple[float, float]], w: float
) -> None:
    p, a = np.array([*samples, (1.0, -3e38), (-1.0, 3e38)], np.float32).T
    fused = fuse(p, a, w)
    assert fused[p > 0].min() > fused[p < 0].max()


@widths
def test_where_the_signs_agree_the_auxiliary_is_added_whole(width: type) -> None:
    p, a = grid(width, [1e-45, 1e-5, 0.3, 7.0, 1e19])
    agree = np.sign(p) == np.sign(a)
    assert agree.any()
    for w in (0.0, 0.5, 3.0):
        assert (fuse(p, a, w)[agree] == (p + width(w) * a)[agree]).all()


@given(any_number, st.floats(0, 100, width=32))
def test_without_a_primary_the_auxiliary_times_its_weight_is_left(a: float, w: float) -> None:
    for zero in (0.0, -0.0):
        assert fuse(zero, a, w) == w * a


@given(any_number, weights)
def test_without_an_auxiliary_or_with_weight_0_the_primary_is_left(p: float, w: float) -> None:
    assert fuse(p, 0.0, w) == fuse(p, -0.0, w) == p
    assert fuse(p, -p, 0.0) == fuse(p, 7.0, 0.0) == p


@widths
@pytest.mark.parametrize("p", [1e-45, 1e-30, 1.0, -1.0, 2e38])
def test_attenuation_is_monotone_in_the_conflict(width: type, p: float) -> None:
    against = -np.sign(p) * np.geomspace(1e-44, 3e38, 4000)
    magnitudes = abs(fuse(width(p), against.astype(width)))
    assert (np.diff(magnitudes) <= 0).all()
    assert (magnitudes <= abs(width(p))).all()
    assert magnitudes[-1] < abs(width(p)) or p == width(1e-45)
    assert (magnitudes > 0).all()


@given(
    any_number, any_number, st.floats(0, 2.0**10, width=32), st.sampled_from([2.0**-40, 0.5, 2.0, 2.0**40])
)
def test_scaling_both_by_a_power_of_two_scales_the_result_exactly(
    p: float, a: float, w: float, s: float
) -> None:
    assert fuse(s * p, s * a, w) == s * fuse(p, a, w)


@given(moderate, moderate, st.floats(1e-3, 1e3))
def test_scaling_both_scales_the_result(p: float, a: float, s: float) -> None:
    for other in (a, -a):
        assert fuse(s * p, s * other) == pytest.approx(s * fuse(p, other), rel=1e-13)


@given(moderate, st.booleans(), st.floats(2.0**-10, 2.0**10, width=32))
def test_the_slope_in_the_auxiliary_is_the_weight_on_both_sides_of_0(
    p: float, negative: bool, w: float
) -> None:
    p = -p if negative else p
    h = abs(p) / w * 2.0**-24
    for side in (h, -h):
        assert (fuse(p, side, w) - p) / side == pytest.approx(w, rel=1e-6)


@pytest.mark.parametrize("p", [2.0, -2.0])
@pytest.mark.parametrize("w", [0.25, 1.0, 3.0])
def test_autograd_finds_the_slope_continuous_at_0(p: float, w: float) -> None:
    a = torch.tensor([-1e-9, -0.0, 0.0, 1e-9], dtype=torch.float64, requires_grad=True)
    fuse(torch.full((4,), p, dtype=torch.float64), a, w).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == pytest.approx([w] * 4, rel=1e-7)


@pytest.mark.parametrize("p", [2.0, -0.5])
def test_autograd_finds_the_formulas_derivative_in_a_conflict(p: float) -> None:
    a = torch.linspace(0.1, 5, 50, dtype=torch.float64) * -np.sign(p)
    a.requires_grad_()
    fuse(torch.tensor(p, dtype=torch.float64), a, 1.5).sum().backward()
    assert a.grad is not None
    wanted = 1.5 * p**2 / (abs(p) + 1.5 * a.detach().abs()) ** 2
    assert torch.allclose(a.grad, wanted, rtol=1e-12, atol=0)


def test_gradients_are_finite_where_a_value_is_0() -> None:
    p = torch.tensor([0.0, 0.0, 1.0, 0.0], requires_grad=True)
    a = torch.tensor([0.0, 1.0, 0.0, -1.0], requires_grad=True)
    fuse(p, a, 2.0).sum().backward()
    assert p.grad is not None
    assert a.grad is not None
    assert p.grad.tolist() == [1, 1, 1, 1]
    assert a.grad.tolist() == [2, 2, 2, 2]


@widths
@pytest.mark.parametrize("w", [0.0, 0.1, 1.0, 3.0])
def test_numpy_and_torch_give_the_same_bits(width: type, w: float) -> None:
    random = np.random.default_rng(1)
    line, other = random.standard_normal((2, 5000)).astype(width)
    p, a = (np.concatenate(parts) for parts in zip(wide_grid(width), (line, other), strict=True))
    fused = fuse(torch.from_numpy(p), torch.from_numpy(a), w)
    assert fused.numpy().tobytes() == fuse(p, a, w).tobytes()


@given(any_number, any_number, weights)
def test_floats_give_the_bits_of_arrays(p: float, a: float, w: float) -> None:
    found = fuse(p, a, w)
    assert type(found) is float
    assert np.float64(found).tobytes() == fuse(np.array([p]), np.array([a]), w).tobytes()


def test_shapes_broadcast_and_dtypes_join() -> None:
    p, a = np.ones((3, 1), np.float32), -np.ones(4, np.float32)
    assert fuse(p, a).tolist() == fuse(torch.tensor(p), torch.tensor(a)).tolist() == [[0.5] * 4] * 3
    assert fuse(p, -1.0).dtype == fuse(p, np.float32(-1)).dtype == np.float32
    assert fuse(p, a.astype(np.float64)).dtype == np.float64
    assert (
        fuse(np.array([1, 2]), np.array([-1, 2])).tolist()
        == fuse(torch.tensor([1, 2]), torch.tensor([-1, 2])).tolist()
    )
    assert fuse(torch.tensor(p), -1.0).dtype == fuse(2.0, torch.tensor(a)).dtype == torch.float32
    assert fuse(torch.tensor([1, 2]), -1).dtype == torch.float32
    assert isinstance(fuse(np.float32(1), np.float32(-1)), np.float32)
    assert fuse(np.ones((0, 3)), np.ones(3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_dtype_and_sign(dtype: torch.dtype) -> None:
    p = torch.tensor([1e-4, -1e-4, 1.0], dtype=dtype)
    fused = fuse(p, torch.tensor([-6e4, 6e4, -1.0], dtype=dtype))
    assert fused.dtype == dtype
    assert fused.sign().tolist() == [1, -1, 1]
    assert fused[2] == 0.5


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_what_is_not_finite_follows_the_docstring(make: Any) -> None:
    inf, nan, least = math.inf, math.nan, 5e-324
    p = [nan, 1.0, inf, -inf, 1.0, -1.0, inf, 0.0, 1.0]
    a = [1.0, nan, -1.0, 1.0, -inf, inf, -inf, -inf, inf]
    wanted = [nan, nan, inf, -inf, least, -least, nan, -inf, inf]
    double = {"dtype": np.float64 if make is np.array else torch.float64}
    np.testing.assert_array_equal(np.asarray(fuse(make(p, **double), make(a, **double))), wanted)
    assert np.isnan(np.asarray(fuse(make([1.0]), make([inf]), 0.0))).all()


@pytest.mark.parametrize("w", [-1.0, -1e-300, math.inf, math.nan])
def test_a_weight_that_is_negative_or_not_finite_is_refused(w: float) -> None:
    for value in (1.0, np.ones(2), torch.ones(2)):
        with pytest.raises(UsageError, match=f"weight is {w}; it must be a finite number, 0 or more"):
            fuse(value, value, w)


def test_a_weight_beyond_the_dtype_is_refused() -> None:
    assert fuse(np.zeros(1), np.ones(1), 1e300) == [1e300]
    for value in (np.ones(2, np.float32), torch.ones(2)):
        with pytest.raises(
            UsageError, match=r"weight is 1e\+300; it must be 3.4\d*e\+38 or less for .*float32"
        ):
            fuse(value, value, 1e300)


def test_numpy_and_torch_do_not_mix() -> None:
    for pair in ((np.ones(2), torch.ones(2)), (torch.ones(2), np.ones(2))):
        with pytest.raises(UsageError, match=r"a torch\.Tensor and a ndarray do not mix"):
            fuse(*pair)


def test_inputs_are_left_as_they_were() -> None:
    p, a = np.array([1.0, -1.0]), np.array([-1.0, 1.0])
    fuse(p, a)
    group_normalised(p)
    assert p.tolist() == [1, -1]
    assert a.tolist() == [-1, 1]


rewards = st.lists(any_number, min_size=1, max_size=12)


@given(rewards)
def test_a_group_has_mean_0_and_spread_1_or_is_all_zeros(group: list[float]) -> None:
    for found in (
        group_normalised(np.array(group)),
        group_normalised(torch.tensor(group, dtype=torch.float64)),
    ):
        found = np.asarray(found)
        if min(group) == max(group):
            assert (found == 0).all()
        else:
            assert found.mean() == pytest.approx(0, abs=1e-9)
            assert found.std() == pytest.approx(1)
            assert (found[np.argsort(group)] == np.sort(found)).all()


def test_groups_are_normalised_along_the_axis() -> None:
    r = np.array([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    wanted = (r - r.mean(1, keepdims=True)) / r.std(1, keepdims=True)
    assert group_normalised(r) == pytest.approx(wanted)
    assert group_normalised(r.T, axis=0) == pytest.approx(wanted.T)
    assert group_normalised(torch.tensor(r)).numpy() == pytest.approx(wanted)
    assert group_normalised(torch.tensor(r.T), axis=0).numpy() == pytest.approx(wanted.T)
    assert group_normalised([1, 0]).tolist() == group_normalised(torch.tensor([1, 0])).tolist() == [1, -1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e38, 1e-45])
@pytest.mark.parametrize("size", [0, 1, 3, 7])
def test_a_group_without_spread_is_exactly_0(dtype: str, value: float, size: int) -> None:
    r = np.full((2, size), value, dtype)
    for found in (group_normalised(r), group_normalised(torch.tensor(r)).numpy()):
        assert found.shape == r.shape
        assert found.dtype == r.dtype
        assert (found == 0).all()


@pytest.mark.parametrize("group", [[-3e38, 3e38], [3e38, 2e38], [0.0, 1e-44], [1.0, 1.0000001], [0.0, 1e-30]])
def test_a_group_of_two_at_any_magnitude_is_plus_and_minus_1(group: list[float]) -> None:
    r = np.array(group, np.float32)
    for found in (group_normalised(r), group_normalised(torch.tensor(r)).numpy()):
        assert found * np.sign(group[1] - group[0]) == pytest.approx([-1, 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_makes_its_group_nan_and_no_other(bad: float) -> None:
    r = np.array([[1.0, bad, 2.0], [1.0, 0.0, 1.0]])
    for found in (group_normalised(r), group_normalised(torch.tensor(r)).numpy()):
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1]).all()


def test_importing_the_module_and_fusing_floats_load_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; from ramstream.priority import fuse; assert fuse(1.0, -1.0) == 0.5\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
