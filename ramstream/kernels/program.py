"""A method's `merge`, written down once as a list of operations, from which every form of it is made.

The operations are IEEE additions, subtractions, multiplications, divisions, comparisons and selections in one
width. `ramstream.kernels.cores` makes a compiled loop of them; `run` does them with numpy or torch, one after the
other. Both give the same bits, as neither reorders nor fuses anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ramstream.errors import UsageError
from ramstream.methods import Block, Method

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT, BOOL = "float", "bool"

_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "&": operator.and_,
    "|": operator.or_,
    "not": operator.invert,
    "neg": operator.neg,
    "abs": abs,
}


@dataclass(frozen=True)
class Step:
    """One operation and the steps it takes its operands from.

    Beside the operators: `row` (k) is a row of the block, `number` (column) and `constant` (its text) one number,
    `float` a truth value as 0 or 1, `where` (condition, a, b).
    """

    name: str
    operands: tuple[Any, ...]
    kind: str = FLOAT
    one: bool = False
    """Whether it is one number for the whole block."""


@dataclass(frozen=True)
class Program:
    """The steps of a method for T agents; the last one is the output (n,)."""

    agents: int
    steps: tuple[Step, ...]
    columns: tuple[tuple[str, int], ...]
    """The numbers it takes: (parameter, index); `lambdas` and `thresholds` among them."""
    random: bool
    moves_unchanged: bool

    @property
    def lambdas(self) -> list[int]:
        """The columns that hold λ."""
        return [column for column, (name, _) in enumerate(self.columns) if name == "lambdas"]

    def numbers(self, values: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """The numbers (tensors, columns) of a merge, float64, from arrays (tensors, any number of values)."""
        import numpy as np

        tensors = len(next(iter(values.values())))
        columns = [values[name][:, index] for name, index in self.columns]
        return np.stack(columns, axis=1) if columns else np.empty((tensors, 0))

    @property
    def alive(self) -> int:
        """How many arrays `run` holds at once, at most, beside its rows."""
        last, most, held = self._last_uses(), 0, 0
        for place, step in enumerate(self.steps):
            if not step.one and step.name != "row":
                held += 1
                most = max(most, held)
            held -= sum(1 for k in last[place] if not self.steps[k].one and self.steps[k].name != "row")
        return most

    def run(
        self, xp: Any, rows: Callable[[int], Any], number: Callable[[int], Any], one: Callable[[float], Any]
    ) -> Any:
        """The output, computed with `xp` (numpy or torch).

        rows(k) is a row of the block: 0 the base, 1 .. T the deltas, then T draws. number(column) and one(value)
        are arrays of no dimension in the width.
        """
        found: dict[int, Any] = {}
        last = self._last_uses()
        for place, step in enumerate(self.steps):
            found[place] = self._do(step, xp, found, rows, number, one)
            for done in last[place]:
                del found[done]
        return found[len(self.steps) - 1]

    def _do(self, step: Step, xp: Any, found: dict[int, Any], rows: Any, number: Any, one: Any) -> Any:
        if step.name == "row":
            return rows(step.operands[0])
        if step.name == "number":
            return number(step.operands[0])
        if step.name == "constant":
            return one(float(step.operands[0]))
        operands = [found[k] for k in step.operands]
        if step.name == "where":
            return xp.where(*operands)
        if step.name == "float":
            return xp.where(operands[0], one(1.0), one(0.0))
        return _OPERATORS[step.name](*operands)

    def _last_uses(self) -> list[list[int]]:
        """For each step, the earlier ones whose values nobody needs after it."""
        last = {k: place for place, step in enumerate(self.steps) for k in _operands(step)}
        result: list[list[int]] = [[] for _ in self.steps]
        for k, place in last.items():
            result[place].append(k)
        return result


COPY = Program(0, (Step("row", (0,)),), (), random=False, moves_unchanged=False)
"""The base alone, of no agents: what converts a copied tensor to another dtype."""


def _operands(step: Step) -> tuple[int, ...]:
    return () if step.name in ("row", "number", "constant") else step.operands


def trace(method: Method, agents: int) -> Program:
    """Write down what a method does with T = `agents` agents, its output `base + scale · delta` included."""
    recorder = _Recorder()
    base, *rows = (recorder.value("row", k) for k in range(2 * agents + 1))
    deltas, draws = rows[:agents], rows[agents:]
    p: dict[str, Any] = {
        name: recorder.number(name, 0)
        if values is None
        else [recorder.number(name, t) for t in range(values)]
        for name, values in method.numeric(agents).items()
    }
    block = Block(
        base,
        deltas,
        draws,
        [recorder.number("lambdas", t) for t in range(agents)],
        [recorder.number("thresholds", t) for t in range(agents)],
        p,
        recorder.where,
    )
    merged = recorder.as_value(method.merge(block))
    if merged.step.one:
        raise UsageError(f"{method.name()} gives one number for a block, not a value for each element")
    output = base + p["scale"] * merged
    if not method.moves_unchanged:
        changed = deltas[0] != 0
        for delta in deltas[1:]:
            changed = changed | (delta != 0)
        output = recorder.where(changed, output, base)
    return recorder.program(agents, output, method)


@dataclass(frozen=True, eq=False)
class _Value:
    """What a method computes with while it is written down."""

    recorder: _Recorder
    place: int

    @property
    def step(self) -> Step:
        return self.recorder.steps[self.place]

    def __bool__(self) -> bool:
        raise TypeError("a method cannot branch on the elements; use block.where(condition, a, b)")

    def _with(self, name: str, other: Any, swapped: bool = False) -> _Value:
        pair = (other, self) if swapped else (self, other)
        return self.recorder.arithmetic(name, *pair)

    def __add__(self, other: Any) -> _Value:
        return self._with("+", other)

    def __radd__(self, other: Any) -> _Value:
        return self._with("+", other, True)

    def __sub__(self, other: Any) -> _Value:
        return self._with("-", other)

    def __rsub__(self, other: Any) -> _Value:
        return self._with("-", other, True)

    def __mul__(self, other: Any) -> _Value:
        return self._with("*", other)

    def __rmul__(self, other: Any) -> _Value:
        return self._with("*", other, True)

    def __truediv__(self, other: Any) -> _Value:
        return self._with("/", other)

    def __rtruediv__(self, other: Any) -> _Value:
        return self._with("/", other, True)

    def __neg__(self) -> _Value:
        return self.recorder.value("neg", self.recorder.as_float(self))

    def __abs__(self) -> _Value:
        return self.recorder.value("abs", self.recorder.as_float(self))

    def __lt__(self, other: Any) -> _Value:
        return self.recorder.comparison("<", self, other)

    def __le__(self, other: Any) -> _Value:
        return self.recorder.comparison("<=", self, other)

    def __gt__(self, other: Any) -> _Value:
        return self.recorder.comparison(">", self, other)

    def __ge__(self, other: Any) -> _Value:
        return self.recorder.comparison(">=", self, other)

    def __eq__(self, other: object) -> Any:
        return self.recorder.comparison("==", self, other)

    def __ne__(self, other: object) -> Any:
        return self.recorder.comparison("!=", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> _Value:
        return self.recorder.logic("&", self, other)

    def __or__(self, other: Any) -> _Value:
        return self.recorder.logic("|", self, other)

    def __invert__(self) -> _Value:
        return self.recorder.logic("not", self)


@dataclass(eq=False)
class _Recorder:
    """Collects steps, each different one once."""

    steps: list[Step] = field(default_factory=list)
    _known: dict[Step, int] = field(default_factory=dict)

    def value(self, name: str, *operands: Any, kind: str = FLOAT) -> _Value:
        values = [operand for operand in operands if isinstance(operand, _Value)]
        one = name in ("number", "constant") or (bool(values) and all(value.step.one for value in values))
        places = tuple(operand.place if isinstance(operand, _Value) else operand for operand in operands)
        step = Step(name, places, kind, one)
        if step not in self._known:
            self._known[step] = len(self.steps)
            self.steps.append(step)
        return _Value(self, self._known[step])

    def number(self, name: str, index: int) -> _Value:
        return self.value("number", (name, index))

    def as_value(self, operand: Any) -> _Value:
        if isinstance(operand, _Value):
            return operand
        if isinstance(operand, int | float):
            return self.value("constant", repr(float(operand)))  # as text, -0.0 is not 0.0
        raise TypeError(
            f"a method computes with the block's values and numbers, not with {type(operand).__name__}"
        )

    def as_float(self, operand: Any) -> _Value:
        value = self.as_value(operand)
        return value if value.step.kind == FLOAT else self.value("float", value)

    def arithmetic(self, name: str, a: Any, b: Any) -> _Value:
        a, b = self.as_value(a), self.as_value(b)
        if BOOL == a.step.kind == b.step.kind:
            raise TypeError(f"`{name}` of two truth values: start from a number, as in 0.0 + condition")
        return self.value(name, self.as_float(a), self.as_float(b))

    def comparison(self, name: str, a: Any, b: Any) -> _Value:
        return self.value(name, self.as_float(a), self.as_float(b), kind=BOOL)

    def logic(self, name: str, *operands: Any) -> _Value:
        values = [self.as_value(operand) for operand in operands]
        if any(value.step.kind != BOOL for value in values):
            raise TypeError(f"`{name}` is for what comparisons give")
        return self.value(name, *values, kind=BOOL)

    def where(self, condition: Any, a: Any, b: Any) -> _Value:
        chosen = self.as_value(condition)
        if chosen.step.kind != BOOL:
            raise TypeError("the condition of `where` is what a comparison gives")
        return self.value("where", chosen, self.as_float(a), self.as_float(b))

    def program(self, agents: int, output: _Value, method: Method) -> Program:
        """What the output needs, in order; columns and draws are only those that are used."""
        needed, left = set(), [output.place]
        while left:
            place = left.pop()
            if place not in needed:
                needed.add(place)
                left += _operands(self.steps[place])
        kept = sorted(needed)
        new = {place: k for k, place in enumerate(kept)}
        columns: list[tuple[str, int]] = []
        steps = []
        for place in kept:
            step = self.steps[place]
            operands: tuple[Any, ...] = tuple(new[k] for k in _operands(step)) or step.operands
            if step.name == "number":
                columns.append(step.operands[0])
                operands = (len(columns) - 1,)
            steps.append(Step(step.name, operands, step.kind, step.one))
        random = any(step.name == "row" and step.operands[0] > agents for step in steps)
        return Program(agents, tuple(steps), tuple(columns), random, method.moves_unchanged)
