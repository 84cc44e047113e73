"""Pass 2: the merge cores, narrowed into the output."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ramstream.kernels.deltas import masked_deltas
from ramstream.kernels.formats import bare_room, copy, narrow
from ramstream.kernels.intrinsics import pointer
from ramstream.kernels.jit import entry, inner
from ramstream.kernels.layout import BLOCK, E4M3, F64, ITEMSIZE, LIMIT, SPECIAL


@entry
def merge_ram(
    room: Any, inputs: Any, rule: Any, elements: int, coefficients: Any, code: int, out: Any, report: Any
) -> None:
    """One strip by `methods.ram`, in dtype `code` to address `out`; adds to report: overflow, moved."""
    room, agents = bare_room(room), len(room.active)
    plain, result, size = agents + 2, agents + 4, ITEMSIZE[code]
    verbatim, other = code == inputs.codes[0], np.uint64(room.other.ctypes.data)
    scaled = np.any(coefficients != 1)
    for start in range(0, elements, BLOCK):
        n, begin = min(BLOCK, elements - start), np.uint64(start * size)
        careful = masked_deltas(room, inputs, rule, start, n, 0)
        source, target = inputs.addresses[0] + begin, out + begin
        if verbatim and not np.any(room.active):
            copy(
                carray(pointer(source), n * size, np.uint8),
                carray(pointer(target), n * size, np.uint8),
                n * size,
            )
            continue
        ram(room, coefficients, n)
        fitting = narrow(room, result, code, n, target)
        if scaled:
            narrow(room, plain, code, n, other)
            report[1] += differing(size, target, other, n)
        if not fitting:
            report[0] += lost(room, result, code, n, verbatim)
            if verbatim:
                restore(room.rows[agents + 3], source, target, n, size)
        if careful:
            room.mark[:n] = 0


@inner
def ram(room: Any, coefficients: Any, n: int) -> None:
    """The merged values to the last scratch row, those with every coefficient 1 to the first, counts between."""
    rows, agents = room.rows, len(room.active)
    total, number, alone = rows[agents + 2], rows[agents + 3], rows[agents + 4]
    total[:n] = 0
    number[:n] = 0
    alone[:n] = 0
    for t in range(agents):
        if room.active[t]:
            contribute(rows[t + 1], total, number, alone, coefficients[t], n)
    combine(rows[0], total, number, alone, n)


@inner
def contribute(row: Any, total: Any, number: Any, alone: Any, coefficient: Any, n: int) -> None:
    zero, one = row.dtype.type(0), row.dtype.type(1)
    for i in range(n):
        delta = row[i]
        total[i] += delta
        number[i] += one if delta != 0 else zero
        alone[i] = coefficient * delta if delta != 0 else alone[i]


@inner
def combine(base: Any, total: Any, number: Any, alone: Any, n: int) -> None:
    for i in range(n):
        plain = base[i] + total[i] / number[i] if number[i] != 0 else base[i]
        alone[i] = base[i] + alone[i] if number[i] == 1 else plain
        total[i] = plain


@inner
def lost(room: Any, k: int, code: int, n: int, verbatim: bool) -> int:
    """How many results the output dtype, or the arithmetic, could not hold."""
    base, row, number, total = room.rows[0], room.rows[k], room.rows[k - 1], 0
    for i in range(n):
        if verbatim and number[i] == 0:
            continue
        if np.isfinite(row[i]):
            total += code != F64 and np.uint32(room.raw[k, i] & np.uint32(0x7FFFFFFF)) >= LIMIT[code]
        elif code == E4M3 and np.isinf(row[i]):
            total += 1
        else:
            total += np.isfinite(base[i]) and not room.mark[i] & SPECIAL
    return total


@inner
def restore(number: Any, source: Any, target: Any, n: int, size: int) -> None:
    """The base's own bytes where nobody changed the element."""
    theirs, ours = carray(pointer(source), n * size, np.uint8), carray(pointer(target), n * size, np.uint8)
    for i in range(n):
        if number[i] == 0:
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
