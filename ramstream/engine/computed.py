"""Elements of computed tensors (`types.Recipe`): what a worker makes of the bytes that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream.checkpoint.reader import Reader
from ramstream.plan import CountPlan, Source
from ramstream.types import ITEMSIZE, STRIP, Dtype, LowRank, Scaled, Strided

_STEP = 1 << 17
"""Items that are read at once of what is held whole, so that a reader's buffer stays short."""

_WIDENING = 32
"""Bytes an item while it is read and widened: the reader's buffer and numpy's temporaries."""


class Computed:
    """Computes strips of one worker's sources; what a recipe needs whole is held while its tensor lasts."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        self._out: dict[int, NDArray[np.uint8]] = {}
        self._held: dict[int, tuple[Source, list[NDArray[Any]]]] = {}

    def values(self, k: int, source: Source, begin: int, n: int) -> NDArray[np.uint8]:
        """Elements begin .. begin + n of checkpoint k's tensor, bytes in `source.dtype`; valid until its next."""
        room = self._out.get(k)
        if room is None:
            room = self._out[k] = np.empty(STRIP * 8, np.uint8)
        out = room[: n * ITEMSIZE[source.dtype]]
        held = self._whole(k, source)
        if isinstance(source.recipe, Strided):
            from ramstream.checkpoint.strided import gather

            gather(held[0], source.shape, source.recipe.strides, begin, out.view(held[0].dtype))
        elif isinstance(source.recipe, LowRank):
            from ramstream.kernels.lowrank import low_rank

            scaling, transposed = np.float32(source.recipe.scaling), source.recipe.transposed
            low_rank(held[0], held[1], scaling, transposed, begin, out.view(np.float32))
        elif isinstance(source.recipe, Scaled):
            self._scaled(k, source, source.recipe, held[0], begin, out.view(np.float32))
        if not isinstance(source.recipe, Strided):
            values = out.view(np.float32)
            values[np.isnan(values)] = np.nan  # which NaN arithmetic gives depends on the machine
        return out

    def _scaled(
        self,
        k: int,
        source: Source,
        recipe: Scaled,
        scale: NDArray[np.float32],
        begin: int,
        out: NDArray[np.float32],
    ) -> None:
        from ramstream.kernels.blocks import dequantise

        raw = self._readers[k].read(source.file, source.offset + begin, len(out), 1)
        rows, columns = (1, 1, *source.shape)[-2:]
        code, address = int(Dtype[recipe.stored]), np.uint64(raw.ctypes.data)
        dequantise(code, address, scale, rows, columns, *recipe.block, begin, out)

    def _whole(self, k: int, source: Source) -> list[NDArray[Any]]:
        """What the recipe needs whole: a strided tensor itself, otherwise its operands as float32."""
        held = self._held.get(k)
        if held is None or held[0] is not source:
            self._held.pop(k, None)  # before the new ones, or both would count
            held = self._held[k] = (source, self._read_whole(k, source))
        return held[1]

    def _read_whole(self, k: int, source: Source) -> list[NDArray[Any]]:
        if isinstance(source.recipe, Strided):
            whole = np.empty(_span(source, source.recipe), f"u{ITEMSIZE[source.dtype]}")
            self._read(k, source.file, source.offset, source.dtype, whole, lambda raw: raw.view(whole.dtype))
            return [whole]
        operands = [self._operand(k, *vars(operand).values()) for operand in source.operands]
        if isinstance(source.recipe, LowRank) and source.recipe.transposed:
            operands[1] = np.ascontiguousarray(operands[1].T)
        return operands

    def _operand(
        self, k: int, file: int, offset: int, dtype: str, shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        from ramstream.checkpoint.float8 import scales_as_float32

        values = np.empty(prod(shape), np.float32)
        self._read(k, file, offset, dtype, values, lambda raw: scales_as_float32(dtype, raw))
        return values.reshape(shape)

    def _read(self, k: int, file: int, offset: int, dtype: str, into: NDArray[Any], convert: Any) -> None:
        """All items of a tensor through the reader, a step at a time."""
        itemsize = ITEMSIZE.get(dtype, 1)  # scales may be F8_E8M0, which no weight is
        for begin in range(0, len(into), _STEP):
            n = min(_STEP, len(into) - begin)
            raw = self._readers[k].read(file, offset + begin * itemsize, n * itemsize, itemsize)
            into[begin : begin + n] = convert(raw)
            self._readers[k].release()


def _span(source: Source, recipe: Strided) -> int:
    """Items from a strided tensor's first element to its last."""
    if 0 in source.shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(source.shape, recipe.strides, strict=True))


def held_bytes(plan: CountPlan) -> int:
    """Upper bound of the bytes that one worker's `Computed` holds."""
    total = 0
    for k in range(plan.agents + 1):
        sources = [tensor.sources[k] for tensor in (*plan.merged, *plan.copied)]
        needs = [_needs(source) for source in sources if source is not None and source.recipe is not None]
        total += STRIP * 8 + _WIDENING * _STEP + max(needs) if needs else 0
    return total


def _needs(source: Source) -> int:
    if isinstance(source.recipe, Strided):
        return _span(source, source.recipe) * ITEMSIZE[source.dtype]
    return 4 * sum(prod(operand.shape) for operand in (*source.operands, *source.operands[1:]))
