"""The contract of every method, known or new, and the formulas of the known ones."""

import importlib
import inspect
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import reference
import reference_methods as ref
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from programs import FORMS, by_core, by_numpy, mark_of, odd_rows, rows_of, same, some_numbers
from reference import View, look, narrow
from runs import Model, family, plan_of, read_weights, run, sources, write_family

import ramstream.methods
from ramstream import Limits
from ramstream.errors import PlanError, UsageError
from ramstream.kernels.program import trace
from ramstream.methods import Method, PerAgent, PerTensor, available, create
from ramstream.methods.dare_linear import DareLinear
from ramstream.methods.linear import Linear
from ramstream.methods.ram_plus import RamPlus
from ramstream.methods.ram_unique import RamUnique
from ramstream.methods.ties import Ties
from ramstream.settings import Setting

METHODS = available()
every_method = pytest.mark.parametrize("cls", METHODS.values(), ids=METHODS)


def accepts(method: Method, agents: int) -> bool:
    try:
        method.check_agents(agents)
    except UsageError:
        return False
    return True


def hints(cls: type[Method]) -> dict[str, Any]:
    """The types of the parameters by name."""
    found = typing.get_type_hints(cls, include_extras=True)
    return {field.name: found[field.name] for field in fields(cls)}


def variants(cls: type[Method]) -> list[Method]:
    """A method with its defaults, and with each of its yes and no the other way."""
    flags = [name for name, hint in hints(cls).items() if hint is bool]
    return [cls(), *(cls(**{name: not getattr(cls(), name)}) for name in flags)]  # type: ignore[call-arg]


# Files, parameters, errors


@every_method
def test_a_method_is_one_documented_file_named_like_its_command_line_name(cls: type[Method]) -> None:
    file = Path(inspect.getfile(cls))
    assert file.stem.replace("_", "-") == cls.name()
    assert cls.__doc__
    assert "arXiv" in (inspect.getmodule(cls).__doc__ or "")  # type: ignore[union-attr]


@every_method
def test_parameters_are_made_from_the_words_of_the_command_line(cls: type[Method]) -> None:
    for method in variants(cls):
        words = {name: str(value) for name, value in method.parameters().items()}
        assert create(cls.name(), words) == method


@every_method
def test_a_parameter_that_may_differ_takes_a_setting_and_gives_its_text_again(cls: type[Method]) -> None:
    for name, hint in hints(cls).items():
        mark = mark_of(hint)
        if mark is not None:
            text = "self_attn@0.5:1.0;0.25" + (",0.75" if isinstance(mark, PerAgent) else "")
            method = create(cls.name(), {name: text})
            assert method.parameters()[name] == text
            assert cls(**method.parameters()) == method


@every_method
def test_what_is_no_value_of_a_parameter_is_refused_by_its_name(cls: type[Method]) -> None:
    for name, hint in hints(cls).items():
        wrong = ["nan", "inf", "-inf", "x", "", "one"]
        mark = mark_of(hint)
        if mark is not None:
            wrong += [str(limit) for limit in (mark.least - 1, mark.most + 1)] + ["1,", "@1", "1:x"]
        if isinstance(mark, PerTensor):
            wrong.append("1,2")
        if hint is int:
            wrong += ["-1", "1.5"]
        for value in wrong:
            with pytest.raises(UsageError, match=f"{cls.name()}: {name} is "):
                create(cls.name(), {name: value})


@every_method
def test_an_unknown_parameter_is_refused_with_the_nearest_known_one(cls: type[Method]) -> None:
    with pytest.raises(UsageError, match=r"'epsilom'; did you mean epsilon\?.* has epsilon, scale"):
        create(cls.name(), {"epsilom": "1"})


def test_an_unknown_method_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match=r"no method 'tiez'; did you mean ties\? use one of .*ram, ram-plus"):
        create("tiez", {})


@pytest.mark.parametrize("text", ["dare_ties", "DARE-TIES", " dare_Ties "])
def test_a_methods_name_may_be_spelled_as_mergekit_does(text: str) -> None:
    assert create(text, {}) == create("dare-ties", {})


def test_an_alias_brings_defaults_that_can_be_overruled() -> None:
    assert create("ramplus_tl", {}) == RamPlus(scope="tensor", alpha=0.2)
    assert create("ramplus_tl", {"alpha": "3"}) == RamPlus(scope="tensor", alpha=3)


@every_method
def test_settings_have_a_row_for_each_tensor_and_a_value_for_each_that_merge_takes(cls: type[Method]) -> None:
    method, names = cls(), [f"layers.{k}.w" for k in range(4)]
    found = method.settings(names, 3)
    assert {"scale"} <= set(found) == set(method.numeric(3))
    for name, values in found.items():
        assert values.shape == (4, method.numeric(3)[name] or 1)
        assert (values == Setting.of(getattr(method, name)).resolve(name, names, values.shape[1])).all()


@every_method
def test_coefficients_have_a_row_for_each_tensor(cls: type[Method]) -> None:
    overlap = np.arange(4 * 3 * 3).reshape(4, 3, 3)
    for empty in (overlap, overlap[:0]):
        coefficients = cls().coefficients(empty)
        assert coefficients.shape == empty.shape[:2]
        assert coefficients.dtype == np.float64


@every_method
def test_what_a_class_declares_goes_with_its_parameters(cls: type[Method]) -> None:
    known = hints(cls)
    if cls.random:
        assert known["seed"] is int
    if cls.quantile:
        assert isinstance(mark_of(known[cls.quantile]), PerAgent)
        assert known["scope"] == Literal["tensor", "model"]
    program = trace(cls(), 3)
    assert bool(program.lambdas) == cls.rescales
    assert program.random == cls.random
    assert bool(cls.quantile) == any(name == "thresholds" for name, _ in program.columns)
    if cls.needs_counts:
        assert cls.coefficients is not Method.coefficients
    for alias, defaults in cls.aliases.items():
        assert alias not in METHODS
        assert isinstance(create(alias, {}), cls)
        assert set(defaults) <= set(known)


# What merging keeps to


@every_method
def test_many_agents_are_merged(cls: type[Method]) -> None:
    assert all(accepts(cls(), agents) for agents in (2, 3, 64))


@every_method
@pytest.mark.parametrize("form", FORMS)
def test_zero_deltas_give_the_bits_of_the_base(cls: type[Method], form: str) -> None:
    for method in variants(cls):
        if method.moves_unchanged:
            continue
        rows = odd_rows(3, np.float32, np.random.default_rng(3))
        rows[1:4] = 0
        numbers = trace(method, 3).numbers(some_numbers(method, 3, np.random.default_rng(4)))[0]
        merged = FORMS[form](trace(method, 3), rows, numbers.astype(np.float32))
        assert merged.tobytes() == rows[0].tobytes()


@every_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_three_forms_of_a_method_give_the_same_bits(cls: type[Method], dtype: Any) -> None:
    for agents in (1, 2, 5, 9):
        if accepts(cls(), agents):
            assert_forms_agree(cls(), agents, dtype)


@every_method
def test_the_three_forms_of_a_method_give_the_same_bits_with_each_flag_turned(cls: type[Method]) -> None:
    for method in variants(cls)[1:]:
        assert_forms_agree(method, 3, np.float32)


def test_the_three_forms_of_a_method_give_the_same_bits_with_64_agents() -> None:
    assert_forms_agree(create("dare-ties", {}), 64, np.float32)


def assert_forms_agree(method: Method, agents: int, dtype: Any) -> None:
    seed = np.random.default_rng(agents)
    program, rows = trace(method, agents), odd_rows(agents, dtype, seed)
    numbers = program.numbers(some_numbers(method, agents, seed))[0].astype(dtype)
    expected = by_numpy(program, rows, numbers)
    assert np.isfinite(expected).mean() > 0.2
    assert (expected != rows[0]).any()
    for form in FORMS.values():
        assert same(form(program, rows, numbers), expected)


@every_method
def test_an_element_is_merged_alike_wherever_it_lies_in_a_block(cls: type[Method]) -> None:
    seed = np.random.default_rng(5)
    program, rows = trace(cls(), 2), odd_rows(2, np.float32, seed)
    numbers = program.numbers(some_numbers(cls(), 2, seed))[0].astype(np.float32)
    whole, order = by_core(program, rows, numbers), seed.permutation(rows.shape[1])
    assert same(by_core(program, np.ascontiguousarray(rows[:, order]), numbers), whole[order])
    for n in (1, 3, 17):
        assert same(by_core(program, np.ascontiguousarray(rows[:, -n:]), numbers), whole[-n:])


# The known ones, against the oracle


def random_view(agents: int, seed: int) -> View:
    """Ordinary and odd elements in float32."""
    base, *rows = odd_rows(agents, np.float32, np.random.default_rng(seed), n=300)
    return view_of(base, np.array(rows[:agents]) + 0.0)  # a delta is never -0.0


def view_of(base: NDArray[Any], deltas: NDArray[Any]) -> View:
    nothing = np.zeros((len(deltas) + 1, len(base)), bool)
    return View(base, deltas, deltas != 0, nothing, nothing)


def merged(method: Method, view: View, draws: NDArray[Any] | None = None, **values: Any) -> NDArray[Any]:
    """The output of the method's program by numpy; values by name instead of the method's own."""
    agents = len(view.deltas)
    program = trace(method, agents)
    known = method.settings(["w"], agents)
    known |= {"lambdas": np.ones((1, agents)), "thresholds": np.zeros((1, agents))}
    known |= {name: np.atleast_2d(np.asarray(value, np.float64)) for name, value in values.items()}
    rows = rows_of(view.base, view.deltas, np.zeros_like(view.deltas) if draws is None else draws)
    with np.errstate(over="ignore"):
        numbers = program.numbers(known)[0].astype(view.base.dtype)
    return by_numpy(program, rows, numbers)


seeds, totals = st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 5])
scales = st.sampled_from([1.0, 0.3, -1.5, 0.0])
flags = st.booleans()


@given(seeds, totals, flags, scales)
def test_linear_is_the_oracles(seed: int, agents: int, normalize: bool, scale: float) -> None:
    view, weight = random_view(agents, seed), np.random.default_rng(seed).uniform(-0.2, 1, agents + 1)
    method = Linear(normalize=normalize, scale=scale)
    expected = ref.finished(view, ref.linear(view, weight, normalize), scale, moves_unchanged=not normalize)
    assert same(merged(method, view, weight=weight), expected)


@given(seeds, totals, flags, scales, flags)
def test_task_arithmetic_is_the_oracles(
    seed: int, agents: int, normalize: bool, scale: float, cancel: bool
) -> None:
    view, weight = random_view(agents, seed), np.random.default_rng(seed).uniform(-1, 1, agents)
    if cancel:
        weight[-1] = -weight[:-1].astype(np.float32).sum()
    method = create("task-arithmetic", {"normalize": str(normalize), "scale": str(scale)})
    expected = ref.finished(view, ref.task_arithmetic(view, weight, normalize), scale)
    assert same(merged(method, view, weight=weight), expected)


@given(seeds, totals, flags, scales)
def test_ties_is_the_oracles(seed: int, agents: int, normalize: bool, scale: float) -> None:
    view, weight = random_view(agents, seed), np.random.default_rng(seed).uniform(-0.5, 1, agents)
    density = np.random.default_rng(seed).uniform(0, 1, (1, agents))
    least = ref.thresholds([view.deltas], density)[0]
    method = create("ties", {"normalize": str(normalize), "scale": str(scale)})
    expected = ref.finished(view, ref.ties(view, weight, least, normalize), scale)
    assert same(merged(method, view, weight=weight, thresholds=least), expected)


@given(seeds, totals, flags, flags, scales, st.sampled_from(["dare-linear", "dare-ties"]))
def test_dare_is_the_oracles(
    seed: int, agents: int, normalize: bool, rescale: bool, scale: float, name: str
) -> None:
    view, random = random_view(agents, seed), np.random.default_rng(seed)
    weight, density = random.uniform(-0.5, 1, agents), random.choice([0.0, 0.1, 0.7, 1.0], agents)
    draws = random.integers(0, 2**24, view.deltas.shape) * 2.0**-24
    kept = draws.astype(np.float32) < density.astype(np.float32)[:, None]
    method = create(name, {"normalize": str(normalize), "rescale": str(rescale), "scale": str(scale)})
    expected = ref.finished(view, ref.METHODS[name](view, weight, density, kept, rescale, normalize), scale)
    assert same(merged(method, view, draws, weight=weight, density=density), expected)


@given(seeds, totals, scales)
def test_the_ram_family_is_the_oracles(seed: int, agents: int, scale: float) -> None:
    view, random = random_view(agents, seed), np.random.default_rng(seed)
    weight, lambdas = random.choice([0.0, 0.3, 1.0, 2.5], agents), random.uniform(1, 2, agents)
    for name, numbers in (
        ("ram", {"weight": weight}),
        ("ram-plus", {"weight": weight, "lambdas": lambdas}),
        ("ram-ties", {"weight": weight}),
    ):
        expected = ref.finished(view, ref.METHODS[name](view, **numbers), scale)
        assert same(merged(create(name, {"scale": str(scale)}), view, **numbers), expected)


@given(seeds, totals, st.floats(1e-3, 100), st.data())
def test_ram_unique_is_the_oracles(seed: int, agents: int, dilution: float, data: st.DataObject) -> None:
    view, agent = random_view(agents, seed), data.draw(st.integers(1, agents))
    expected = ref.finished(view, ref.ram_unique(view, agent, dilution))
    assert same(merged(RamUnique(agent=agent, dilution=dilution), view), expected)


@given(seeds, st.sampled_from([2, 3, 5]), st.sampled_from([0.0, 0.4, 1.0, 3.0]), st.data())
def test_papo_is_the_oracles(seed: int, agents: int, weight: float, data: st.DataObject) -> None:
    view, primary = random_view(agents, seed), data.draw(st.integers(1, agents))
    expected = ref.finished(view, ref.papo(view, primary, weight))
    method = create("papo", {"primary": str(primary), "weight": str(weight)})
    assert same(merged(method, view), expected)


@pytest.mark.parametrize("name", sorted(set(METHODS) & set(ref.METHODS)))
def test_float32_is_as_near_to_float64_as_the_sums_of_few_numbers_are(name: str) -> None:
    random = np.random.default_rng(8)
    deltas = (random.integers(-900, 900, (4, 500)) * (random.random((4, 500)) < 0.6) / 1024).astype(
        np.float32
    )
    view = view_of(random.standard_normal(500).astype(np.float32), deltas)
    method, draws = METHODS[name](), random.integers(0, 2**24, deltas.shape) * 2.0**-24
    values = some_numbers(method, 4, random)
    values |= {name: np.abs(weight) + 0.1 for name, weight in values.items()}
    narrow, wide = (merged(method, one, draws, **values) for one in (view, ref.in_float64(view)))
    assert wide.dtype == np.float64
    assert np.abs(narrow - wide).max() < 64 * 2.0**-24 * max(1, np.abs(wide).max())


# The known ones, in whole merges

EACH = {"weight": "1,0.5,0.25"}
WHOLE: list[tuple[str, dict[str, str]]] = [
    ("linear", {"weight": "0.25,1,0.5,0.75", "scale": "0.7"}),
    ("linear", {"weight": "0.25,1,0.5,0.75", "normalize": "false"}),
    ("task-arithmetic", {**EACH, "scale": "0.7"}),
    ("ties", {**EACH, "density": "0.2,0.3,0.05"}),
    ("ties", {**EACH, "density": "0.2,0.3,0.05", "scope": "model"}),
    ("dare-linear", {**EACH, "density": "0.2,0.5,1", "seed": "7"}),
    ("dare-ties", {**EACH, "density": "0.5", "seed": str(2**64 - 1), "normalize": "true"}),
    ("ram", {"weight": "layers.0@3;1,1,1"}),
    ("ram-plus", {"scope": "tensor"}),
    ("ram-ties", EACH),
    ("ram-unique", {"agent": "2", "dilution": "3"}),
    ("papo", {"primary": "2", "weight": "0.5"}),
]


@pytest.mark.parametrize(("name", "words"), WHOLE)
def test_a_whole_merge_is_the_oracles(name: str, words: dict[str, str], tmp_path: Path) -> None:
    base, agents = family({"layers.0.w": ("F32", (30, 20)), "layers.1.w": ("BF16", (41, 7))})
    method = create(name, words)
    views = views_of(base, agents, method.epsilon)
    outcome, _ = run(plan_of(write_family(tmp_path, base, agents), name, **words), tmp_path / "out")
    written = read_weights(outcome.out)
    for view, tensor, numbers in zip(views, base, numbers_of(method, views, list(base)), strict=True):
        scale = numbers.pop("scale")
        expected = ref.finished(view, ref.METHODS[name](view, **numbers), scale, method.moves_unchanged)
        assert (expected != view.base).mean() > 0.02
        assert written[tensor] == narrow(expected, base[tensor].dtype).tobytes()


def views_of(base: Model, agents: list[Model], epsilon: float) -> list[View]:
    """A view of each tensor."""
    own, *others = (sources(model) for model in (base, *agents))
    return [look(own[name], [agent[name] for agent in others], epsilon, "error", None) for name in own]


def numbers_of(method: Method, views: list[View], tensors: list[str]) -> list[dict[str, Any]]:
    """What the oracle takes, for each tensor."""
    agents = len(views[0].deltas)
    found = method.settings(tensors, agents)
    rows: list[dict[str, Any]] = [
        {name: values[i] if values.shape[1] > 1 else float(values[i, 0]) for name, values in found.items()}
        for i in range(len(tensors))
    ]
    if isinstance(method, Ties):
        least = ref.thresholds([view.deltas for view in views], found["density"], method.scope)
        rows = [without(row, "density") | {"thresholds": least[i]} for i, row in enumerate(rows)]
    if isinstance(method, DareLinear):
        for row, view, tensor in zip(rows, views, tensors, strict=True):
            key = xxhash.xxh3_64_intdigest(tensor.encode())
            draws = [ref.draws(method.seed, key, t, range(len(view.base))) for t in range(agents)]
            row |= {"kept": np.array(draws) < np.reshape(row["density"], (-1, 1))}
    if isinstance(method, RamPlus):
        overlaps = [overlap_of(view) for view in views]
        lambdas = reference.lambdas(overlaps, method.r, method.alpha, method.ratio, method.scope)
        rows = [without(row, "r", "alpha") | {"lambdas": lambdas[i]} for i, row in enumerate(rows)]
    own = {"normalize", "agent", "primary"} & set(method.parameters())
    return [row | {name: getattr(method, name) for name in own} for row in rows]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def overlap_of(view: View) -> NDArray[np.int64]:
    """(T, T): elements changed by an agent and by so many others."""
    others = range(len(view.changed))
    return np.array([[np.sum(row & (view.count == k + 1)) for k in others] for row in view.changed])


# The known ones, by hand

BASE = np.array([1, 1, 1, 1, 1], np.float32)
A = np.array([[4, 2, -2, 0, 1], [2, -1, -2, 0, 0], [0, -2, 1, 0, 0]], np.float32)
HALVES = np.array([[0.5, 0.25, 0.75, 0.5, 0.0], [0.25, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.75, 0.0, 0.0]])
BY_HAND: list[tuple[str, dict[str, str], dict[str, Any], list[float]]] = [
    ("linear", {}, {}, [1.5, -0.25, -0.75, 0, 0.25]),
    ("linear", {"weight": "0,1,1,0"}, {}, [3, 0.5, -2, 0, 0.5]),
    ("linear", {"weight": "1,1,1,0", "normalize": "false"}, {}, [8, 3, -2, 2, 3]),
    ("task-arithmetic", {}, {}, [6, -1, -3, 0, 1]),
    ("task-arithmetic", {"weight": "1,-1,0"}, {}, [2, 3, 0, 0, 1]),
    ("task-arithmetic", {"weight": "1,1,2", "normalize": "true"}, {}, [1.5, -0.75, -0.5, 0, 0.25]),
    ("task-arithmetic", {"weight": "1,-1,0", "normalize": "true"}, {}, [2, 3, 0, 0, 1]),
    ("task-arithmetic", {"scale": "0.5"}, {}, [3, -0.5, -1.5, 0, 0.5]),
    ("ties", {}, {}, [3, -1.5, -2, 0, 1]),
    ("ties", {"normalize": "false"}, {}, [6, -3, -4, 0, 1]),
    ("ties", {"weight": "1,1,0.5"}, {}, [3, 2, -2, 0, 1]),  # element 1 is even: the election is positive
    ("ties", {"weight": "1,-1,0"}, {}, [4, 3, -2, 0, 1]),  # element 1: weights that sum to 0 do not divide
    ("ties", {}, {"thresholds": [2, 2, 2]}, [3, 2, -2, 0, 0]),
    ("dare-linear", {"density": "0.5"}, {"draws": HALVES}, [4, 0, -4, 0, 2]),
    ("dare-linear", {"density": "0.5", "rescale": "false"}, {"draws": HALVES}, [2, 0, -2, 0, 1]),
    ("dare-ties", {"density": "0.5"}, {"draws": HALVES}, [4, 4, -4, 0, 2]),
    ("dare-ties", {"density": "1", "normalize": "true"}, {"draws": HALVES}, [3, -1.5, -2, 0, 1]),
    ("ram", {}, {}, [3, -1 / 3, -1, 0, 1]),
    ("ram", {"weight": "3,1,1"}, {}, [3.5, 0.6, -1.4, 0, 3]),
    ("ram-ties", {}, {}, [3, -1.5, -2, 0, 1]),
    ("ram-ties", {"weight": "3,1,1"}, {}, [3.5, 2, -2, 0, 3]),
    ("ram-unique", {}, {}, [0, 0, 0, 0, 1]),
    ("ram-unique", {"dilution": "4"}, {}, [0, 0, 0, 0, 0.25]),
    ("ram-unique", {"agent": "2"}, {}, [0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize(("name", "words", "values", "expected"), BY_HAND)
def test_what_methods_add_to_a_base_of_ones(
    name: str, words: dict[str, str], values: dict[str, Any], expected: list[float]
) -> None:
    np.testing.assert_allclose(merged(create(name, words), view_of(BASE, A), **values) - BASE, expected, 1e-6)


@pytest.mark.parametrize(("weight", "expected"), [(4e-9, 4e-9 * 3), (-4e-9, -4e-9 * 3), (4e-8, 3)])
def test_task_arithmetic_divides_by_no_sum_that_is_as_good_as_0(weight: float, expected: float) -> None:
    view = view_of(np.zeros(1, np.float32), np.array([[3]], np.float32))
    merged_delta = merged(create("task-arithmetic", {"weight": str(weight), "normalize": "true"}), view)
    np.testing.assert_allclose(merged_delta, [expected], 1e-6)


def test_dare_keeps_the_mean_of_what_it_drops_from() -> None:
    draws = np.arange(16)[None] / 16
    view = view_of(np.zeros(16, np.float32), np.full((1, 16), 3, np.float32))
    out = merged(create("dare-linear", {"density": "0.25"}), view, draws)
    assert (out != 0).sum() == 4
    assert out.mean() == 3


def test_a_nan_delta_is_trimmed_or_outvoted_by_no_method_of_signs() -> None:
    deltas = np.array([[np.nan, np.nan], [1, -5], [2, -5]], np.float32)
    view = view_of(np.ones(2, np.float32), deltas)
    for name in ("ties", "ram-ties"):
        assert np.isnan(merged(create(name, {}), view, thresholds=[3, 3, 3])).all()


def test_a_threshold_is_a_magnitude_that_is_kept_with_its_equals() -> None:
    deltas = np.array([[3, -1, 2, 0, -2, 1]], np.float32)
    for share, least in ((0.0, np.inf), (1e-9, 3), (0.17, 3), (0.34, 2), (0.5, 2), (0.84, 1), (1.0, 0)):
        assert ref.thresholds([deltas], np.array([[share]])) == [[least]]
    both = ref.thresholds([deltas, 10 * deltas], np.array([[0.25], [0.6]]), "model")
    assert both.tolist() == [[20], [2]]
    kept = merged(create("ties", {}), view_of(np.zeros(6, np.float32), deltas), thresholds=[2])
    assert kept.tolist() == [3, 0, 2, 0, -2, 0]


def test_the_oracles_random_numbers_are_the_published_ones() -> None:
    assert ref.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert ref.philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert ref.draws(0, 0, 0, [3, 0]).tolist() == [0x9B00DB / 2**24, 0x6627E8 / 2**24]


# What single methods refuse


@pytest.mark.parametrize("weight", ["1,-1,0", "0", "0.1,0.2,-0.3", "mlp@1;1,mlp@-2;1,1"])
def test_weights_of_linear_that_sum_to_nothing_are_refused_before_any_work(weight: str) -> None:
    with pytest.raises(PlanError, match=r"linear: the weights of b.mlp, .* sum to 0, .*normalize=false"):
        Linear(weight=weight).settings(["b.mlp"] if "@" not in weight else ["a.attn", "b.mlp"], 2)
    assert Linear(weight=weight, normalize=False).settings(["b.mlp"], 2)["weight"].shape == (1, 3)


def test_the_base_has_a_weight_of_its_own_in_linear() -> None:
    with pytest.raises(PlanError, match="linear: weight has 2 values for 3 models"):
        Linear(weight="1,2").settings(["w"], 2)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(UsageError, match=f"dare-ties: seed is {seed}; it must be "):
        create("dare-ties", {"seed": str(seed)})
    assert create("dare-ties", {"seed": str(2**64 - 1)}).parameters()["seed"] == 2**64 - 1


def test_ram_unique_wants_an_agent_that_there_is_and_a_dilution_above_0() -> None:
    with pytest.raises(UsageError, match="ram-unique: agent is 3 and there are 2; use a number from 1 to 2"):
        RamUnique(agent=3).check_agents(2)
    RamUnique(agent=3).check_agents(3)
    for dilution in (0, -1):
        with pytest.raises(UsageError, match=f"ram-unique: dilution is {dilution}; it must be more than 0"):
            RamUnique(dilution=dilution)


# λ

counts = st.integers(0, 2**40)


@given(counts, counts, st.floats(0, 10), st.floats(0, 10), st.sampled_from(["unique", "changed"]))
def test_lambda_is_the_papers_formula(unique: int, shared: int, r: float, alpha: float, ratio: str) -> None:
    (found,) = RamPlus(r=r, alpha=alpha, ratio=ratio).coefficients(np.array([[[unique, shared]]]))  # type: ignore[arg-type]
    below = unique if ratio == "unique" else unique + shared
    rho = shared / below if below else (np.inf if shared else 0.0)
    assert found.tolist() == [1 + r * min(max(rho, 0), alpha)]


def test_scope_tensor_sums_each_tensor_alone_and_model_all_of_them() -> None:
    overlap = np.array([[[10, 5]], [[10, 15]]])
    assert RamPlus(scope="tensor").coefficients(overlap).tolist() == [[1.05], [1.15]]
    assert RamPlus(scope="model").coefficients(overlap).tolist() == [[1.1], [1.1]]


# A new method

NEW = '''
"""A share of the sum, arXiv 0000.00000."""
from dataclasses import dataclass
from ramstream.methods import Method

@dataclass(frozen=True)
class NewSum(Method):
    """share · Σ τ"""
    share: float = 1.0

    def merge(self, block):
        return block.p["share"] * sum(block.deltas)
'''


def test_a_new_method_is_one_file_and_no_other_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new_sum.py").write_text(NEW)
    monkeypatch.setattr(ramstream.methods, "__path__", [*ramstream.methods.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    try:
        program = trace(create("new-sum", {}), 3)
        numbers = np.array([{"scale": 2, "share": 0.5}[name] for name, _ in program.columns], np.float32)
        for form in FORMS.values():
            assert form(program, rows_of(BASE, A, 0 * A), numbers).tolist() == [7, 0, -2, 1, 2]
        base, agents = family({"w": ("F32", (30, 20))})
        outcome, _ = run(
            plan_of(write_family(tmp_path, base, agents), "new_sum", share=0.5), tmp_path / "out"
        )
        (view,) = views_of(base, agents, 1e-5)
        expected = ref.finished(view, np.float32(0.5) * view.deltas.sum(axis=0))
        assert read_weights(outcome.out)["w"] == expected.tobytes()
    finally:
        sys.modules.pop("ramstream.methods.new_sum")
        del ramstream.methods.new_sum


# What users may get wrong


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (RamPlus, {"max_norm": "Largest"}),
        (RamPlus, {"ratio": "unqiue"}),
        (Ties, {"scope": "Tensor"}),
        (Ties, {"normalize": "false"}),
        (DareLinear, {"seed": 1.5}),
        (DareLinear, {"seed": True}),
        (RamPlus, {"r": "0.1"}),
        (RamPlus, {"scale": None}),
        (Ties, {"density": [0.5, "x"]}),
    ],
)
def test_a_value_of_another_type_is_refused_in_python_too(cls: type[Method], values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        cls(**values)


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("ram", {"weight": "1e-46"}, "weight is 1e-46, which is beyond what float32 holds"),
        ("task-arithmetic", {"weight": "1,1e39"}, "weight is 1e\\+39, which is beyond"),
        ("ram-unique", {"dilution": "1e-46"}, "dilution is 1e-46, which is beyond"),
        ("ram-plus", {"scale": "-1e39"}, "scale is -1e\\+39, which is beyond"),
        ("linear", {"weight": "2e38"}, "sum to 0, or to more than float32 holds"),
    ],
)
def test_numbers_that_float32_cannot_hold_are_refused(
    tmp_path: Path, method: str, words: dict[str, str], said: str
) -> None:
    base, agents = family({"a": ("F32", (4,))}, agents=2)
    paths = write_family(tmp_path / "in", base, agents)
    with pytest.raises(PlanError, match=said):
        plan_of(paths, method, **words)
    base, agents = family({"a": ("F64", (4,))}, agents=2)
    if method == "ram-unique":
        plan_of(write_family(tmp_path / "wide", base, agents), method, **words)


FIRST = """
from dataclasses import dataclass
from typing import ClassVar
from ramstream.methods import Method

@dataclass(frozen=True)
class {name}(Method):
    seed: int = 0
    random: ClassVar[bool] = {random}

    def merge(self, block):
        return block.where(block.draws[0] < 0.5, block.deltas[0], block.deltas[1])
"""


def test_draws_of_an_agent_that_changed_nothing_are_its_own_too(tmp_path: Path) -> None:
    """Whatever lies in the worker's rows: the first tensor's draws must not be the second's."""
    (tmp_path / "by_draw.py").write_text(FIRST.format(name="ByDraw", random=True))
    ramstream.methods.__path__.append(str(tmp_path))
    try:
        base, agents = family({"a": ("F32", (2_000,)), "b": ("F32", (2_000,))}, agents=2)
        agents[0]["b"] = base["b"]
        paths = write_family(tmp_path / "in", base, agents)
        for device in ("cpu", "cpu:torch"):
            run(plan_of(paths, "by-draw", epsilon=0.0), tmp_path / device, Limits(workers=1, device=device))
        one, two = (read_weights(tmp_path / device) for device in ("cpu", "cpu:torch"))
        assert one == two
        moved = np.frombuffer(one["b"], np.uint32) != base["b"].bits
        drawn = ref.draws(0, xxhash.xxh3_64_intdigest(b"b"), 0, range(2_000))
        changed = agents[1]["b"].bits != base["b"].bits
        assert np.array_equal(moved, changed & ~(drawn < 0.5))
    finally:
        ramstream.methods.__path__.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"twins.py": FIRST.format(name="A", random=True) + FIRST.format(name="B", random=True)},
            "has two methods",
        ),
        ({"undeclared.py": FIRST.format(name="Undeclared", random=False)}, "uses block.draws; set .* random"),
    ],
)
def test_a_method_file_that_would_not_do_what_it_says_is_refused(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    base, agents = family({"a": ("F32", (4,))}, agents=2)
    paths = write_family(tmp_path / "in", base, agents)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ramstream.methods.__path__.append(str(tmp_path))
    try:
        with pytest.raises(UsageError, match=said):
            plan_of(paths, next(iter(files)).removesuffix(".py"))
    finally:
        ramstream.methods.__path__.remove(str(tmp_path))
