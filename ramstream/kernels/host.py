"""A worker's buffers around the numba loops: `Counter` for pass 1, `Merger` for pass 2.

A strip is up to STRIP consecutive elements of one piece. The strips of a piece come in order, and each except the
last is a multiple of `layout.BLOCK` elements. Objects here serve one thread at a time; their buffers are made once.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ramstream import tallies
from ramstream.kernels import counting, layout, merging
from ramstream.kernels.cores import core, rows_of
from ramstream.kernels.program import Program
from ramstream.types import Dtype, Kind


class Sources:
    """Where one strip of base and agents lies in memory; index 0 is the base.

    codes (T + 1,) int64: Dtype of the raw bytes, Kind.DELTA (float32 deltas) or Kind.ABSENT.
    addresses (T + 1,) uint64: the first byte, aligned to the item; 0 when absent.
    valid (T + 1,) int64: how many of the strip's elements there are; after them the agent is unchanged.
    """

    def __init__(self, agents: int) -> None:
        self.codes = np.full(agents + 1, int(Kind.ABSENT), np.int64)
        self.addresses = np.zeros(agents + 1, np.uint64)
        self.valid = np.zeros(agents + 1, np.int64)
        self.name, self.first = np.uint64(0), 0

    def at(self, name: int, first: int) -> None:
        """Say where the strip is, for random draws: the key of its tensor's name, its first element there."""
        self.name, self.first = np.uint64(name), first

    def set(self, index: int, code: int, address: int, valid: int) -> None:
        """Describe source `index` of the strip."""
        self.codes[index] = code
        self.addresses[index] = address
        self.valid[index] = valid

    def inputs(self) -> layout.Inputs:
        """The same arrays, for the loops."""
        return layout.Inputs(self.codes, self.addresses, self.valid)


class Buffers:
    """Buffers and rule for both widths; those of float64 are made when first wanted."""

    def __init__(
        self, agents: int, rows: int, epsilon: float, on_nonfinite: str, compare: Dtype | None
    ) -> None:
        self._agents, self._rows = agents, rows
        self._epsilon = epsilon + 0.0  # not -0.0: the loops compare magnitudes as integers
        self._compare = -1 if compare is None else int(compare)
        self._keep = on_nonfinite == "keep"
        self._finite = np.zeros((3, agents + 1), np.int64)
        self._made: dict[bool, tuple[layout.Room, layout.Rule]] = {}

    def _width(self, wide: bool) -> tuple[layout.Room, layout.Rule]:
        if wide not in self._made:
            room = _room(self._agents, self._rows, wide, self._finite)
            with np.errstate(over="ignore"):
                epsilon = room.rows.dtype.type(self._epsilon)
            self._made[wide] = room, layout.Rule(epsilon, self._compare, self._keep)
        return self._made[wide]


def _zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array that starts on a cache line: vectors that straddle two cost the loops a third."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _room(agents: int, count: int, wide: bool, finite: NDArray[np.int64]) -> layout.Room:
    shape = (count, layout.BLOCK)
    rows = _zeros(shape, np.float64 if wide else np.float32)
    bits = rows.view(np.uint64 if wide else np.uint32)
    raw = _zeros(shape, np.uint32) if wide else bits
    other = _zeros((layout.BLOCK,), np.uint64)
    mark, active = np.zeros(layout.BLOCK, np.uint8), np.zeros(agents, np.uint8)
    return layout.Room(rows, bits, raw, other, mark, active, finite)


class Counter(Buffers):
    """Counts pieces, a strip at a time: begin, strip, .., finish."""

    def __init__(self, agents: int, epsilon: float, on_nonfinite: str, compare: Dtype | None) -> None:
        super().__init__(agents, agents + 1 + layout.SPARE, epsilon, on_nonfinite, compare)
        self._record = tallies.empty(agents, 1)
        self._counts = _counts(self._record[0], agents)
        self._offset, self._wide, self._steps = 0, False, (-1, 0)

    def begin(self, storage: Dtype, wide: bool, steps: bool) -> None:
        """Start a piece: `storage` is the base's dtype, `wide` computes in float64, `steps` takes the histogram."""
        self._record[...] = tallies.empty(self._agents, 1)
        self._finite[...] = 0
        self._finite[2] = -1
        self._counts.used[...] = 0
        self._offset, self._wide = 0, wide
        self._steps = (int(layout.MANTISSA[storage]), 1 - int(layout.BIAS[storage])) if steps else (-1, 0)

    def strip(self, sources: Sources, elements: int, bits: NDArray[np.uint64]) -> None:
        """Tally the next `elements` elements, and write who changed them to `bits`.

        bits uint64 (T, at least elements / 64), rows contiguous: bit j of word w is element 64 w + j of the
        strip; the bits after the last element are 0.
        """
        room, rule = self._width(self._wide)
        words, stride = np.uint64(bits.ctypes.data), bits.strides[0]
        with quiet():
            counting.count(
                room, sources.inputs(), rule, self._counts, elements, self._offset, words, stride, self._steps
            )
        self._offset += elements

    def finish(self) -> Any:
        """The piece's record of `tallies.tally_dtype`; refused_first counts from the start of the piece."""
        with quiet():
            counting.close(self._counts)
        record = self._record[0]
        record["l2"] = record["dots"].diagonal()
        record["nonfinite"], record["refused"], record["refused_first"] = self._finite
        return self._record.copy()[0]


def _counts(record: Any, agents: int) -> layout.Counts:
    words, sums = layout.BLOCK // 64, agents + agents * (agents + 1) // 2
    return layout.Counts(
        overlap=record["overlap"],
        pairs=record["pairs"],
        conflicts=record["sign_conflicts"],
        patterns=record["patterns"],
        steps=record["steps"],
        l1=record["l1"],
        dots=record["dots"],
        planes=_zeros((3, agents, words), np.uint64),
        stack=_zeros((9, words), np.uint64),
        lanes=_zeros((sums, layout.LANES), np.float64),
        used=np.zeros(sums, np.uint8),
        scale=np.zeros(layout.BLOCK, np.uint8),
        histogram=np.zeros((4, 128), np.int64),
    )


class Taken(NamedTuple):
    """What a merger counted since it was last asked."""

    overflow: int
    """Elements beyond the output's range."""
    moved: int
    """Elements that λ moved."""
    squares: float
    """Σ of the squares of the merged deltas, before they were narrowed."""


class Merger(Buffers):
    """Merges strips by a program; what it counts adds up until it is taken, once a piece."""

    def __init__(
        self, program: Program, epsilon: float, on_nonfinite: str, compare: Dtype | None, seed: int = 0
    ) -> None:
        super().__init__(program.agents, rows_of(program), epsilon, on_nonfinite, compare)
        self._program, self._seed = program, np.uint64(seed)
        self._cores: dict[bool, Any] = {}
        self._report = layout.Report(np.zeros(2, np.int64), _zeros((layout.LANES,), np.float64))

    def strip(
        self,
        sources: Sources,
        elements: int,
        numbers: NDArray[np.float64],
        wide: bool,
        out_dtype: Dtype,
        out: NDArray[np.uint8],
    ) -> None:
        """Merge `elements` elements into `out`, their bytes in `out_dtype`, aligned.

        numbers float64 (columns of the program,), rounded once to the width.
        """
        room, rule = self._width(wide)
        program, width = self._program, room.rows.dtype
        with quiet():
            own, plain = at_width(program, numbers, width)
            if wide not in self._cores:
                self._cores[wide] = core(program, wide)
            task = layout.Task(
                self._cores[wide],
                int(out_dtype),
                program.random,
                program.moves_unchanged,
                self._seed,
                sources.name,
                sources.first,
            )
            target = np.uint64(out.ctypes.data)
            merging.merge(room, sources.inputs(), rule, elements, task, own, plain, target, self._report)

    def take(self) -> Taken:
        """What was counted; it starts again from 0."""
        overflow, moved = self._report.counts.tolist()
        self._report.counts[...] = 0
        with quiet():
            return Taken(overflow, moved, merging.squares(self._report.lanes))


def at_width(
    program: Program, numbers: NDArray[np.float64], width: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """A program's numbers rounded to the width, and the same without λ; the latter empty where that is no other."""
    with np.errstate(over="ignore"):
        own = numbers.astype(width)
    plain = own.copy()
    plain[program.lambdas] = 1
    return own, plain if (plain != own).any() else plain[:0]


def quiet() -> AbstractContextManager[Any]:
    """Without numba the loops' infinities and wrapping integers would warn."""
    return np.errstate(all="ignore") if numba.config.DISABLE_JIT else nullcontext()


def counter_bytes(agents: int) -> int:
    """Upper bound of the bytes a `Counter` holds, both widths in use."""
    sums = agents + agents * (agents + 1) // 2
    counts = 8 * layout.LANES * sums + 8 * (3 * agents + 9) * layout.BLOCK // 64 + layout.BLOCK + 4096
    return merger_bytes(agents, agents + 1 + layout.SPARE) + counts + 2 * tallies.tally_dtype(agents).itemsize


def merger_bytes(agents: int, rows: int) -> int:
    """Upper bound of the bytes a `Merger` with so many rows holds, both widths in use."""
    return rows * layout.BLOCK * (4 + 8 + 4) + 2 * 9 * layout.BLOCK + 128 * (agents + 1) + 8 * layout.LANES


def flush_to_zero_is_off() -> bool:
    """Whether subnormal numbers survive arithmetic in this thread, as operands and as results."""
    smallest, half = np.array([2.0**-149, 2.0**-126], np.float32), np.array([1, 0.5], np.float32)
    return bool((smallest * half > 0).all())
