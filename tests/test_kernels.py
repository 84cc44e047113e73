"""The kernels against the oracle, bit for bit: numba and torch, every dtype, every policy, any cut into strips."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramstream.kernels import host
from ramstream.kernels.program import trace
from ramstream.kernels.torch import TorchMerger
from ramstream.methods.ram import Ram
from ramstream.methods.ram_plus import RamPlus
from ramstream.tallies import tally_dtype
from ramstream.types import STRIP, Dtype, Kind

DTYPES = list(ref.FORMATS)
POLICIES = ["error", "base", "keep"]
SIZES = [0, 1, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 12353]
STRIDE = 4096
quick = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=300,
)


@dataclass(frozen=True)
class Case:
    """Everything that decides a test's inputs; `agents` are dtype names, DELTA or ABSENT."""

    base: str
    agents: tuple[str, ...]
    out: str
    n: int = 65
    seed: int = 0
    epsilon: float = 1e-5
    policy: str = "error"
    compare: str | None = None
    danger: float = 0.0
    """The share of elements that are special values or any bits at all."""
    copying: float = 0.3
    """The share of elements an agent has from the base unchanged."""

    @property
    def total(self) -> int:
        return len(self.agents)

    @property
    def rule(self) -> tuple[float, str, str | None]:
        return self.epsilon, self.policy, self.compare

    @property
    def kernel_rule(self) -> tuple[float, str, Dtype | None]:
        return self.epsilon, self.policy, None if self.compare is None else Dtype[self.compare]

    @property
    def coefficients(self) -> np.ndarray:
        return np.random.default_rng(self.seed + 1).choice([1.0, 1.2, 1.1, 1.02, 1.1447, 3e38], self.total)


Counted = tuple[np.void, np.ndarray]
Form = Callable[[Case], tuple[Callable, Callable]]
"""Makes the strip and take of a merger."""


@dataclass(frozen=True)
class Inputs:
    base: ref.Source
    agents: list[ref.Source | None]
    coefficients: np.ndarray

    @property
    def wide(self) -> bool:
        return ref.is_wide(self.base, self.agents)

    @property
    def storage(self) -> Dtype:
        return Dtype[self.base.dtype]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = st.sampled_from([*DTYPES, *DTYPES, ref.DELTA, "ABSENT"])
    base = draw(st.sampled_from(DTYPES))
    agents = draw(st.lists(st.one_of(st.just(base), kinds), min_size=1, max_size=9))
    return Case(
        base=base,
        agents=tuple(agents),
        out=draw(st.one_of(st.just(base), st.sampled_from(DTYPES))),
        n=draw(st.sampled_from(SIZES)),
        seed=draw(st.integers(0, 1 << 20)),
        epsilon=draw(st.sampled_from([1e-5, 0.0, 2.0**-17, 1e-3, 1e-7, 1e300])),
        policy=draw(st.sampled_from(POLICIES)),
        compare=draw(st.one_of(st.none(), st.sampled_from(DTYPES))),
        danger=draw(st.sampled_from([0.0, 0.0005, 0.02, 0.5])),
        copying=draw(st.sampled_from([0.3, 0.0, 0.9, 1.0])),
    )


# Inputs


def build(case: Case) -> Inputs:
    rng = np.random.default_rng(case.seed)
    base = ref.Source(case.base, placed(rng, base_bits(rng, case)))
    return Inputs(base, [agent_source(rng, case, base, kind) for kind in case.agents], case.coefficients)


def base_bits(rng: np.random.Generator, case: Case) -> np.ndarray:
    scale = 2.0 ** rng.integers(-12, 3)
    values = np.where(rng.random(case.n) < 0.05, -0.0, rng.normal(size=case.n) * scale)
    return mixed(rng, case, [ref.narrow(values, case.base)], case.base)


def agent_source(rng: np.random.Generator, case: Case, base: ref.Source, kind: str) -> ref.Source | None:
    if kind == "ABSENT":
        return None
    shown = "F32" if kind == ref.DELTA else kind
    bits = mixed(rng, case, delta_bits(rng, base) if kind == ref.DELTA else near_bits(rng, base, kind), shown)
    same = rng.random(case.n) < case.copying * rng.integers(0, 2)
    if rng.random() < 0.3:
        same[slice(*sorted(rng.integers(0, case.n + 1, 2)))] = True
    bits = np.where(same, unchanged_bits(base, kind), bits)
    valid = rng.integers(0, case.n + 1) if rng.random() < 0.25 else case.n
    return ref.Source(kind, placed(rng, bits[:valid]))


def near_bits(rng: np.random.Generator, base: ref.Source, dtype: str) -> list[np.ndarray]:
    """A few steps of the dtype away, and small changes of any size."""
    with np.errstate(all="ignore"):
        values = ref.widen(base.bits, base.dtype, "F64")
        step = ref.spacing(values, str(rng.choice([dtype, base.dtype])))
        steps = values + rng.integers(-40, 41, len(base)) * step / 8
        moved = values + rng.normal(size=len(base)) * 10.0 ** rng.integers(-7, 0)
        return [ref.narrow(steps, dtype), ref.narrow(moved, dtype)]


def delta_bits(rng: np.random.Generator, base: ref.Source) -> list[np.ndarray]:
    small = rng.normal(size=len(base)) * 10.0 ** rng.integers(-7, 0)
    return [ref.narrow(small, "F32"), ref.narrow(small / 1e38, "F32")]


def unchanged_bits(base: ref.Source, kind: str) -> np.ndarray:
    """The base's values in another dtype: with their NaN payloads where it is wide enough."""
    if kind == ref.DELTA:
        return np.zeros(len(base), np.uint32)
    if kind == base.dtype:
        return base.bits
    if kind == "F64" or (kind == "F32" and base.dtype != "F64"):
        return ref.widen(base.bits, base.dtype, kind).view(ref.FORMATS[kind].raw)
    return ref.narrow(ref.widen(base.bits, base.dtype, "F64"), kind)


def mixed(rng: np.random.Generator, case: Case, ordinary: list[np.ndarray], dtype: str) -> np.ndarray:
    form, n = ref.FORMATS[dtype], case.n
    anything = rng.integers(0, 1 << form.bits, n, np.uint64).astype(form.raw)
    choices = [*ordinary, anything, rng.choice(specials(dtype), n)]
    safe = [(1 - case.danger) / len(ordinary)] * len(ordinary)
    return np.array(choices)[
        rng.choice(len(choices), n, p=[*safe, case.danger / 2, case.danger / 2]), range(n)
    ]


def specials(dtype: str) -> np.ndarray:
    """0, subnormals, the smallest normal, the largest, infinity and several NaNs, of both signs."""
    form = ref.FORMATS[dtype]
    smallest, after = 1 << form.mantissa, 1 << form.bits - 1
    codes = [0, 1, smallest - 1, smallest, form.largest, form.largest + 1, form.nan, after - 1]
    codes += [form.largest + 2] if form.infinities else []
    return np.array(codes + [after | code for code in codes], form.raw)


def placed(rng: np.random.Generator, bits: np.ndarray) -> np.ndarray:
    """The same bits at an address that is a multiple of the item only."""
    room = np.zeros(len(bits) + 16, bits.dtype)
    start = int(rng.integers(0, 16))
    room[start : start + len(bits)] = bits
    return room[start : start + len(bits)]


# Running the kernels


def handed_over(inputs: Inputs, begin: int, end: int) -> host.Sources:
    """What the kernels get for elements begin..end."""
    sources = host.Sources(len(inputs.agents))
    for index, source in enumerate([inputs.base, *inputs.agents]):
        if source is None:
            sources.set(index, int(Kind.ABSENT), 0, 0)
            continue
        code = Kind.DELTA if source.dtype == ref.DELTA else Dtype[source.dtype]
        valid = min(max(len(source) - begin, 0), end - begin)
        address = source.bits.ctypes.data + begin * source.bits.itemsize
        sources.set(index, int(code), address if valid else 0, valid)
    return sources


def whole(case: Case) -> list[tuple[int, int]]:
    return [(0, case.n)]


def count_with_numba(case: Case, inputs: Inputs, strips: Sequence[tuple[int, int]] | None = None) -> Counted:
    return count_piece(host.Counter(case.total, *case.kernel_rule), inputs, strips or whole(case))


def count_piece(
    counter: host.Counter, inputs: Inputs, strips: Sequence[tuple[int, int]], steps=True
) -> Counted:
    """The tallies, and the planes as uint64 (T, words)."""
    counter.begin(inputs.storage, inputs.wide, steps)
    planes = []
    for begin, end in strips:
        words = -(-(end - begin) // 64)
        bits = np.full((len(inputs.agents), words + 3), 0xDEADBEEF, np.uint64)
        counter.strip(handed_over(inputs, begin, end), end - begin, bits)
        planes.append(bits[:, :words])
    return counter.finish(), np.concatenate(planes, axis=1)


def numba_form(case: Case) -> tuple[Callable, Callable]:
    merger = host.Merger(trace(Ram(), case.total), *case.kernel_rule)
    return merger.strip, merger.take


def torch_form(case: Case) -> tuple[Callable, Callable]:
    merger = TorchMerger(trace(Ram(), case.total), *case.kernel_rule, device="cpu")
    return merger.strip, merger.take


def ram_numbers(lambdas: np.ndarray) -> np.ndarray:
    """The numbers of RAM's program with these λ."""
    total = len(lambdas)
    values = {**Ram().settings(["w"], total), "lambdas": np.asarray(lambdas)[None]}
    return trace(Ram(), total).numbers(values)[0]


FORMS = pytest.mark.parametrize("form", [numba_form, torch_form])


def merge(
    form: Form, case: Case, inputs: Inputs, strips: Sequence[tuple[int, int]] | None = None
) -> ref.Merged:
    strip, take = form(case)
    out_dtype = Dtype[case.out]
    out = np.full(case.n * out_dtype.itemsize, 0xA5, np.uint8)
    for begin, end in strips or whole(case):
        room = out[begin * out_dtype.itemsize : end * out_dtype.itemsize]
        numbers = ram_numbers(inputs.coefficients)
        strip(handed_over(inputs, begin, end), end - begin, numbers, inputs.wide, out_dtype, room)
    taken = take()
    return ref.Merged(out.view(ref.FORMATS[case.out].raw), taken.overflow, taken.moved)


# Comparing


def assert_counts_agree(case: Case, strips: Sequence[tuple[int, int]] | None = None) -> None:
    inputs = build(case)
    record, planes = count_with_numba(case, inputs, strips)
    expected, changed = ref.count(inputs.base, inputs.agents, *case.rule)
    assert record.dtype == tally_dtype(case.total)
    assert_same_tallies(record, expected)
    np.testing.assert_array_equal(planes, packed(changed))


def assert_same_tallies(record: object, expected: object) -> None:
    for name in tally_dtype(1).names:
        np.testing.assert_array_equal(
            floats_as_bits(record[name]), floats_as_bits(expected[name]), err_msg=name
        )


def floats_as_bits(array: np.ndarray) -> np.ndarray:
    """Bits, so that -0 is not 0; every NaN alike."""
    if array.dtype != np.float64:
        return array
    return np.where(np.isnan(array), np.nan, array).view(np.uint64)


def packed(changed: np.ndarray) -> np.ndarray:
    """Bit j of word w is element 64 w + j."""
    total, n = changed.shape
    padded = np.zeros((total, -(-n // 64) * 64), bool)
    padded[:, :n] = changed
    return np.packbits(padded, axis=1, bitorder="little").view("<u8")


def assert_merges_agree(form: Form, case: Case, strips: Sequence[tuple[int, int]] | None = None) -> None:
    inputs = build(case)
    got = merge(form, case, inputs, strips)
    expected = ref.merge_tensor(inputs.base, inputs.agents, inputs.coefficients, case.out, *case.rule)
    np.testing.assert_array_equal(got.bits, expected.bits)
    assert (got.overflow, got.moved) == (expected.overflow, expected.moved)


def cut(case: Case, at: Sequence[int]) -> list[tuple[int, int]]:
    """The strips of the piece, cut at these multiples of the stride."""
    edges = [0, *sorted({STRIDE * k for k in at if 0 < STRIDE * k < case.n}), case.n]
    return list(pairwise(edges))


SIXTY_FOUR = Case("BF16", ("BF16",) * 60 + ("F32", ref.DELTA, "ABSENT", "F16"), "BF16", n=1100, danger=0.02)
MANY_DTYPES = Case("BF16", ("BF16", "F32", "F16", ref.DELTA, "F8_E4M3", "F64"), "F32", n=130, danger=0.2)


# Any case


@quick
@given(cases())
def test_tallies_and_planes_are_the_oracles(case: Case) -> None:
    assert_counts_agree(case)


@FORMS
@quick
@given(case=cases())
def test_merge_is_the_oracles(form: Form, case: Case) -> None:
    assert_merges_agree(form, case)


@quick
@given(cases(), st.lists(st.integers(1, 4), max_size=3))
def test_cut_into_strips_counts_the_same(case: Case, at: list[int]) -> None:
    case = replace(case, n=case.n + STRIDE)
    assert_counts_agree(case, cut(case, at))


@FORMS
@settings(quick, max_examples=30)
@given(case=cases(), at=st.lists(st.integers(1, 4), max_size=3))
def test_cut_into_strips_merges_the_same(form: Form, case: Case, at: list[int]) -> None:
    case = replace(case, n=case.n + STRIDE)
    assert_merges_agree(form, case, cut(case, at))


# Chosen cases


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("epsilon", [0.0, 1e-5])
def test_sixty_four_agents_count(policy: str, epsilon: float) -> None:
    assert_counts_agree(replace(SIXTY_FOUR, policy=policy, epsilon=epsilon))


@FORMS
@pytest.mark.parametrize("policy", POLICIES)
def test_sixty_four_agents_merge(form: Form, policy: str) -> None:
    assert_merges_agree(form, replace(SIXTY_FOUR, policy=policy))


@FORMS
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("base", DTYPES)
def test_every_base_and_output_dtype(form: Form, base: str, out: str) -> None:
    case = Case(base, (base, "F32", base), out, n=333, danger=0.3, policy="keep")
    assert_merges_agree(form, case)
    assert_merges_agree(form, replace(case, agents=("F64", base, "ABSENT"), danger=0.05))


@pytest.mark.parametrize("total", [*range(1, 11), 63, 64])
def test_any_number_of_agents(total: int) -> None:
    for base in ("F16", "F64"):
        case = Case(base, (base, "F32", base, "BF16") * 16, base, n=77, danger=0.01, copying=1 - 1 / total)
        case = replace(case, agents=case.agents[:total], policy="base")
        assert_counts_agree(case)
        assert_merges_agree(numba_form, case)
        assert_merges_agree(torch_form, case)


def test_a_counter_counts_one_piece_after_another() -> None:
    case = replace(MANY_DTYPES, agents=("F32", ref.DELTA, "F16"), danger=0.01)
    counter = host.Counter(case.total, *case.kernel_rule)
    several = [build(replace(case, base=base, seed=seed)) for seed, base in enumerate(["F32", "F64", "F16"])]
    records = [count_piece(counter, inputs, whole(case))[0] for inputs in several]
    for record, inputs in zip(records, several, strict=True):
        assert_same_tallies(record, ref.count(inputs.base, inputs.agents, *case.rule)[0])


def test_steps_are_counted_only_when_asked() -> None:
    inputs = build(MANY_DTYPES)
    counter = host.Counter(MANY_DTYPES.total, *MANY_DTYPES.kernel_rule)
    record, _ = count_piece(counter, inputs, whole(MANY_DTYPES), steps=False)
    assert_same_tallies(record, ref.count(inputs.base, inputs.agents, *MANY_DTYPES.rule, steps=False)[0])
    assert not record["steps"].any()


@pytest.mark.parametrize("base", DTYPES)
def test_every_base_dtype_counts(base: str) -> None:
    for compare in (None, *DTYPES):
        assert_counts_agree(Case(base, ("BF16", base, ref.DELTA), base, n=333, danger=0.3, compare=compare))
        assert_counts_agree(
            Case(base, ("F64", base), base, n=333, danger=0.3, compare=compare, policy="keep")
        )


def test_a_full_strip_and_more() -> None:
    case = Case("BF16", ("BF16", "F16"), "BF16", n=STRIP + STRIDE + 1, danger=0.01, policy="keep")
    strips = [(0, STRIP), (STRIP, case.n)]
    assert_counts_agree(case, strips)
    assert_merges_agree(numba_form, case, strips)
    assert_merges_agree(torch_form, case, strips)


MINUS_ZERO = Case("BF16", ("BF16", "F32"), "BF16", n=100, epsilon=-0.0)


def test_epsilon_minus_zero_counts_as_zero() -> None:
    assert_counts_agree(MINUS_ZERO)


@FORMS
def test_epsilon_minus_zero_merges_as_zero(form: Form) -> None:
    assert_merges_agree(form, MINUS_ZERO)


@FORMS
def test_nothing_changed_copies_every_bit(form: Form) -> None:
    case = Case("BF16", ("BF16", "F32"), "BF16", n=1 << 16)
    every = ref.Source("BF16", np.arange(1 << 16).astype(np.uint16))
    same = ref.Source("F32", ref.widen(every.bits, "BF16", "F32").view(np.uint32))
    got = merge(form, case, Inputs(every, [every, same], np.full(2, 1.2)))
    np.testing.assert_array_equal(got.bits, every.bits)
    assert (got.overflow, got.moved) == (0, 0)


@FORMS
def test_take_starts_again_from_zero(form: Form) -> None:
    strip, take = form(Case("F32", ("ABSENT",), "F8_E4M3"))
    assert take() == (0, 0, 0.0)
    inputs = Inputs(float32((1e9,)), [None], np.ones(1))
    strip(
        handed_over(inputs, 0, 1),
        1,
        ram_numbers(inputs.coefficients),
        False,
        Dtype.F8_E4M3,
        np.zeros(1, np.uint8),
    )
    assert [tuple(take())[:2] for _ in range(2)] == [(1, 0), (0, 0)]


@FORMS
def test_worked_example(form: Form) -> None:
    agents = [float32(a) for a in ((1, 2, 0, 3, 0), (3, 0, 0, 1, 0), (0, 0, 5, 2, 0))]
    case = Case("F32", ("F32",) * 3, "F32", n=5)
    inputs = Inputs(float32((0,) * 5), agents, np.ones(3))
    record, planes = count_with_numba(case, inputs)
    coefficients = RamPlus().coefficients(record["overlap"][None])
    assert coefficients.tolist() == [[1.2, 1.2, 1.1]]
    assert planes.tolist() == [[0b01011], [0b01001], [0b01100]]
    assert merge(form, case, inputs).bits.view(np.float32).tolist() == [2, 2, 5, 2, 0]
    plus = merge(form, case, replace(inputs, coefficients=coefficients[0]))
    assert plus.bits.tolist() == [0x40000000, 0x4019999A, 0x40B00000, 0x40000000, 0]
    assert plus.moved == 2


def float32(values: Sequence[float]) -> ref.Source:
    return ref.Source("F32", ref.narrow(np.array(values, np.float64), "F32"))


# A whole model


@settings(quick, max_examples=25)
@given(
    st.lists(cases(), min_size=1, max_size=4),
    st.sampled_from(["unique", "changed"]),
    st.sampled_from(["model", "tensor"]),
)
def test_ram_plus_of_a_model_is_the_oracles(several: list[Case], ratio: str, scope: str) -> None:
    first = several[0]
    parts = {str(i): replace(first, base=c.base, n=c.n, seed=c.seed) for i, c in enumerate(several)}
    built = {name: build(case) for name, case in parts.items()}
    records = [count_with_numba(case, built[name])[0] for name, case in parts.items()]
    overlap = np.array([record["overlap"] for record in records])
    lambdas = RamPlus(ratio=ratio, scope=scope).coefficients(overlap)
    expected = oracle_merge(first, built, ratio=ratio, scope=scope)
    np.testing.assert_array_equal(lambdas, expected.lambdas)
    rows = dict(zip(parts, lambdas, strict=True))
    merged = [merge(numba_form, c, replace(built[k], coefficients=rows[k])) for k, c in parts.items()]
    for got, wanted in zip(merged, expected.bits.values(), strict=True):
        np.testing.assert_array_equal(got.bits, wanted)
    assert sum(got.overflow for got in merged) == expected.overflow
    assert sum(got.moved for got in merged) == expected.moved


def oracle_merge(case: Case, built: dict[str, Inputs], **options: str) -> ref.MergedModel:
    epsilon, policy, compare = case.rule
    base = {name: inputs.base for name, inputs in built.items()}
    agents = [
        {name: source for name, inputs in built.items() if (source := inputs.agents[t]) is not None}
        for t in range(case.total)
    ]
    return ref.merge(base, agents, epsilon, on_nonfinite=policy, compare=compare, out=case.out, **options)


# Near the exact answer


@settings(quick, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 9),
    st.sampled_from(["F32", "BF16", "F16"]),
    st.integers(0, 1 << 20),
)
def test_merge_is_within_a_step_of_float64(base: str, total: int, out: str, seed: int) -> None:
    """Deltas under 1/64 of the base: every difference is exact, and no cancellation magnifies a rounding."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1, 1], 500) * rng.uniform(0.5, 16, 500)
    bits = ref.narrow(values, base)
    exact_base = ref.widen(bits, base, "F64")
    moved = exact_base * (1 + rng.uniform(-1 / 64, 1 / 64, (total, 500)) * (rng.random((total, 500)) < 0.5))
    agents = [ref.Source("F32", ref.narrow(row, "F32")) for row in moved]
    inputs = Inputs(ref.Source(base, bits), agents, 1 + rng.random(total) / 5)
    case = Case(base, ("F32",) * total, out, n=500, epsilon=2.0**-17)
    got = ref.widen(merge(numba_form, case, inputs).bits, out, "F64")
    exact = ref.merge_tensor_float64(inputs.base, inputs.agents, inputs.coefficients, case.epsilon)
    assert (np.abs(got - exact) <= ref.spacing(exact, out)).all()


# How the kernels are built


def test_flush_to_zero_is_off() -> None:
    assert host.flush_to_zero_is_off()


def signatures() -> dict[str, int]:
    """How many forms of each numba function of ours are compiled."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("ramstream.kernels")]
    functions = {
        f"{m.__name__}.{k}": v for m in ours for k, v in vars(m).items() if hasattr(v, "nopython_signatures")
    }
    return {name: len(function.nopython_signatures) for name, function in functions.items()}


def test_one_compiled_form_serves_any_number_of_agents() -> None:
    def run(total: int) -> dict[str, int]:
        for base in ("BF16", "F64"):
            case = Case(base, (base,) * total, base)
            count_with_numba(case, build(case))
            merge(numba_form, case, build(case))
        return signatures()

    first = run(1)
    assert sum(first.values()) > 0
    assert [run(total) for total in (2, 5, 8, 9, 64)] == [first] * 5


def check_a_few() -> None:
    """Run in a process of its own, with the kernels as plain Python."""
    few = replace(MANY_DTYPES, n=70)
    plain = Case("BF16", ("BF16", "BF16", "BF16"), "BF16", n=200)
    for case in (
        few,
        replace(few, base="F16", agents=("F16", "F32", "ABSENT"), out="F16", policy="keep"),
        replace(few, agents=("BF16",) * 9, out="F8_E4M3", compare="BF16"),
        plain,
        replace(plain, base="F8_E4M3", out="F8_E4M3"),
        replace(plain, base="F16", out="F16", compare="F8_E5M2"),
        replace(plain, base="F64", out="F64"),
    ):
        assert_counts_agree(case)
        assert_merges_agree(numba_form, case)


def test_kernels_as_plain_python_are_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import test_kernels; test_kernels.check_a_few()"],
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
