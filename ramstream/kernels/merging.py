"""Pass 2: masked deltas through a method's core, narrowed into the output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ramstream.kernels.deltas import masked_deltas
from ramstream.kernels.formats import bare_room, copy, narrow
from ramstream.kernels.intrinsics import pointer, run_core
from ramstream.kernels.jit import entry, inner
from ramstream.kernels.layout import BLOCK, E4M3, F64, ITEMSIZE, LANES, LIMIT, SPARE, SPECIAL
from ramstream.kernels.philox import fill


@entry
def merge(
    room: Any,
    inputs: Any,
    rule: Any,
    elements: int,
    task: Any,
    numbers: Any,
    plain: Any,
    out: Any,
    report: Any,
) -> None:
    """One strip by `task` (Task), to address `out`. Adds to report (Report): overflow, moved, squares.

    `numbers` are the core's; `plain` the same without λ, empty where that is no other.
    """
    room, code, core, size = bare_room(room), task.code, task.core, ITEMSIZE[task.code]
    last = len(room.rows) - 1
    result = room.rows[last]
    verbatim, other = code == inputs.codes[0], np.uint64(room.other.ctypes.data)
    copies = verbatim and not task.moves_unchanged
    for start in range(0, elements, BLOCK):
        n, begin = min(BLOCK, elements - start), np.uint64(start * size)
        careful = masked_deltas(room, inputs, rule, start, n, 0)
        source, target = inputs.addresses[0] + begin, out + begin
        if copies and not np.any(room.active):
            copy(
                carray(pointer(source), n * size, np.uint8),
                carray(pointer(target), n * size, np.uint8),
                n * size,
            )
            continue
        prepare(room, task, start, n)
        run_core(core, room.rows, numbers, result, n)
        fitting = narrow(room, last, code, n, target)
        if len(plain):
            run_core(core, room.rows, plain, room.rows[last - 1], n)
            narrow(room, last - 1, code, n, other)
            report.counts[1] += differing(size, target, other, n)
        add_squares(room.rows[0], result, report.lanes, n)
        if not fitting:
            report.counts[0] += lost(room, last, code, n, copies)
            if copies:
                restore(room, source, target, n, size)
        if careful:
            room.mark[:n] = 0


@inner
def prepare(room: Any, task: Any, start: int, n: int) -> None:
    """Rows of agents that are unchanged in the block become zeros, and those of draws are drawn."""
    agents = len(room.active)
    for t in range(agents):
        if not room.active[t]:
            room.rows[t + 1, :n] = 0
        if task.random:
            row = room.rows[agents + 1 + SPARE + t]
            fill(row, n, task.seed, task.name, t, task.first + start)


@inner
def add_squares(base: Any, merged: Any, lanes: Any, n: int) -> None:
    """Add the squares of the merged deltas to the lanes of their elements; NaN is left out."""
    for begin in range(0, n, LANES):
        one, two = base[begin : begin + LANES], merged[begin : begin + LANES]
        for j in range(min(LANES, n - begin)):
            delta = np.float64(two[j]) - np.float64(one[j])
            lanes[j] += delta * delta if delta == delta else 0.0


@entry
def squares(lanes: Any) -> float:
    """The lanes halved pairwise to one sum; they start again from 0."""
    n = LANES
    while n > 1:
        n //= 2
        for j in range(n):
            lanes[j] += lanes[n + j]
    total = lanes[0]
    lanes[:] = 0
    return float(total)


@inner
def unchanged(rows: Any, agents: int, i: int) -> bool:
    for t in range(agents):  # noqa: SIM110
        if rows[t + 1, i] != 0:
            return False
    return True


@inner
def lost(room: Any, k: int, code: int, n: int, copies: bool) -> int:
    """How many results the output dtype, or the arithmetic, could not hold."""
    base, row, agents, total = room.rows[0], room.rows[k], len(room.active), 0
    for i in range(n):
        if copies and unchanged(room.rows, agents, i):
            continue
        if np.isfinite(row[i]):
            total += code != F64 and np.uint32(room.raw[k, i] & np.uint32(0x7FFFFFFF)) >= LIMIT[code]
        elif code == E4M3 and np.isinf(row[i]):
            total += 1
        else:
            total += np.isfinite(base[i]) and not room.mark[i] & SPECIAL
    return total


@inner
def restore(room: Any, source: Any, target: Any, n: int, size: int) -> None:
    """The base's own bytes where nobody changed the element."""
    theirs, ours = carray(pointer(source), n * size, np.uint8), carray(pointer(target), n * size, np.uint8)
    for i in range(n):
        if unchanged(room.rows, len(room.active), i):
            for byte in range(i * size, i * size + size):
                ours[byte] = theirs[byte]


@inner
def differing(size: int, one: Any, two: Any, n: int) -> Any:
    """How many of n items of `size` bytes at two addresses differ."""
    if size == 1:
        return unequal(carray(pointer(one), n, np.uint8), carray(pointer(two), n, np.uint8), n)
    if size == 2:
        return unequal(carray(pointer(one), n, np.uint16), carray(pointer(two), n, np.uint16), n)
    if size == 4:
        return unequal(carray(pointer(one), n, np.uint32), carray(pointer(two), n, np.uint32), n)
    return unequal(carray(pointer(one), n, np.uint64), carray(pointer(two), n, np.uint64), n)


@inner
def unequal(one: Any, two: Any, n: int) -> int:
    total = 0
    for i in range(n):
        total += one[i] != two[i]
    return total
