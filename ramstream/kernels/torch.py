"""Merging by a method's program with torch, on a GPU or the CPU: the same bits as the numba loops.

Only eager add, sub, mul, div, where and integer operations: a library cast or a fused operation may round
otherwise. Unsigned bits live in signed integers, int32 for float32 and int64 for float64.

On a GPU a strip waits once, at its end. `torch.where` with a Python number would wait for its copy to the device;
`masked_fill` hands it to the kernel.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ramstream.kernels import layout
from ramstream.kernels.host import Sources, Taken, at_width
from ramstream.kernels.philox import uniform_torch
from ramstream.kernels.program import Program
from ramstream.types import STRIP, Dtype, Kind

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}
_ROWS = 24
"""Temporaries of STRIP eight-byte elements that are alive at once, at most, besides four rows an agent and what a
program holds."""
_SEGMENTS = 22 << 20
"""torch takes device memory 20 MiB at a time, for items up to 1 MiB 2 MiB, and splits it among tensors."""


class TorchMerger:
    """Merges strips on `device`, as `host.Merger` does; one thread at a time, on a stream of its own.

    Several of them overlap: while one copies or computes, the threads of the others fill their staging buffers.
    """

    def __init__(
        self,
        program: Program,
        epsilon: float,
        on_nonfinite: str,
        compare: Dtype | None,
        seed: int = 0,
        *,
        device: str,
    ) -> None:
        self._program, self._agents, self._seed = program, program.agents, seed
        self._keep, self._compare = on_nonfinite == "keep", compare
        self._device = torch.device(device)
        cuda = self._device.type == "cuda"
        new_stream: Any = torch.cuda.Stream
        self._stream = new_stream(self._device) if cuda else None
        with np.errstate(over="ignore"):
            epsilons = [np.array([epsilon], dtype) for dtype in (np.float32, np.float64)]
        with self.on_stream():  # memory belongs to the stream it was allocated on
            self._epsilon = {e.dtype: e.to(self._device) for e in map(torch.from_numpy, epsilons)}
            self._staging = torch.empty((self._agents + 2, STRIP * 8), dtype=torch.uint8, pin_memory=cuda)
            self._raw = torch.empty_like(self._staging, device=self._device) if cuda else self._staging
            self._report = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._squares = torch.zeros((), dtype=torch.float64, device=self._device)

    @staticmethod
    def host_bytes(agents: int) -> int:
        """Upper bound of the bytes of pinned memory one merger holds; torch pins powers of two."""
        return 1 << ((agents + 2) * STRIP * 8 - 1).bit_length()

    @staticmethod
    def device_bytes(program: Program) -> int:
        """Upper bound of the bytes one merger uses on the device, temporaries included."""
        agents = program.agents
        return (4 * agents + 2 + _ROWS + program.alive) * STRIP * 8 + _SEGMENTS

    def strip(
        self,
        sources: Sources,
        elements: int,
        numbers: NDArray[np.float64],
        wide: bool,
        out_dtype: Dtype,
        out: NDArray[np.uint8],
    ) -> None:
        """As `host.Merger.strip`."""
        if elements == 0:
            return
        with self.on_stream():
            self.copy_in(sources, elements)
            self.copy_out(self.compute(sources, elements, numbers, wide, out_dtype), out)

    def copy_in(self, sources: Sources, elements: int) -> None:
        """Start to copy a strip to the device. This, `compute`, `copy_out` are the steps of `strip`, on the stream.

        The staging buffers must be free again: whatever comes before has to end with `copy_out`, which waits.
        """
        for index, code in enumerate(sources.codes.tolist()):
            size = _valid(sources, index, elements) * _stored(code).itemsize
            if size == 0:
                continue
            staged = self._staging[index, :size]
            ctypes.memmove(staged.data_ptr(), int(sources.addresses[index]), size)
            if self._stream is not None:
                self._raw[index, :size].copy_(staged, non_blocking=True)

    def compute(
        self,
        sources: Sources,
        elements: int,
        numbers: NDArray[np.float64],
        wide: bool,
        out_dtype: Dtype,
    ) -> torch.Tensor:
        """Merge the strip that was copied in; its bits on the device, signed integers of the item's size."""
        width = torch.float64 if wide else torch.float32
        own, plain = at_width(self._program, numbers, np.dtype(np.float64 if wide else np.float32))
        base, deltas, special = self._load(sources, elements, width)
        values = self._merged(sources, base, deltas, own)
        bits = narrow(values, out_dtype)
        lost = overflows(values, out_dtype) | ~(_finite(values) | special)
        if int(sources.codes[0]) == out_dtype and not self._program.moves_unchanged:
            verbatim = (deltas == 0).all(0)
            bits = torch.where(verbatim, self._bits(0, out_dtype, elements), bits)
            lost &= ~verbatim
        self._report[0] += lost.sum()
        self._squares += (
            (values.to(torch.float64) - base.to(torch.float64)).square().nan_to_num(0, math.inf).sum()
        )
        if len(plain):
            without = narrow(self._merged(sources, base, deltas, plain), out_dtype)
            changed = (deltas != 0).any(0)
            self._report[1] += (changed & (without != bits)).sum()
        return bits

    def copy_out(self, bits: torch.Tensor, out: NDArray[np.uint8]) -> None:
        """Copy the merged strip to `out`, and wait until everything on the stream is done."""
        flat = bits.view(torch.uint8)
        if self._stream is not None:
            staged = self._staging[-1, : len(flat)]
            staged.copy_(flat, non_blocking=True)
            self._stream.synchronize()
            flat = staged
        out[: len(flat)] = flat.numpy()

    def take(self) -> Taken:
        """What was counted since the last call."""
        with self.on_stream():
            overflow, moved = (int(number) for number in self._report.tolist())
            taken = Taken(overflow, moved, float(self._squares))
            self._report.zero_()
            self._squares.zero_()
        return taken

    def on_stream(self) -> AbstractContextManager[Any]:
        """What is done with torch in this context goes to this merger's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _merged(
        self, sources: Sources, base: torch.Tensor, deltas: torch.Tensor, numbers: NDArray[Any]
    ) -> torch.Tensor:
        """The output's values (n,) in the width."""
        width, device, agents = base.dtype, self._device, self._agents
        held = torch.from_numpy(numbers)
        if self._stream is not None:  # from memory that is not pinned the copy would wait for all before it
            held = held.pin_memory().to(device, non_blocking=True)

        def rows(k: int) -> torch.Tensor:
            if k <= agents:
                return base if k == 0 else deltas[k - 1]
            place = int(sources.name), k - agents - 1, sources.first
            return uniform_torch(len(base), self._seed, *place, device=device, dtype=width)

        def one(value: float) -> torch.Tensor:
            return torch.full((), value, dtype=width, device=device)

        merged: torch.Tensor = self._program.run(torch, rows, lambda column: held[column], one)
        return merged

    def _bits(self, index: int, dtype: Dtype, elements: int) -> torch.Tensor:
        """Source `index` as it lies on the device, as signed integers of its size."""
        return self._raw[index, : elements * dtype.itemsize].view(_RAW[dtype.itemsize])

    def _load(
        self, sources: Sources, elements: int, width: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """base (n,), masked deltas (T, n), and whether any source is not finite (n,)."""
        base = self._widened(sources, 0, elements, width)
        finite = _finite(base)
        special = ~finite
        deltas = torch.zeros(self._agents, elements, dtype=width, device=self._device)
        for t in range(self._agents):
            n = _valid(sources, t + 1, elements)
            if n == 0:
                continue
            stored = self._widened(sources, t + 1, n, width)
            ordinary = _finite(stored)
            is_delta = bool(sources.codes[t + 1] == Kind.DELTA)
            deltas[t, :n] = self._masked(base[:n], stored, is_delta, finite[:n] & ordinary)
            special[:n] |= ~ordinary
        return base, deltas, special

    def _widened(self, sources: Sources, index: int, n: int, width: torch.dtype) -> torch.Tensor:
        dtype = _stored(int(sources.codes[index]))
        return widen(self._bits(index, dtype, n), dtype, width)

    def _masked(
        self, base: torch.Tensor, stored: torch.Tensor, is_delta: bool, finite: torch.Tensor
    ) -> torch.Tensor:
        """Deltas where the agent contributes, otherwise 0; `finite` says where base and agent both are."""
        gap = delta = stored if is_delta else stored - base
        if self._compare is not None:
            new = base + stored if is_delta else stored
            gap = rounded(new, self._compare) - rounded(base, self._compare)
        contributes = (gap.abs() > self._epsilon[base.dtype]) & finite
        if self._keep:
            integer = _INTEGER[base.dtype]
            same = (delta == 0) if is_delta else (stored.view(integer) == base.view(integer))
            contributes |= ~(finite | same)
        return torch.where(contributes, delta, torch.zeros_like(delta))


def _stored(code: int) -> Dtype:
    """The dtype of a source's bytes."""
    return Dtype.F32 if code in (Kind.DELTA, Kind.ABSENT) else Dtype(code)


def _valid(sources: Sources, index: int, elements: int) -> int:
    """How many elements of a strip a source has."""
    absent = sources.codes[index] == Kind.ABSENT
    return 0 if absent else max(min(elements, int(sources.valid[index])), 0)


def _finite(values: torch.Tensor) -> torch.Tensor:
    """`torch.isfinite`, in two operations for four."""
    return values.abs() < math.inf


def rounded(values: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Values (float32 or float64) rounded to a dtype and back; as they are if it is no narrower."""
    if dtype is Dtype.F64 or (dtype is Dtype.F32 and values.dtype == torch.float32):
        return values
    return widen(narrow(values, dtype), dtype, values.dtype)


def widen(bits: torch.Tensor, dtype: Dtype, width: torch.dtype) -> torch.Tensor:
    """Raw bits (signed integers of the item's size) as float32 or float64; exact, NaNs keep their payload."""
    if dtype is Dtype.F64:
        return bits.view(torch.float64)
    if dtype is Dtype.F32:
        raw = bits
    elif dtype is Dtype.BF16:
        raw = bits.to(torch.int32) << 16
    elif dtype is Dtype.F8_E4M3:
        raw = _small(bits.to(torch.int32) << 8, 12, 2.0**120, 0x7F << 20)
    else:
        half = bits.to(torch.int32) << (8 if dtype is Dtype.F8_E5M2 else 0)
        raw = _small(half, 13, 2.0**112, 0x7C00 << 13)
    return raw.view(torch.float32) if width == torch.float32 else _doubles(raw)


def _small(pattern: torch.Tensor, shift: int, scale: float, special: int) -> torch.Tensor:
    """As `formats.small`."""
    magnitude = (pattern & 0x7FFF) << shift
    value = (magnitude.view(torch.float32) * scale).view(torch.int32)
    return value | ((magnitude >= special).to(torch.int32) * 0x7F800000) | ((pattern & 0x8000) << 16)


def _doubles(raw: torch.Tensor) -> torch.Tensor:
    """float32 bits (int32) as float64."""
    wide = raw.to(torch.int64)
    special = ((wide & 0x7FFFFF) << 29) | 0x7FF0000000000000 | ((wide >> 31) << 63)
    value = raw.view(torch.float32).to(torch.float64).view(torch.int64)
    return torch.where((wide & 0x7F800000) == 0x7F800000, special, value).view(torch.float64)


def _nearest(magnitude: torch.Tensor, have: int, want: int, excess: int) -> torch.Tensor:
    """As `formats.nearest`, on int64."""
    exponent = magnitude >> have
    mantissa = (magnitude & ((1 << have) - 1)) + ((exponent > 0).to(torch.int64) << have)
    exponent = exponent.clamp(min=1) - excess
    shift = ((1 - exponent).clamp(min=0) + (have - want)).clamp(max=60)
    half = torch.ones_like(shift) << (shift - 1)
    mantissa = (mantissa + half - 1 + ((mantissa >> shift) & 1)) >> shift
    return mantissa + ((exponent.clamp(min=1) - 1) << want)


def _single_bits(values: torch.Tensor) -> torch.Tensor:
    """float32 bits (int64, without a sign of their own) nearest to float32 or float64 values; ±Inf beyond."""
    if values.dtype == torch.float32:
        return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = values.view(torch.int64)
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    single = _nearest(magnitude, 52, 23, 896).masked_fill(magnitude >= 0x47EFFFFFF0000000, 0x7F800000)
    return single | (((bits >> 63) & 1) << 31)


def narrow(values: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """float32 or float64 values as bits of `dtype`, signed integers of its size; as `formats.narrow`."""
    nan, integer = int(layout.NAN[dtype]), _RAW[dtype.itemsize]
    if dtype is Dtype.F64:
        bits = values.to(torch.float64).view(torch.int64)
        return bits.masked_fill(torch.isnan(values), nan)
    single = _single_bits(values)
    if dtype is Dtype.F32:
        return single.masked_fill(torch.isnan(values), nan).to(integer)
    magnitude = single & 0x7FFFFFFF
    bits = _nearest(magnitude, 23, int(layout.MANTISSA[dtype]), 127 - int(layout.BIAS[dtype]))
    bits = bits.masked_fill(magnitude >= int(layout.LIMIT[dtype]), int(layout.BEYOND[dtype]))
    bits = bits | ((single >> 31) << (8 * dtype.itemsize - 1))
    none = ~_finite(values) if dtype is Dtype.F8_E4M3 else torch.isnan(values)
    return bits.masked_fill(none, nan).to(integer)


def overflows(values: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Where `narrow` loses a value: finite but out of range, or an infinity that E4M3 has not."""
    finite = _finite(values)
    if dtype is Dtype.F64:
        return torch.zeros_like(finite)
    lost = finite & ((_single_bits(values) & 0x7FFFFFFF) >= int(layout.LIMIT[dtype]))
    return lost | torch.isinf(values) if dtype is Dtype.F8_E4M3 else lost
