"""Methods written down as programs, and the loops made of them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import FORMS, by_core, by_numpy, by_torch, odd_rows, same

from ramstream.errors import RamstreamError
from ramstream.kernels import cores, jit
from ramstream.kernels.layout import BLOCK, SPARE
from ramstream.kernels.program import COPY, Program, trace
from ramstream.methods import Block, Method, available, create


@dataclass(frozen=True)
class Made(Method):
    """A method whose merge is handed over."""

    formula: Callable[[Block], Any] = lambda block: block.deltas[0]
    gain: float = 1.0
    everywhere: bool = False

    @property
    def moves_unchanged(self) -> bool:
        return self.everywhere

    def merge(self, block: Block) -> Any:
        return self.formula(block)


def program_of(formula: Callable[[Block], Any], agents: int = 2, everywhere: bool = True) -> Program:
    return trace(Made(formula=formula, everywhere=everywhere), agents)


def names(program: Program) -> list[str]:
    return [step.name for step in program.steps]


# What a method may not do


@pytest.mark.parametrize(
    "formula",
    [
        lambda block: block.deltas[0] if block.deltas[0] > 0 else 0.0,
        lambda block: max(block.deltas),
        lambda block: block.deltas[0] * (not block.deltas[1]),
        lambda block: 0 < block.deltas[0] < 1,
        lambda block: block.deltas[0] / block.p["gain"] if block.p["gain"] else 0.0,
        lambda block: block.where(block.deltas[0] in block.deltas[1:], block.base, block.base),
    ],
)
def test_a_method_that_asks_for_the_truth_of_elements_is_told_to_use_where(formula: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot branch on the elements; use block.where"):
        program_of(formula)


@pytest.mark.parametrize("combine", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_two_truth_values_are_no_numbers(combine: Any) -> None:
    with pytest.raises(TypeError, match=r"of two truth values: start from a number, as in 0\.0 \+ condition"):
        program_of(lambda block: combine(block.deltas[0] != 0, block.deltas[1] != 0))


@pytest.mark.parametrize("other", ["1", None, np.ones(3, np.float32), [1.0], 1j])
def test_what_is_no_number_is_no_operand(other: Any) -> None:
    for formula in (
        lambda block: operator.add(block.deltas[0], other),
        lambda block: block.deltas[0] == other,
        lambda block: block.where(block.deltas[0] == 0, other, 0.0),
        lambda block: other,
    ):
        with pytest.raises(TypeError, match="computes with the block's values and numbers, not with "):
            program_of(formula)


def test_numbers_are_no_conditions_and_conditions_only_are_combined() -> None:
    for formula in (
        lambda block: block.where(block.deltas[0], 1.0, 0.0),
        lambda block: block.where(1, 1.0, 0.0),
    ):
        with pytest.raises(TypeError, match="the condition of `where` is what a comparison gives"):
            program_of(formula)
    for combine in (operator.and_, operator.or_):
        with pytest.raises(TypeError, match="is for what comparisons give"):
            program_of(lambda block, combine=combine: combine(block.deltas[0] > 0, block.deltas[1]))  # type: ignore[misc]
    with pytest.raises(TypeError, match="`not` is for what comparisons give"):
        program_of(lambda block: ~block.deltas[0])


@pytest.mark.parametrize("formula", [lambda block: 1.0, lambda block: block.p["gain"] * block.lambdas[0]])
def test_one_number_is_no_merged_block(formula: Any) -> None:
    with pytest.raises(RamstreamError, match="gives one number for a block, not a value for each element"):
        program_of(formula)


# What is written down


def test_the_same_operation_is_written_down_once() -> None:
    program = program_of(lambda block: abs(block.deltas[0]) * 2 + abs(block.deltas[0]) * 2.0)
    assert names(program).count("abs") == names(program).count("constant") == 1
    assert names(program).count("*") == 2  # and that by `scale`
    swapped = program_of(
        lambda block: block.deltas[0] - block.deltas[1] + (block.deltas[1] - block.deltas[0])
    )
    assert names(swapped).count("-") == 2


def test_zeros_of_both_signs_are_two_constants() -> None:
    program = program_of(lambda block: block.where(block.deltas[0] > 0, -0.0, 0.0) / block.base)
    rows, numbers = np.array([[2, 2], [1, -1], [0, 0]], np.float32), np.ones(1, np.float32)
    assert names(program).count("constant") == 2
    assert program != program_of(lambda block: block.where(block.deltas[0] > 0, 0.0, 0.0) / block.base)
    for divided in (form(replace_output(program), rows, numbers) for form in FORMS.values()):
        assert np.signbit(divided).tolist() == [True, False]


def replace_output(program: Program) -> Program:
    """The program up to the merged delta, that is without `base + scale · delta`."""
    (merged,) = (place for place, step in enumerate(program.steps) if step.name == "/")
    return replace(program, steps=program.steps[: merged + 1])


def test_only_what_is_used_is_taken() -> None:
    program = program_of(lambda block: block.deltas[1] * block.lambdas[1])
    assert program.columns == (("scale", 0), ("lambdas", 1))
    assert program.lambdas == [1]
    assert [step.operands for step in program.steps if step.name == "row"] == [(0,), (2,)]
    assert not program.random
    assert cores.rows_of(program) == 3 + SPARE
    drawn = program_of(lambda block: block.where(block.draws[1] < 0.5, block.deltas[1], block.p["gain"]))
    assert drawn.random
    assert drawn.columns == (("scale", 0), ("gain", 0))
    assert cores.rows_of(drawn) == 3 + SPARE + 2 + 2


def test_numbers_are_the_columns_of_each_tensor() -> None:
    program = program_of(lambda block: block.deltas[1] * block.lambdas[1] * block.thresholds[0])
    values = {
        "scale": [[1.0], [2.0]],
        "lambdas": [[3.0, 4.0], [5.0, 6.0]],
        "thresholds": [[7.0, 8.0], [9.0, 0.0]],
    }
    found = program.numbers({name: np.array(value) for name, value in values.items()})
    assert dict(zip(program.columns, found.T.tolist(), strict=True)) == {
        ("scale", 0): [1.0, 2.0],
        ("lambdas", 1): [4.0, 6.0],
        ("thresholds", 0): [7.0, 9.0],
    }
    assert COPY.numbers({"scale": np.ones((5, 1))}).shape == (5, 0)


def test_the_output_is_the_base_and_the_scaled_delta_where_something_changed() -> None:
    rows = np.array([[-0.0, 1, 1, 1], [0, 2, 0, -1], [0, 0, 4, 1], [0, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    formula = lambda block: block.deltas[0] + block.deltas[1] + 1.0  # noqa: E731
    for form in FORMS.values():
        kept = form(program_of(formula, everywhere=False), rows, np.array([0.5], np.float32))
        assert kept.tolist() == [0, 2.5, 3.5, 1.5]
        assert np.signbit(kept[0])
        assert form(program_of(formula), rows, np.array([0.5], np.float32)).tolist() == [0.5, 2.5, 3.5, 1.5]


def test_truth_values_count_as_0_and_1() -> None:
    formula = lambda block: 0.0 + (block.deltas[0] > 0) + (block.deltas[1] > 0) * 2.0 + -(block.base > 5)  # noqa: E731
    rows = np.array([[0, 0, 0, 9], [1, 0, 1, 1], [0, 1, 1, 1]], np.float32)
    for form in FORMS.values():
        assert form(program_of(formula), rows, np.ones(1, np.float32)).tolist() == [1, 2, 3, 11]


def test_the_base_alone_is_a_program() -> None:
    row = odd_rows(1, np.float32, np.random.default_rng(0))[:1]
    for form in FORMS.values():
        assert form(COPY, row, np.empty(0, np.float32)).tobytes() == row.tobytes()


# How much is held at once


class Held:
    """An array that counts how many of its kind there are."""

    alive: ClassVar[weakref.WeakSet[Held]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __init__(self, values: Any) -> None:
        self.values = values
        if np.ndim(values):
            Held.alive.add(self)
            Held.most = max(Held.most, len(Held.alive))

    def __invert__(self) -> Held:
        return Held(~self.values)

    def __neg__(self) -> Held:
        return Held(-self.values)

    def __abs__(self) -> Held:
        return Held(abs(self.values))

    @staticmethod
    def where(*operands: Held) -> Held:
        return Held(np.where(*(operand.values for operand in operands)))


def between(act: Callable[[Any, Any], Any]) -> Callable[[Held, Held], Held]:
    return lambda one, other: Held(act(one.values, other.values))


for _name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_"):
    setattr(Held, f"__{_name.strip('_')}__", between(getattr(operator, _name)))
Held.__hash__ = object.__hash__  # type: ignore[assignment]


def held_by(program: Program) -> int:
    """The most arrays that a run holds beside its rows."""
    rows = [Held(row) for row in np.ones((2 * program.agents + 1, 3), np.float32)]
    Held.most = len(rows)
    program.run(
        Held, lambda k: rows[k], lambda column: Held(np.float32(2)), lambda value: Held(np.float32(value))
    )
    assert len(Held.alive) == len(rows)
    return Held.most - len(rows)


@pytest.mark.parametrize("agents", [2, 7, 64])
@pytest.mark.parametrize("name", available())
def test_what_a_program_says_it_holds_is_what_it_holds(name: str, agents: int) -> None:
    program = trace(create(name, {}), agents)
    assert held_by(program) == program.alive


def test_a_sum_holds_three_arrays_however_many_agents_there_are() -> None:
    assert {trace(create("task-arithmetic", {}), agents).alive for agents in (8, 64)} == {4}
    assert program_of(lambda block: sum(block.deltas), agents=64).alive == 2


# Any formula

constants = st.sampled_from([0.0, -0.0, 1.0, -2.5, 0.1, 3, 1e-40, 1e38, np.inf, -np.inf, np.nan, True])
leaves = st.one_of(
    constants.map(lambda value: ("constant", value)),
    st.tuples(st.sampled_from(["deltas", "draws", "lambdas", "thresholds"]), st.integers(0, 1)),
    st.just(("base",)),
    st.just(("p", "gain")),
)


def grown(inner: Any) -> Any:
    """Numbers of numbers; conditions live inside `where`, and as numbers of 0 and 1."""
    compared = st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), inner, inner)
    condition = st.one_of(
        compared,
        st.tuples(st.sampled_from(["and_", "or_"]), compared, compared),
        st.tuples(st.just("invert"), compared),
    )
    return st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "mul", "truediv"]), inner, inner),
        st.tuples(st.sampled_from(["neg", "abs"]), inner),
        st.tuples(st.just("where"), condition, inner, inner),
        st.tuples(st.just("mul"), condition, inner),
    )


formulas = st.recursive(leaves, grown, max_leaves=12)


def evaluated(tree: Any, block: Block) -> Any:
    """A tree as a method computes it."""
    name, *rest = tree
    if name == "constant":
        return block.where(block.base == block.base, rest[0], rest[0])
    if name in ("base", "p"):
        return block.base if name == "base" else block.p[rest[0]]
    if name in ("deltas", "draws", "lambdas", "thresholds"):
        return getattr(block, name)[rest[0]]
    operands = [evaluated(operand, block) for operand in rest]
    return block.where(*operands) if name == "where" else getattr(operator, name)(*operands)


def with_base(tree: Any) -> Callable[[Block], Any]:
    return lambda block: evaluated(tree, block) + block.base


def rows_and_numbers(program: Program, dtype: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return odd_rows(2, dtype, random, n=217), random.uniform(-1, 2, len(program.columns)).astype(dtype)


@given(formulas, st.sampled_from([np.float32, np.float64]), st.booleans())
def test_numpy_and_torch_give_the_same_bits_for_any_formula(tree: Any, dtype: Any, everywhere: bool) -> None:
    program = program_of(with_base(tree), everywhere=everywhere)
    rows, numbers = rows_and_numbers(program, dtype)
    assert same(by_torch(program, rows, numbers), by_numpy(program, rows, numbers))


@settings(max_examples=15, deadline=None)
@given(formulas, st.sampled_from([np.float32, np.float64]), st.booleans())
def test_a_compiled_loop_gives_the_same_bits_for_any_formula(tree: Any, dtype: Any, everywhere: bool) -> None:
    program = program_of(with_base(tree), everywhere=everywhere)
    rows, numbers = rows_and_numbers(program, dtype)
    with mock.patch.object(jit, "core_folder", return_value=None):  # keep none of them
        assert same(by_core(program, rows, numbers), by_numpy(program, rows, numbers))


@given(formulas)
def test_what_any_formula_says_it_holds_is_what_it_holds(tree: Any) -> None:
    program = program_of(with_base(tree))
    with np.errstate(all="ignore"):
        assert held_by(program) == program.alive


@given(formulas)
def test_a_formula_is_written_down_the_same_way_again(tree: Any) -> None:
    program, again = (program_of(with_base(tree)) for _ in range(2))
    assert program == again
    assert hash(program) == hash(again)
    assert cores.source(program, "float32", True) == cores.source(again, "float32", True)


# Loops


@pytest.mark.parametrize("name", available())
def test_the_last_two_rows_are_for_writing_only(name: str) -> None:
    program = trace(create(name, {}), 3)
    read = {cores.row_of(program, step.operands[0]) for step in program.steps if step.name == "row"}
    assert max(read) < cores.rows_of(program) - 2
    assert len(read) == sum(step.name == "row" for step in program.steps)


def clamp(block: Block) -> Any:
    return block.where(abs(block.deltas[0]) < block.thresholds[0], 0.5, block.draws[0])


SOURCE = f'''"""Made by ramstream.kernels.cores; removed and made again at will."""
import numpy as np
from numba import carray, cfunc, float64, int64, types, void

@cfunc(
    void(types.CPointer(float64), types.CPointer(float64), types.CPointer(float64), int64),
    cache=False,
    error_model="numpy",
)
def core(address, numbers, output, n):
    rows, p, out = carray(address, ({2 + SPARE + 3}, {BLOCK})), carray(numbers, (2,)), carray(output, ({BLOCK},))
    v3 = p[0]
    v4 = p[1]
    v7 = np.float64(0.5)
    for i in range(n):
        v0 = rows[0, i]
        v1 = rows[1, i]
        v2 = rows[{2 + SPARE}, i]
        v5 = abs(v1)
        v6 = v5 < v4
        v8 = v7 if v6 else v2
        v9 = v3 * v8
        v10 = v0 + v9
        out[i] = v10
'''


def test_the_source_of_a_loop() -> None:
    assert cores.source(program_of(clamp, agents=1), "float64", False) == SOURCE


def test_constants_without_a_literal_are_compiled() -> None:
    formula = lambda block: block.where(block.deltas[0] > 0, np.inf, block.base * np.nan)  # noqa: E731
    rows = np.array([[1, 1], [1, 0], [0, 0]], np.float32)
    for form in FORMS.values():
        merged = form(program_of(formula), rows, np.ones(1, np.float32))
        assert merged[0] == np.inf
        assert np.isnan(merged[1])


@pytest.fixture
def forgetful() -> Iterator[None]:
    """What was compiled before is not known, and what is compiled here is forgotten."""
    cores._made.cache_clear()
    yield
    cores._made.cache_clear()


@pytest.mark.usefixtures("forgetful")
def test_a_loop_is_written_and_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "core_folder", lambda: tmp_path)
    program, written = program_of(clamp), {}
    rows, numbers = rows_and_numbers(program, np.float32)
    for _ in range(2):
        assert same(by_core(program, rows, numbers), by_numpy(program, rows, numbers))
        files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        assert len([path for path in files if path.suffix == ".py"]) == 1
        assert files == (written or files)
        written = files
        cores._made.cache_clear()
    (source,) = tmp_path.glob("*core_*.py")
    assert cores._imported(source.read_text(), tmp_path).cache_hits == 1
    cores.core(program, True)
    assert len(list(tmp_path.glob("*core_*.py"))) == 2


@pytest.mark.usefixtures("forgetful")
def test_where_nothing_can_be_kept_a_loop_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "core_folder", lambda: None)
    program = program_of(clamp)
    rows, numbers = rows_and_numbers(program, np.float64)
    assert same(by_core(program, rows, numbers), by_numpy(program, rows, numbers))


@pytest.mark.usefixtures("forgetful")
def test_without_numbas_compiler_a_program_runs_as_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(clamp)
    rows, numbers = rows_and_numbers(program, np.float32)
    compiled = by_core(program, rows, numbers)
    cores._made.cache_clear()
    monkeypatch.setattr(cores.config, "DISABLE_JIT", 1)
    assert callable(cores.core(program, False))
    assert same(by_core(program, rows, numbers), compiled)


def test_a_loops_file_that_a_crash_cut_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "core_folder", lambda: tmp_path)
    text = cores.source(program_of(lambda block: block.deltas[0] * 0.75), "float32", True)
    assert cores._imported(text, tmp_path)
    (file,) = tmp_path.glob("*.py")
    for broken in ("", text[:200]):
        file.write_text(broken)
        assert cores._imported(text, tmp_path)
        assert file.read_text() == text
    assert not list(tmp_path.glob("*.new"))
