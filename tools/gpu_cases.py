"""Strips of every kind for `gpu_check.py`, merged by the CPU's kernels and by the torch form on any device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ramstream import methods
from ramstream.errors import UsageError
from ramstream.kernels import host
from ramstream.kernels.program import Program, trace
from ramstream.kernels.torch import TorchMerger
from ramstream.types import Dtype, Kind

SEED = 7

Rows = NDArray[np.uint8]
"""Elements as rows of bytes."""
Merged = tuple[Rows, tuple[int, int]]
"""The output, and (overflow, moved)."""

TORCH = {
    Dtype.F32: torch.float32,
    Dtype.F64: torch.float64,
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.F8_E4M3: torch.float8_e4m3fn,
    Dtype.F8_E5M2: torch.float8_e5m2,
}


@dataclass(frozen=True)
class Case:
    """What a strip is made of and how it is merged. `kinds` are Dtype codes, DELTA or ABSENT, one an agent."""

    method: str
    base: Dtype
    out: Dtype
    kinds: tuple[int, ...]
    policy: str = "base"
    compare: Dtype | None = None
    short: bool = False
    """Whether every other agent has a third fewer elements."""

    def __str__(self) -> str:
        names = [Kind(kind).name if kind >= Kind.DELTA else Dtype(kind).name for kind in self.kinds]
        agents = " ".join(f"{name} x {len(list(group))}" for name, group in itertools.groupby(names))
        compare = f", compared in {self.compare.name}" if self.compare is not None else ""
        short = ", every other one shorter" if self.short else ""
        return (
            f"{self.method}: {self.base.name} and {agents}{short} to {self.out.name}, {self.policy}{compare}"
        )

    @property
    def wide(self) -> bool:
        """Whether it is computed in float64."""
        return Dtype.F64 in (self.base, *self.kinds)

    @property
    def rule(self) -> tuple[float, str, Dtype | None]:
        """What a merger is made with."""
        return 1e-5, self.policy, self.compare

    def form(self, device: str) -> TorchMerger:
        """The torch form on a device."""
        return TorchMerger(self.program, *self.rule, SEED, device=device)

    @property
    def program(self) -> Program:
        """The method's program."""
        return trace(methods.create(self.method, {}), len(self.kinds))


def accepts(method: str, agents: int) -> bool:
    """Whether a method takes so many agents."""
    try:
        methods.create(method, {}).check_agents(agents)
    except UsageError:
        return False
    return True


def cases() -> Iterator[Case]:
    """All methods, dtypes, numbers of agents and policies; what has more combinations takes turns."""
    grid = itertools.product(
        methods.available(), Dtype, (False, True), (1, 3, 9), ("base", "keep"), (False, True)
    )
    for number, (method, base, converted, agents, policy, compared) in enumerate(grid):
        if not accepts(method, agents):
            continue
        others = [dtype for dtype in Dtype if dtype is not base]
        out = others[number % 5] if converted else base
        compare = others[number // 5 % 5] if compared else None
        turns = (Kind.DELTA, base, others[number // 2 % 5], Kind.ABSENT, others[number // 3 % 5])
        mixed = tuple(turns[(number + t) % 5] for t in range(agents))
        yield Case(method, base, out, (base,) * agents, policy, compare)
        yield Case(method, base, out, mixed, policy, compare, short=True)


class Inputs:
    """Bytes of base and agents, random for a seed. About half of an agent's elements are the base's.

    `special` is the share of elements that are any bits at all, and of those with special values.
    """

    def __init__(self, case: Case, elements: int, seed: int = 0, special: float = 0.03) -> None:
        self.case, self.elements = case, elements
        rng = np.random.default_rng(seed)
        values = rng.normal(0, 0.02, elements)
        base = sprinkled(rng, encoded(values, case.base), case.base, special)
        self._rows: list[Rows | None] = [base]
        for t, kind in enumerate(case.kinds):
            rows = None
            if kind != Kind.ABSENT:
                step = rng.normal(0, 0.005, elements) * (rng.random(elements) < 0.5)
                dtype = Dtype.F32 if kind == Kind.DELTA else Dtype(kind)
                rows = encoded(step if kind == Kind.DELTA else values + step, dtype)
                rows = np.where((step == 0)[:, None], base, rows) if kind == case.base else rows
                rows = sprinkled(rng, rows, dtype, special)
                rows = rows[: elements * 2 // 3] if case.short and t % 2 == seed % 2 else rows
            self._rows.append(rows)
        self.numbers = numbers(rng, case)

    @property
    def nbytes(self) -> int:
        """Bytes of base and agents."""
        return sum(rows.nbytes for rows in self._rows if rows is not None)

    def sources(self, begin: int, end: int) -> host.Sources:
        """Elements begin .. end; this object owns the memory."""
        sources = host.Sources(len(self.case.kinds))
        kinds = (self.case.base, *self.case.kinds)
        for index, (rows, kind) in enumerate(zip(self._rows, kinds, strict=True)):
            valid = 0 if rows is None else max(min(len(rows), end) - begin, 0)
            sources.at(12345, begin)
            if rows is not None and valid:
                sources.set(index, int(kind), rows.ctypes.data + begin * rows.shape[1], valid)
        return sources

    def merged(
        self, strip: Callable[..., None], take: Callable[[], host.Taken], length: int | None = None
    ) -> Merged:
        """What a merger's strip and take give, in strips of `length`."""
        case, length = self.case, length or self.elements
        out = np.full((self.elements, case.out.itemsize), 0xA5, np.uint8)
        for begin in range(0, self.elements, length):
            end = min(begin + length, self.elements)
            sources, room = self.sources(begin, end), out[begin:end].reshape(-1)
            strip(sources, end - begin, self.numbers, case.wide, case.out, room)
        taken = take()
        return out, (taken.overflow, taken.moved)

    def expected(self) -> Merged:
        """By the numba loops."""
        core = host.Merger(self.case.program, *self.case.rule, SEED)
        return self.merged(core.strip, core.take)


def numbers(rng: np.random.Generator, case: Case) -> NDArray[np.float64]:
    """What the method's program computes with: parameters, some λ, some thresholds."""
    method, agents = methods.create(case.method, {}), len(case.kinds)
    values = method.settings(["w"], agents)
    values["lambdas"] = rng.choice([1.0, 1.2, 1.1, 1.02, 3e38], (1, agents))
    values["thresholds"] = rng.choice([0.0, 0.004, 1e-5], (1, agents))
    if "density" in values:
        values["density"] = rng.choice([0.5, 0.25, 1.0], values["density"].shape)
    return case.program.numbers(values)[0]


def encoded(values: NDArray[np.float64], dtype: Dtype) -> Rows:
    """Values in a dtype; how they are rounded does not matter, both sides get the same bytes."""
    rows: Rows = torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy()
    return rows.reshape(len(values), dtype.itemsize)


def sprinkled(rng: np.random.Generator, rows: Rows, dtype: Dtype, share: float) -> Rows:
    """A share of any bits at all, and one of zeros, subnormals, the largest, infinities and NaNs."""
    sign, smallest = 1 << (8 * dtype.itemsize - 1), 1 << dtype.mantissa
    top = sign - smallest
    codes = [0, 1, smallest - 1, smallest, top - 1, top, top + 1, top + smallest // 2, sign - 1]
    codes += [sign | code for code in codes]
    special = np.array(codes, f"<u{dtype.itemsize}").view(np.uint8).reshape(len(codes), -1)
    anything = rng.integers(0, 256, rows.shape, np.uint8)
    draw = rng.random(len(rows))[:, None]
    rows = np.where(draw < share, anything, rows)
    return np.where(draw > 1 - share, special[rng.integers(0, len(codes), len(rows))], rows)


def difference(got: Merged, wanted: Merged) -> str | None:
    """What differs, for people; None where nothing does."""
    wrong = np.flatnonzero((got[0] != wanted[0]).any(axis=1))
    if len(wrong):
        first = int(wrong[0])
        one, two = (rows[first, ::-1].tobytes().hex() for rows in (got[0], wanted[0]))
        return f"{len(wrong)} of {len(got[0])} elements differ; element {first} is {one}, not {two}"
    return f"(overflow, moved) is {got[1]}, not {wanted[1]}" if got[1] != wanted[1] else None
