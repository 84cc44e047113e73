"""The delta of a LoRA pair, any range of its elements: scaling · B A, to the bit the same however it is cut.

Loaded only where an agent is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramstream.kernels.formats import unowned
from ramstream.kernels.jit import entry, inner

TILE = 1024
"""Columns at a time: those of STEP k stay in the first cache while the rows go by."""

STEP = 4
"""k at a time, whose sums stay in registers. More would share sets of the cache: rows lie powers of two apart."""


@entry
def low_rank(a: Any, b: Any, scaling: Any, transposed: bool, begin: int, out: Any) -> None:
    """Elements begin .. begin + n of the row-major delta into `out`, float32 (n,).

    a float32 (rank, columns), b float32 (rows, rank), C-contiguous: element (x, y) of the delta, (rows, columns),
    is scaling · Σₖ b[x, k] · a[k, y]. With `transposed` the caller hands over b as (rank, rows): element (x, y) of
    the delta, (columns, rows), is scaling · Σₖ b[k, y] · a[k, x]. Each sum starts from 0 and takes k in ascending
    order; every operation rounds to float32, `scaling` once before. Source: LoRA, arXiv 2106.09685, section 4.1.

    Only what belongs to the x of the range need be there (rows of b, with `transposed` columns of a), if `begin`
    counts from the first of them. ValueError for matrices of different ranks.
    """
    if a.shape[0] != b.shape[0 if transposed else 1]:
        raise ValueError("a and b are of different ranks")
    if transposed:
        _fill(unowned(b), unowned(a).reshape(-1), 1, a.shape[1], np.float32(scaling), begin, unowned(out))
    else:
        _fill(unowned(a), unowned(b).reshape(-1), b.shape[1], 1, np.float32(scaling), begin, unowned(out))


@inner
def _fill(across: Any, down: Any, step: int, stride: int, scaling: Any, begin: int, out: Any) -> None:
    """Element (x, y) is scaling · Σₖ down[x · step + k · stride] · across[k, y]."""
    rank, width = across.shape
    end = begin + len(out)
    out[:] = 0
    for left in range(0, width, TILE):
        for k in range(0, rank, STEP):
            for x in range(begin // width, -(-end // width)):
                first = max(x * width + left, begin)
                last = min(x * width + min(left + TILE, width), end)
                if first < last:
                    total = out[first - begin : last - begin]
                    few, factors = across[k : k + STEP], down[x * step + k * stride :]
                    _add(few, first - x * width, factors, stride, total)
    for i in range(len(out)):
        out[i] *= scaling


@inner
def _add(across: Any, left: int, down: Any, stride: int, total: Any) -> None:
    """The products of STEP k, or of fewer that are left, to a part of one row."""
    right = left + len(total)
    if len(across) == STEP:
        p0, p1, p2, p3 = down[0], down[stride], down[2 * stride], down[3 * stride]
        q0, q1 = across[0, left:right], across[1, left:right]
        q2, q3 = across[2, left:right], across[3, left:right]
        for y in range(len(total)):
            total[y] = total[y] + p0 * q0[y] + p1 * q1[y] + p2 * q2[y] + p3 * q3[y]
        return
    for k in range(len(across)):
        p0, q0 = down[k * stride], across[k, left:right]
        for y in range(len(total)):
            total[y] += p0 * q0[y]
