"""Pass 1: pack who changed each element into bits, and take the tallies from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ramstream.kernels.deltas import masked_deltas
from ramstream.kernels.formats import bare_counts, bare_room
from ramstream.kernels.intrinsics import above_zero, below_zero, float_of, nonzero, pointer, popcount
from ramstream.kernels.jit import entry, inner
from ramstream.kernels.layout import BLOCK, LANES
from ramstream.types import STEPS


@entry
def count(
    room: Any,
    inputs: Any,
    rule: Any,
    counts: Any,
    elements: int,
    offset: int,
    words: Any,
    stride: int,
    steps: Any,
) -> None:
    """One strip: its tallies, and agent t's packed bits to address words + t · stride.

    `offset` is the strip's place in the piece; `steps` is the storage dtype's (mantissa, smallest exponent), or
    (-1, 0) for no step histogram.
    """
    room, counts = bare_room(room), bare_counts(counts)
    for start in range(0, elements, BLOCK):
        n = min(BLOCK, elements - start)
        careful = masked_deltas(room, inputs, rule, start, n, offset + start)
        if careful:
            room.mark[:n] = 0
        if len(counts.patterns):
            counts.patterns[0] += n
        if pack(room, counts.planes, (n + 63) // 64, words + np.uint64(start // 8), stride, careful):
            tally(room, counts, (n + 63) // 64)
            add_sums(room, counts, (n + LANES - 1) // LANES)
            if steps[0] >= 0:
                tally_steps(room, counts, n, steps)


@inner
def pack(room: Any, planes: Any, length: int, words: Any, stride: int, careful: bool) -> bool:
    """The block's planes, and the words of who changed it to their addresses; returns whether anyone did.

    Only in a careful block may a changed element be neither negative nor positive: NaN.
    """
    anyone = False
    for t in range(len(room.active)):
        target, row = carray(pointer(words + np.uint64(t * stride)), length, np.uint64), room.rows[t + 1]
        if room.active[t]:
            anyone = True
            for w in range(length):
                word, negative = nonzero(row, w), below_zero(row, w)
                planes[0, t, w] = target[w] = word
                planes[1, t, w] = negative
                planes[2, t, w] = above_zero(row, w) if careful else word ^ negative
        else:
            target[:] = 0
            planes[0, t, :length] = 0
    return anyone


@inner
def tally(room: Any, counts: Any, length: int) -> None:
    """Popcounts of the planes."""
    changed, stack = counts.planes[0], counts.stack
    for t in range(len(room.active)):
        for s in range(t if room.active[t] else 0):
            if room.active[s]:
                counts.pairs[s, t] += common(changed[s], changed[t], stack[0], length)
                counts.conflicts[s, t] += opposite(counts.planes, s, t, length)
    if len(counts.patterns):
        tally_patterns(changed, stack, counts.patterns, length)
    else:
        tally_overlap(changed, stack, room.active, counts.overlap, length)


@inner
def common(one: Any, two: Any, out: Any, length: int) -> int:
    """out = one & two; returns the number of bits set."""
    total = 0
    for w in range(length):
        both = one[w] & two[w]
        out[w] = both
        total += popcount(both)
    return total


@inner
def opposite(planes: Any, s: int, t: int, length: int) -> int:
    """Elements where one delta is negative and the other positive; a NaN is neither."""
    down, other_down, up, other_up = planes[1, s], planes[1, t], planes[2, s], planes[2, t]
    total = 0
    for w in range(length):
        total += popcount((down[w] & other_up[w]) | (up[w] & other_down[w]))
    return total


@inner
def tally_patterns(changed: Any, stack: Any, patterns: Any, length: int) -> None:
    """Elements whose contributors include each set of agents.

    In numerical order a set without its lowest agent is the last one that was written at its own lowest agent's
    place in the stack.
    """
    for subset in range(1, len(patterns)):
        lowest, rest = trailing_zeros(subset), subset & (subset - 1)
        others = stack[trailing_zeros(rest)] if rest else changed[lowest]
        patterns[subset] += common(others, changed[lowest], stack[lowest], length)


@inner
def trailing_zeros(number: int) -> int:
    place = 0
    while not (number >> place) & 1:
        place += 1
    return place


@inner
def tally_overlap(changed: Any, stack: Any, active: Any, overlap: Any, length: int) -> None:
    """Elements of each agent by how many contributors they have: binary digits of that number as seven planes."""
    stack[:7, :length] = 0
    for t in range(len(active)):
        for w in range(length if active[t] else 0):
            carry = changed[t, w]
            for digit in range(7):
                before = stack[digit, w]
                stack[digit, w] = before ^ carry
                carry &= before
    exactly = stack[7]
    for contributors in range(1, len(active) + 1):
        some = np.uint64(0)
        for w in range(length):
            word = ~np.uint64(0)
            for digit in range(7):
                word &= stack[digit, w] if (contributors >> digit) & 1 else ~stack[digit, w]
            exactly[w] = word
            some |= word
        for t in range(len(active) if some else 0):
            if active[t]:
                overlap[t, contributors - 1] += common(changed[t], exactly, stack[8], length)


@inner
def add_sums(room: Any, counts: Any, times: int) -> None:
    """The float sums of a block of `times` · LANES elements."""
    rows, active, lanes, used = room.rows, room.active, counts.lanes, counts.used
    place = len(active)
    for t in range(len(active)):
        for s in range(t):
            if active[t] and active[s]:
                add_products(rows[s + 1], rows[t + 1], ready(lanes, used, place + s), times)
        place += t + 1
        if active[t]:
            add_norms(rows[t + 1], ready(lanes, used, t), ready(lanes, used, place - 1), times)


@inner
def ready(lanes: Any, used: Any, place: int) -> Any:
    """The lanes of one sum, zeroed before their first use in a piece."""
    if not used[place]:
        used[place] = 1
        lanes[place] = 0.0
    return lanes[place]


@inner
def add_norms(row: Any, sizes: Any, squares: Any, times: int) -> None:
    if times == 4:  # a whole block: the lanes are read and written once
        for j in range(LANES):
            one, two = np.float64(row[j]), np.float64(row[j + LANES])
            three, four = np.float64(row[j + 2 * LANES]), np.float64(row[j + 3 * LANES])
            sizes[j] = sizes[j] + abs(one) + abs(two) + abs(three) + abs(four)
            squares[j] = squares[j] + one * one + two * two + three * three + four * four
        return
    for begin in range(0, times * LANES, LANES):
        part = row[begin : begin + LANES]
        for j in range(LANES):
            value = np.float64(part[j])
            sizes[j] += abs(value)
            squares[j] += value * value


@inner
def add_products(one: Any, two: Any, lanes: Any, times: int) -> None:
    if times == 4:
        for j in range(LANES):
            total = lanes[j] + np.float64(one[j]) * np.float64(two[j])
            total += np.float64(one[j + LANES]) * np.float64(two[j + LANES])
            total += np.float64(one[j + 2 * LANES]) * np.float64(two[j + 2 * LANES])
            lanes[j] = total + np.float64(one[j + 3 * LANES]) * np.float64(two[j + 3 * LANES])
        return
    for begin in range(0, times * LANES, LANES):
        left, right = one[begin : begin + LANES], two[begin : begin + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(left[j]) * np.float64(right[j])


@inner
def tally_steps(room: Any, counts: Any, n: int, steps: Any) -> None:
    """|delta| in steps of the base's storage dtype, by agent, unique and shared elements apart."""
    changed, once, more = counts.planes[0], counts.stack[0], counts.stack[1]
    once[:] = 0
    more[:] = 0
    for t in range(len(room.active)):
        for w in range((n + 63) // 64):
            more[w] |= once[w] & changed[t, w]
            once[w] |= changed[t, w]
    histogram = counts.histogram
    for t in range(len(room.active)):
        if not room.active[t]:
            continue
        scale_deltas(room.bits[0], room.rows[t + 1], n, steps, counts.scale)
        histogram[:] = 0
        for i in range(n):  # four histograms, as the same counter twice in a row waits for itself
            shared = np.int64(more[i >> 6] >> np.uint64(i & 63)) & 1
            histogram[i & 3, 64 * shared + counts.scale[i]] += 1
        for part in range(4):
            for k in range(STEPS):
                counts.steps[t, 0, k] += histogram[part, k + 1]
                counts.steps[t, 1, k] += histogram[part, k + 65]


@inner
def scale_deltas(base: Any, row: Any, n: int, steps: Any, scale: Any) -> None:
    """Each delta as 1 .. STEPS, the last for more; 0 where it is 0. `base` in bits.

    A step is a power of two whose reciprocal may be out of range: it is multiplied by in two halves, exact
    wherever the result is not far off the scale.
    """
    mantissa, bias, special = (23, 127, 255) if base.itemsize == 4 else (52, 1023, 2047)
    for i in range(n):
        field = np.int64(base[i] >> base.dtype.type(mantissa)) & special
        power = steps[0] - max(field - bias, steps[1])
        one = float_of(base.dtype.type(((power >> 1) + bias) << mantissa))
        two = float_of(base.dtype.type((power - (power >> 1) + bias) << mantissa))
        size = np.rint(abs(row[i]) * one * two)
        k = max(np.int64(size), 1) if size < STEPS and field != special else STEPS
        scale[i] = k if row[i] != 0 else 0


@entry
def close(counts: Any) -> None:
    """The end of a piece: lanes are halved pairwise, counts of sets become exact, matrices symmetric."""
    agents = place = len(counts.l1)
    for t in range(agents):
        counts.l1[t] = halved(counts, t)
        for s in range(t + 1):
            counts.dots[s, t] = counts.dots[t, s] = halved(counts, place)
            place += 1
    close_patterns(counts.patterns, counts.overlap, agents)
    for t in range(agents):
        counts.pairs[t, t] = counts.overlap[t].sum()
        for s in range(t):
            counts.pairs[t, s] = counts.pairs[s, t]
            counts.conflicts[t, s] = counts.conflicts[s, t]


@inner
def close_patterns(patterns: Any, overlap: Any, agents: int) -> None:
    for t in range(agents):
        for subset in range(len(patterns)):
            if not (subset >> t) & 1:
                patterns[subset] -= patterns[subset | (1 << t)]
    for subset in range(1, len(patterns)):
        others = popcount(np.uint64(subset)) - 1
        for t in range(agents):
            overlap[t, others] += patterns[subset] * ((subset >> t) & 1)


@inner
def halved(counts: Any, place: int) -> float:
    if not counts.used[place]:
        return 0.0
    counts.used[place] = 0
    lanes, n = counts.lanes[place], LANES
    while n > 1:
        n //= 2
        for j in range(n):
            lanes[j] += lanes[n + j]
    return float(lanes[0])
