"""Elements of a tensor that do not lie one after the other (`types.Strided`), in row-major order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray


def gather(
    data: NDArray[Any], shape: Sequence[int], strides: Sequence[int], begin: int, out: NDArray[Any]
) -> None:
    """Copy elements begin .. begin + len(out), counted in row-major order, of a strided tensor into `out`.

    `data` holds raw items (uint8, 16, 32 or 64), 1-d, from the tensor's element (0, …, 0) on; strides count
    items. Nothing else is allocated. ValueError where `data` ends before the tensor's last element.
    """
    if not len(out):
        return
    dimensions = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1] or [(1, 0)]
    needed = 1 + sum((n - 1) * stride for n, stride in dimensions)
    if needed > len(data):
        raise ValueError(f"a tensor that takes {needed} items, and {len(data)} of them")
    sizes, steps = zip(*dimensions, strict=True)
    view = as_strided(data, sizes, [step * data.itemsize for step in steps], writeable=False)
    _copy(view, begin, out)


def _copy(view: NDArray[Any], begin: int, out: NDArray[Any]) -> None:
    """The end of a row, whole rows, and the beginning of one; rows of rows are cut in the same way."""
    if view.ndim == 1:
        out[:] = view[begin : begin + len(out)]
        return
    row = view[0].size
    first, skip = divmod(begin, row)
    done = min(row - skip, len(out)) if skip else 0
    if done:
        _copy(view[first], skip, out[:done])
        first += 1
    whole = (len(out) - done) // row
    after = done + whole * row
    out[done:after].reshape(whole, *view.shape[1:])[...] = view[first : first + whole]
    if after < len(out):
        _copy(view[first + whole], 0, out[after:])
