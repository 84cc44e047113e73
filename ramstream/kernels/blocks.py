"""Dequantising: float8 elements times the scale of the block of their matrix that they lie in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from ramstream.kernels.formats import load, unowned
from ramstream.kernels.intrinsics import pointer
from ramstream.kernels.jit import entry, inner
from ramstream.kernels.layout import BLOCK


@inner
def scale_row(values: Any, factors: Any, column: int, width: int) -> None:
    """Multiply consecutive elements of a row, from `column` on, by the factor of their `width` columns.

    Every loop begins at 0: where an index might be negative numba's wraparound keeps it from vectorising well.
    """
    if width == 1:
        own = factors[column : column + len(values)]
        for i in range(len(values)):
            values[i] *= own[i]
        return
    done = 0
    while done < len(values):
        block = (column + done) // width
        part, factor = values[done : (block + 1) * width - column], factors[block]
        for i in range(len(part)):
            part[i] *= factor
        done += len(part)


@entry
def dequantise(
    code: int,
    address: Any,
    scale: Any,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
    begin: int,
    out: Any,
) -> None:
    """Elements begin .. begin + len(out) of a tensor of matrices (rows, columns), from float8 bytes at `address`.

    code: E4M3 or E5M2. scale: float32 (matrices, scale rows, scale columns), contiguous; one matrix serves all.
    out: float32 (n,), contiguous; each element one multiplication, widened(raw) · scale of its block.
    """
    values, scales, done = unowned(out), unowned(scale), 0
    bits = carray(pointer(out.ctypes.data), len(out), np.uint32)
    while done < len(out):
        row, column = divmod(begin + done, columns)
        matrix, row = divmod(row, rows)
        end = min(done + min(columns - column, BLOCK), len(out))
        part = values[done:end]
        load(part, bits[done:end], code, np.uint64(address) + np.uint64(done), end - done)
        factors = scales[matrix if len(scales) > 1 else 0, row // block_rows]
        scale_row(part, factors, column, block_columns)
        done = end
