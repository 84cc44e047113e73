"""The oracle itself: the worked example of the specification, and facts known from elsewhere."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import reference as ref
import torch

BASE = (0, 0, 0, 0, 0)
AGENTS = ((1, 2, 0, 3, 0), (3, 0, 0, 1, 0), (0, 0, 5, 2, 0))
NARROW = ["BF16", "F16", "F8_E4M3", "F8_E5M2"]
TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def source(values: object, dtype: str) -> ref.Source:
    return ref.Source(dtype, ref.narrow(np.asarray(values, np.float64), dtype))


def example(dtype: str, **options: object) -> ref.MergedModel:
    return ref.merge({"w": source(BASE, dtype)}, [{"w": source(a, dtype)} for a in AGENTS], **options)


def values(merged: ref.MergedModel, dtype: str) -> list[float]:
    return ref.widen(merged.bits["w"], dtype, "F64").tolist()


def torch_values(bits: np.ndarray, dtype: str) -> np.ndarray:
    signed = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize == 2 else np.uint8))
    return signed.view(TORCH[dtype]).to(torch.float32).numpy()


# The worked example


def test_example_counts() -> None:
    view = ref.look(source(BASE, "F32"), [source(a, "F32") for a in AGENTS], 1e-5, "error", None)
    assert view.count.tolist() == [2, 1, 1, 3, 0]


def test_example_tallies() -> None:
    tallies, changed = ref.count(source(BASE, "F32"), [source(a, "F32") for a in AGENTS])
    assert tallies["overlap"].tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 1]]
    assert tallies["pairs"].tolist() == [[3, 2, 1], [2, 2, 1], [1, 1, 2]]
    assert not tallies["sign_conflicts"].any()
    assert tallies["patterns"].tolist() == [1, 1, 0, 1, 1, 0, 0, 1]
    assert tallies["l1"].tolist() == [6, 4, 7]
    assert tallies["l2"].tolist() == [14, 10, 29]
    assert tallies["dots"].tolist() == [[14, 6, 6], [6, 10, 2], [6, 2, 29]]
    assert changed.astype(int).tolist() == [[1, 1, 0, 1, 0], [1, 0, 0, 1, 0], [0, 0, 1, 1, 0]]


def test_example_lambdas() -> None:
    merged = example("F32")
    assert merged.lambdas.tolist() == [[1 + 0.1 * 2.0, 1 + 0.1 * 2.0, 1 + 0.1 * 1.0]]


def test_example_ratios() -> None:
    assert [ref.ratio_of(s, u) for s, u in [(2, 1), (1, 0), (1, 1), (0, 0)]] == [2, float("inf"), 1, 0]


@pytest.mark.parametrize("dtype", ref.FORMATS)
def test_example_ram(dtype: str) -> None:
    merged = example(dtype, r=0)
    assert values(merged, dtype) == [2, 2, 5, 2, 0]
    assert (merged.overflow, merged.moved) == (0, 0)


def test_example_ram_plus_in_float32() -> None:
    merged = example("F32")
    product = [np.float32(1.2) * np.float32(2), np.float32(1.1) * np.float32(5)]
    assert values(merged, "F32") == [2, product[0], product[1], 2, 0]
    assert merged.bits["w"].tolist() == [0x40000000, 0x4019999A, 0x40B00000, 0x40000000, 0]
    assert merged.moved == 2


@pytest.mark.parametrize("dtype", ref.FORMATS)
def test_example_ram_plus_is_the_nearest(dtype: str) -> None:
    wanted = [ref.narrow(np.array([v]), dtype)[0] for v in (2.0, 2.4, 5.5, 2.0, 0.0)]
    got = example(dtype).bits["w"].astype(np.int64)
    assert np.abs(got - wanted).max() <= (1 if dtype == "F64" else 0)


def test_example_bounded_ratio() -> None:
    got = example("F64", ratio="changed", r=1.0).lambdas
    assert got.tolist() == [[1 + 2 / 3, 2, 1.5]]


def test_scope_tensor_has_its_own_lambda() -> None:
    base = {"a": source([0, 0], "F32"), "b": source([0], "F32")}
    agents = [{"a": source([1, 1], "F32"), "b": source([1], "F32")}, {"a": source([1, 0], "F32")}]
    assert ref.merge(base, agents, r=0.5, scope="tensor").lambdas.tolist() == [[1.5, 2], [1, 1]]
    assert ref.merge(base, agents, r=0.5).lambdas.tolist() == [[1.25, 2]] * 2


# Widening and narrowing against what others do


@pytest.mark.parametrize("dtype", NARROW)
def test_widen_is_what_torch_reads(dtype: str) -> None:
    bits = np.arange(2 ** ref.FORMATS[dtype].bits).astype(ref.FORMATS[dtype].raw)
    np.testing.assert_array_equal(ref.widen(bits, dtype, "F32"), torch_values(bits, dtype))


def test_widen_float16_is_what_numpy_reads() -> None:
    bits = np.arange(1 << 16).astype(np.uint16)
    np.testing.assert_array_equal(ref.widen(bits, "F16", "F64"), bits.view(np.float16).astype(np.float64))


@pytest.mark.parametrize("width", ["F32", "F64"])
@pytest.mark.parametrize("dtype", NARROW)
def test_widen_is_injective_on_bits(dtype: str, width: str) -> None:
    bits = np.arange(2 ** ref.FORMATS[dtype].bits).astype(ref.FORMATS[dtype].raw)
    wide = ref.widen(bits, dtype, width).view(ref.FORMATS[width].raw)
    assert len(np.unique(wide)) == len(bits)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_undoes_widen(dtype: str) -> None:
    bits = np.arange(2 ** ref.FORMATS[dtype].bits).astype(ref.FORMATS[dtype].raw)
    wide = ref.widen(bits, dtype, "F32")
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(ref.narrow(wide, dtype)[number], bits[number])
    assert set(ref.narrow(wide, dtype)[~number]) == {ref.FORMATS[dtype].nan}


def some_floats() -> np.ndarray:
    """Random float32 patterns, and each midpoint of the narrow formats with its two neighbours."""
    random = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    near = [random]
    for dtype in NARROW:
        middle = ref.midpoints(dtype).astype(np.float32)
        near += [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    values = np.concatenate(near)
    values = values[np.isfinite(values)]
    return np.concatenate([values, -values])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_narrow_is_torchs_cast(dtype: str) -> None:
    values = some_floats()
    cast = torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ref.narrow(values, dtype), cast)


def test_narrow_to_float16_is_numpys_cast() -> None:
    values = some_floats()
    with np.errstate(all="ignore"):
        cast = values.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(ref.narrow(values, "F16"), cast)


def exactly_narrowed(value: float, dtype: str) -> int:
    """Brute force over every finite code with rational arithmetic."""
    form = ref.FORMATS[dtype]
    known = ref.widen(np.arange(form.largest + 1).astype(form.raw), dtype, "F64")
    return min(range(form.largest + 1), key=lambda k: (abs(Fraction(known[k]) - Fraction(value)), k % 2))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_narrow_to_float8_is_the_nearest_rational(dtype: str) -> None:
    middle = ref.midpoints(dtype)[:-1].astype(np.float32)
    values = np.concatenate(
        [middle, np.nextafter(middle, 0, dtype=np.float32), np.nextafter(middle, middle * 2)]
    )
    wanted = [exactly_narrowed(float(v), dtype) for v in values]
    assert ref.narrow(values, dtype).tolist() == wanted
    assert ref.narrow(-values, dtype).tolist() == [w | 0x80 for w in wanted]


def test_float64_goes_through_float32() -> None:
    value = np.array([1 + 2.0**-8 + 2.0**-40])  # just above a bf16 tie, and a tie once in float32
    assert ref.narrow(value, "BF16").tolist() == [0x3F80]


@pytest.mark.parametrize(
    ("dtype", "value", "bits", "lost"),
    [
        ("BF16", 3.3961775e38, 0x7F80, True),
        ("F16", 65519.0, 0x7BFF, False),
        ("F16", -65520.0, 0xFC00, True),
        ("F8_E5M2", 61439.0, 0x7B, False),
        ("F8_E5M2", 61440.0, 0x7C, True),
        ("F8_E4M3", 464.0, 0x7E, False),
        ("F8_E4M3", -464.001, 0xFE, True),
        ("F8_E4M3", 1e30, 0x7E, True),
        ("F8_E4M3", np.inf, 0x7F, True),
        ("F8_E5M2", np.inf, 0x7C, False),
        ("F32", 1e39, 0x7F800000, True),
    ],
)
def test_beyond_the_range(dtype: str, value: float, bits: int, lost: bool) -> None:
    values = np.array([value], np.float64 if dtype == "F32" else np.float32)
    assert ref.narrow(values, dtype).tolist() == [bits]
    assert ref.overflows(values, dtype).tolist() == [lost]


@pytest.mark.parametrize("dtype", ref.FORMATS)
def test_written_nan_is_positive_and_canonical(dtype: str) -> None:
    nans = np.array([0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    known = {"F64": 0x7FF8 << 48, "F32": 0x7FC00000, "BF16": 0x7FC0, "F16": 0x7E00}
    assert set(ref.narrow(nans, dtype).tolist()) == {known.get(dtype, 0x7F)}


# Rules that are easy to lose


def test_unchanged_keeps_the_bases_bits() -> None:
    bits = np.array([0x80000000, 0xFFC12345, 0x7F800001, 1], np.uint32)
    merged = ref.merge_tensor(ref.Source("F32", bits), [None, ref.Source("F32", bits)], [1, 1], "F32")
    assert merged.bits.tolist() == bits.tolist()


def test_nan_of_an_agent_is_refused_not_ignored() -> None:
    base, agent = source([1, 2, np.inf], "F32"), source([np.nan, 2, np.inf], "F32")
    tallies, changed = ref.count(base, [agent])
    assert tallies["nonfinite"].tolist() == [1, 2]
    assert tallies["refused"].tolist() == [0, 1]
    assert tallies["refused_first"].tolist() == [-1, 0]
    assert not changed.any()
    assert ref.count(base, [agent], on_nonfinite="keep")[1].tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    ("storage", "value", "wanted"),
    [
        ("BF16", 1.0, 2.0**-7),
        ("BF16", 0.0, 2.0**-133),
        ("F16", 1.5e-5, 2.0**-24),
        ("F32", 3.0, 2.0**-22),
        ("F8_E4M3", -300.0, 32.0),
        ("F8_E5M2", 0.0, 2.0**-16),
        ("F64", 5e-324, 5e-324),
    ],
)
def test_spacing(storage: str, value: float, wanted: float) -> None:
    assert ref.spacing(np.array([value]), storage).tolist() == [wanted]


def test_steps_go_into_unique_and_shared() -> None:
    base, up = source([1, 1, 1], "BF16"), 2.0**-7
    one, two = source([1 + up, 1 + 3 * up, 9], "BF16"), source([1, 1 - up, 1], "BF16")
    steps = ref.count(base, [one, two])[0]["steps"]
    filled = {tuple(at): steps[tuple(at)] for at in np.argwhere(steps).tolist()}
    assert filled == {(0, 0, 0): 1, (0, 1, 2): 1, (0, 0, 32): 1, (1, 1, 0): 1}


def test_float64_mode_keeps_more() -> None:
    base, agents = source([1], "F32"), [source([1 + 2.0**-10], "F32"), source([1 + 2.0**-23], "F32")]
    exact = ref.merge_tensor_float64(base, agents, [1, 1], epsilon=0)
    assert exact.tolist() == [1 + (2.0**-10 + 2.0**-23) / 2]
