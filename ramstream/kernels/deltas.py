"""Who changed what in a block: deltas, masked so that exactly the changed ones are not 0.

Finite values take loops that vectorise and know nothing of NaN. The largest magnitude of a block, as an integer,
says whether the careful element-by-element form is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramstream.kernels.formats import infinity, largest, load, magnitude_mask, narrow
from ramstream.kernels.intrinsics import bits_of, prefetch
from ramstream.kernels.jit import inner
from ramstream.kernels.layout import ABSENT, DELTA, F32, F64, ITEMSIZE, LANES, REFUSED, SPECIAL


@inner
def masked_deltas(room: Any, inputs: Any, rule: Any, start: int, n: int, offset: int) -> Any:
    """Elements start .. start + n of a strip: the base into its row, masked deltas into those of active agents.

    Rows are zero from n to the next multiple of LANES. `offset` is the place of `start` in its piece. Returns
    whether any value or delta is not finite; then `mark` says where, and all agents are active.
    """
    rows, raw, bits, active = room.rows, room.raw, room.bits, room.active
    zeros, limit = len(active) + 1, infinity(bits)
    base_careful = careful = False
    for k in range(zeros):
        code, size = inputs.codes[k], min(n, inputs.valid[k] - start)
        if k > 0:
            active[k - 1] = 0
        if code == ABSENT or size <= 0:
            continue
        itemsize = 4 if code == DELTA else ITEMSIZE[code]
        address = inputs.addresses[k] + np.uint64(start * itemsize)
        load(rows[k], raw[k], code, address, size)
        for line in range(size * itemsize, 2 * size * itemsize, 64):  # the next block arrives meanwhile
            prefetch(address + np.uint64(line))
        if rule.compare >= 0:
            round_row(room, k, zeros + min(k, 1) + 1, code == DELTA, rule.compare, size)
        if k == 0:
            base_careful = largest(bits[0], n) >= limit
            continue
        origin = zeros if code == DELTA else 0
        if rule.compare >= 0:
            top = mask_compared(room, k, origin, size, rule.epsilon)
        else:
            top = mask(rows[origin], rows[k], bits, size, rule.epsilon)
        active[k - 1] = rule.compare >= 0 or top > bits_of(rule.epsilon)
        if base_careful or top >= limit:
            careful = True
            load(rows[k], raw[k], code, address, size)
            mask_carefully(room, rule, k, origin, size, offset)
            active[k - 1] = 1
        rows[k, size : (n + LANES - 1) // LANES * LANES] = 0
    if base_careful or careful:
        settle(room, n, offset)
    return base_careful or careful


@inner
def mask(origin: Any, row: Any, bits: Any, n: int, epsilon: Any) -> Any:
    """Turn values into masked deltas; returns the largest |delta| as bits. `bits` only says the width."""
    mask, threshold = magnitude_mask(bits), bits_of(epsilon)
    top, zero = bits.dtype.type(0), row.dtype.type(0)
    for i in range(n):
        delta = row[i] - origin[i]
        size = bits.dtype.type(bits_of(delta) & mask)
        row[i] = delta if size > threshold else zero
        top = max(top, size)
    return top


@inner
def round_row(room: Any, k: int, to: int, is_delta: bool, code: int, n: int) -> None:
    """Row `to` becomes the values of source k rounded to dtype `code`."""
    row, base, rounded = room.rows[k], room.rows[0], room.rows[to]
    for i in range(n):
        rounded[i] = base[i] + row[i] if is_delta else row[i]
    if code != F64 and not (code == F32 and room.rows.itemsize == 4):
        address = np.uint64(room.other.ctypes.data)
        narrow(room, to, code, n, address)
        load(rounded, room.raw[to], code, address, n)


@inner
def mask_compared(room: Any, k: int, origin: int, n: int, epsilon: Any) -> Any:
    """`mask` by the rounded values: the base's in row zeros + 1, the agent's in row zeros + 2."""
    zeros = len(room.active) + 1
    row, start, base, rounded = room.rows[k], room.rows[origin], room.rows[zeros + 1], room.rows[zeros + 2]
    for i in range(n):
        row[i] -= start[i]
    top, zero = largest(room.bits[k], n), row.dtype.type(0)
    for i in range(n):
        row[i] = row[i] if abs(rounded[i] - base[i]) > epsilon else zero
    return top


@inner
def mask_carefully(room: Any, rule: Any, k: int, origin: int, n: int, offset: int) -> None:
    """`mask` where something is not finite: counts it and follows the policy."""
    zeros = len(room.active) + 1
    row, base, rounded = room.rows[k], room.rows[0], room.rows[zeros + 2]
    for i in range(n):
        delta, own = row[i] - room.rows[origin, i], not np.isfinite(row[i])
        if own or not np.isfinite(base[i]):
            same = row[i] == 0 if origin == zeros else room.bits[k, i] == room.bits[0, i]
            changed = rule.keep and not same
            if own:
                room.finite[0, k] += 1
                room.mark[i] |= SPECIAL
            if own and not same:
                refuse(room.finite, k, offset + i)
            elif not same:
                room.mark[i] |= REFUSED
        elif rule.compare >= 0:
            changed = abs(rounded[i] - room.rows[zeros + 1, i]) > rule.epsilon
        else:
            changed = abs(delta) > rule.epsilon
        row[i] = delta if changed else 0


@inner
def refuse(finite: Any, source: int, index: int) -> None:
    finite[1, source] += 1
    if finite[2, source] < 0:
        finite[2, source] = index


@inner
def settle(room: Any, n: int, offset: int) -> None:
    """After a block with non-finite values: the base's tallies, and zeros for the agents that were skipped."""
    for i in range(n):
        room.finite[0, 0] += not np.isfinite(room.rows[0, i])
        if room.mark[i] & REFUSED:
            refuse(room.finite, 0, offset + i)
    for t in range(len(room.active)):
        if not room.active[t]:
            room.active[t] = 1  # the sums see 0 · ∞
            room.rows[t + 1] = 0
