"""Widening and narrowing: raw elements of every float dtype to float32 or float64 rows, and back.

Narrowing rounds to nearest, ties to even, by integer operations; never a library cast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ramstream.kernels.intrinsics import bits_of, float_of, pointer
from ramstream.kernels.jit import inner
from ramstream.kernels.layout import (
    BEYOND,
    BF16,
    BIAS,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    ITEMSIZE,
    LIMIT,
    MANTISSA,
    NAN,
    Counts,
    Room,
)


@inner
def unowned(array: Any) -> Any:
    """The same array, but slices of it do without numba's reference counts, which cost more than short loops do.

    For the same reason functions that are called often take arrays, not a tuple with owned ones in it.
    """
    return carray(pointer(array.ctypes.data), array.shape, array.dtype)


@inner
def bare_room(room: Any) -> Any:
    rows, bits, raw, active = unowned(room.rows), unowned(room.bits), unowned(room.raw), unowned(room.active)
    return Room(rows, bits, raw, room.other, room.mark, active, room.finite)


@inner
def bare_counts(counts: Any) -> Any:
    matrices = (counts.overlap, counts.pairs, counts.conflicts, unowned(counts.patterns), counts.steps)
    planes, stack, lanes, used = counts.planes, counts.stack, counts.lanes, counts.used
    space = (unowned(planes), unowned(stack), unowned(lanes), unowned(used), counts.scale, counts.histogram)
    return Counts(*matrices, counts.l1, counts.dots, *space)


@inner
def infinity(bits: Any) -> Any:
    """The bits of +∞, in the width of the array `bits`."""
    return bits.dtype.type(0x7F800000) if bits.itemsize == 4 else bits.dtype.type(0x7FF0000000000000)


@inner
def magnitude_mask(bits: Any) -> Any:
    """All bits but the sign."""
    return bits.dtype.type(0x7FFFFFFF) if bits.itemsize == 4 else bits.dtype.type(0x7FFFFFFFFFFFFFFF)


@inner
def largest(bits: Any, n: int) -> Any:
    """The largest magnitude of n elements, as bits."""
    mask, top = magnitude_mask(bits), bits.dtype.type(0)
    for i in range(n):
        top = max(top, bits.dtype.type(bits[i] & mask))
    return top


@inner
def copy(source: Any, target: Any, n: int) -> None:
    for i in range(n):
        target[i] = source[i]


# Widening


@inner
def small(code: Any, shift: Any, scale: Any, special: Any) -> Any:
    """float32 bits of a 16-bit pattern that is a float after a shift and a multiplication by a power of two.

    From `special` on magnitudes are infinities and NaNs: the exponent is set, the payload is not touched.
    """
    sign = np.uint32(np.uint32(code & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(np.uint32(code & np.uint32(0x7FFF)) << shift)
    exponent = np.uint32(0x7F800000) if magnitude >= special else np.uint32(0)
    return np.uint32(np.uint32(bits_of(float_of(magnitude) * scale) | exponent) | sign)


@inner
def double_bits(raw: Any) -> Any:
    """float32 bits as float64 bits, exact, NaNs with their payload."""
    special = np.uint64(raw & np.uint32(0x7FFFFF)) << np.uint64(29) | np.uint64(0x7FF0000000000000)
    special |= np.uint64(raw >> np.uint32(31)) << np.uint64(63)
    exponent = np.uint32(raw & np.uint32(0x7F800000))
    return special if exponent == np.uint32(0x7F800000) else bits_of(np.float64(float_of(raw)))


@inner
def load(row: Any, raw: Any, code: int, address: Any, n: int) -> None:
    """n elements of any kind of source at `address` into a row, in the width; exact, NaNs keep their payload."""
    thirteen, to_half, half_special = np.uint32(13), np.float32(2.0**112), np.uint32(0x7C00 << 13)
    if code == F64:
        copy(carray(pointer(address), n, np.float64), row, n)
        return
    if code == BF16:
        halves = carray(pointer(address), n, np.uint16)
        for i in range(n):
            raw[i] = np.uint32(halves[i]) << np.uint32(16)
    elif code == F16:
        halves = carray(pointer(address), n, np.uint16)
        for i in range(n):
            raw[i] = small(np.uint32(halves[i]), thirteen, to_half, half_special)
    elif code == E5M2:
        bytes_ = carray(pointer(address), n, np.uint8)
        for i in range(n):  # the upper half of an F16
            raw[i] = small(np.uint32(np.uint32(bytes_[i]) << np.uint32(8)), thirteen, to_half, half_special)
    elif code == E4M3:
        bytes_ = carray(pointer(address), n, np.uint8)
        for i in range(n):
            pattern = np.uint32(np.uint32(bytes_[i]) << np.uint32(8))
            raw[i] = small(pattern, np.uint32(12), np.float32(2.0**120), np.uint32(0x7F << 20))
    else:
        copy(carray(pointer(address), n, np.uint32), raw, n)
    if row.itemsize == 8:
        for i in range(n):
            row[i] = float_of(double_bits(raw[i]))


# Narrowing


@inner
def nearest(magnitude: int, have: int, want: int, excess: int) -> Any:
    """A finite magnitude's bits, from `have` to `want` mantissa bits and to an exponent bias less by `excess`.

    To nearest, ties to even, subnormals included. May return the bits of infinity, but must not go beyond.
    """
    exponent = magnitude >> have
    mantissa = magnitude & ((1 << have) - 1)
    mantissa += (1 << have) if exponent > 0 else 0
    exponent = max(exponent, 1) - excess
    shift = min(have - want + max(1 - exponent, 0), 60)
    mantissa = (mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift
    return mantissa + ((max(exponent, 1) - 1) << want)


@inner
def single_bits(double: Any) -> Any:
    """float64 bits rounded to float32 bits."""
    magnitude = np.uint64(double & np.uint64(0x7FFFFFFFFFFFFFFF))
    sign = np.uint32(np.uint32(double >> np.uint64(63)) << np.uint32(31))
    if magnitude > np.uint64(0x7FF0000000000000):
        return np.uint32(NAN[F32])
    if magnitude >= np.uint64(0x47EFFFFFF0000000):
        return np.uint32(sign | np.uint32(0x7F800000))
    return np.uint32(sign | np.uint32(nearest(np.int64(magnitude), 52, 23, 896)))


@inner
def shorter(raw: Any, mantissa: int, excess: int, sign: int) -> Any:
    """float32 bits that fit a 16- or 8-bit dtype, in that dtype, whose sign is bit `sign`."""
    magnitude = nearest(np.int64(raw & np.uint32(0x7FFFFFFF)), 23, mantissa, excess)
    return magnitude | np.int64(raw >> np.uint32(31)) << sign


@inner
def item(code: int, double: Any, raw: Any) -> Any:
    """Any value in dtype `code`, as uint64; given as float64 bits, and as float32 bits rounded from them."""
    infinite = np.uint64(0x7FF0000000000000)
    magnitude = np.uint32(raw & np.uint32(0x7FFFFFFF))
    if magnitude > np.uint32(0x7F800000) or (code == E4M3 and np.uint64(double & infinite) == infinite):
        return NAN[code]
    if code == F64:
        return np.uint64(double)
    if code == F32:
        return np.uint64(raw)
    sign = 8 * ITEMSIZE[code] - 1
    if magnitude >= LIMIT[code]:
        return BEYOND[code] | np.uint64(np.int64(raw >> np.uint32(31)) << sign)
    return np.uint64(shorter(raw, MANTISSA[code], 127 - BIAS[code], sign))


@inner
def fits(bits: Any, n: int, code: int) -> Any:
    """Whether n values are finite and stay so in dtype `code`. In float64, perhaps False by a hair."""
    top = largest(bits, n)
    if bits.itemsize == 4:
        return top < LIMIT[code]
    if code == F64:
        return top < infinity(bits)
    return top < double_bits(np.uint32(LIMIT[code] - np.uint32(1)))


@inner
def narrow(room: Any, k: int, code: int, n: int, address: Any) -> bool:
    """Row k to `address` in dtype `code`. Returns whether all of it fits."""
    bits, raw = room.bits[k], room.raw[k]
    if bits.itemsize == 8:
        for i in range(n):
            raw[i] = single_bits(bits[i])
    if fits(bits, n, code):
        narrow_fitting(room, k, code, n, address)
        return True
    out, size = carray(pointer(address), n * ITEMSIZE[code], np.uint8), ITEMSIZE[code]
    for i in range(n):
        double = np.uint64(bits[i]) if bits.itemsize == 8 else double_bits(raw[i])
        value = item(code, double, raw[i])
        for byte in range(size):
            out[i * size + byte] = np.uint8(value >> np.uint64(8 * byte) & np.uint64(255))
    return False


@inner
def narrow_fitting(room: Any, k: int, code: int, n: int, address: Any) -> None:
    """`narrow` in loops that vectorise."""
    row, raw, mantissa, excess = room.rows[k], room.raw[k], MANTISSA[code], 127 - BIAS[code]
    if code == BF16:
        halves = carray(pointer(address), n, np.uint16)
        for i in range(n):
            even = np.uint32(np.uint32(raw[i] >> np.uint32(16)) & np.uint32(1))
            halves[i] = np.uint32(np.uint32(raw[i] + np.uint32(0x7FFF)) + even) >> np.uint32(16)
    elif code == F16:
        halves = carray(pointer(address), n, np.uint16)
        for i in range(n):
            halves[i] = shorter(raw[i], mantissa, excess, 15)
    elif code == F32:
        copy(raw, carray(pointer(address), n, np.uint32), n)
    elif code == F64:
        copy(row, carray(pointer(address), n, np.float64), n)
    else:
        bytes_ = carray(pointer(address), n, np.uint8)
        for i in range(n):
            bytes_[i] = shorter(raw[i], mantissa, excess, 7)
