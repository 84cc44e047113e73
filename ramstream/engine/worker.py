"""The task function: what one worker does with a run of units, whatever process or machine it is in.

It is handed everything in picklable values (`Setup`, `Work`) and returns plain results. Running a task twice
writes the same bytes to the same places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ramstream import memory, tallies
from ramstream.checkpoint.reader import open_reader
from ramstream.errors import IntegrityError, RamstreamError
from ramstream.kernels import host
from ramstream.overlap import OverlapStore
from ramstream.plan import CountPlan, MergePlan, PlannedTensor, Slot, Source
from ramstream.types import GRAIN, ITEMSIZE, STRIP, Dtype, Kind, Piece
from ramstream.writer import RangeWriter

STEP_GRAINS = 16
"""The step histogram is taken on every 16th grain, so that it costs next to nothing."""

_WORDS = GRAIN // 64


@dataclass(frozen=True)
class Setup:
    """What all tasks of a pass share. `token` tells setups apart."""

    token: str
    count: CountPlan
    merge: MergePlan | None
    out: Path | None
    store: Path | None
    """Where bits go; None to keep tallies only."""
    io: str
    device: str
    coefficients: NDArray[np.float64] | None


@dataclass(frozen=True)
class Work:
    """What to do with one unit."""

    unit: int
    count: bool
    merge: bool
    expected: tuple[int, ...] = ()
    """The inputs' checksums that pass 1 saw, to be compared with what is read now."""
    unchanged: frozenset[int] = frozenset()
    """Agents (1..T) that changed nothing in this unit; their files are not read."""


@dataclass
class UnitResult:
    """What was done with one unit; checksums are xxh3-64."""

    unit: int
    inputs: list[int] | None = None
    """Checksums of base and agents, where the unit was counted."""
    tallies: str | None = None
    changed: list[int] | None = None
    differs: list[list[int]] = field(default_factory=list)
    """[tensor, agent] of copied tensors whose bytes are not the base's."""
    output: int | None = None
    overflow: list[list[int]] = field(default_factory=list)
    """[tensor, elements] that left the output's range."""
    moved: int = 0
    files: list[int] = field(default_factory=list)
    chunk: str | None = None
    written: int = 0


_local = threading.local()


def run_task(setup: Setup, works: Sequence[Work]) -> list[UnitResult]:
    """Do a run of units with this thread's worker, which is made on first use and kept."""
    worker: Worker | None = getattr(_local, "worker", None)
    if worker is None or worker.setup.token != setup.token:
        worker = _local.worker = Worker(setup)
    return [worker.do(work) for work in works]


class Worker:
    """Readers, kernels and buffers of one thread, allocated once."""

    def __init__(self, setup: Setup) -> None:
        if not host.flush_to_zero_is_off():
            raise RamstreamError("this thread flushes subnormal numbers to zero; results would not be exact")
        self.setup = setup
        plan = setup.count
        self._readers = [open_reader(setup.io, ref.paths) for ref in plan.checkpoints]
        self._sources = host.Sources(plan.agents)
        self._counter = host.Counter(*_kernel_options(plan))
        self._planes = np.zeros((plan.agents, _WORDS), np.uint64)
        self._store = OverlapStore(setup.store) if setup.store else None
        if setup.merge and setup.out:
            self._writer = RangeWriter(setup.out, setup.merge.outputs)
            self._merge, self._take_counts = _merger(setup)
            slots = setup.merge.merged + setup.merge.copied
            itemsize = max((ITEMSIZE.get(slot.dtype, 1) for slot in slots), default=1)
            self._buffer = np.empty(memory.output(itemsize), np.uint8)

    def do(self, work: Work) -> UnitResult:
        """Count, merge, both, or neither (only compare checksums), one unit."""
        result = UnitResult(work.unit)
        hashes = [xxhash.xxh3_64() for _ in self._readers]
        output = xxhash.xxh3_64()
        counted = [
            record
            for tensor, piece in self.setup.count.pieces(work.unit)
            if (record := self._piece(work, tensor, piece, hashes, output, result)) is not None
        ]
        inputs = [checksum.intdigest() for checksum in hashes]
        self._compare(work, inputs)
        if work.count:
            result.inputs = inputs
            if self.setup.count.is_grain(work.unit):
                self._counted(work.unit, counted, result)
        if work.merge:
            result.output = output.intdigest()
            result.files = sorted(set(result.files))
        return result

    def _compare(self, work: Work, inputs: Sequence[int]) -> None:
        for k, (expected, found) in enumerate(zip(work.expected, inputs, strict=False)):
            if k not in work.unchanged and expected != found:
                label = self.setup.count.checkpoints[k].label
                tensor = next(self.setup.count.pieces(work.unit))[0]
                raise IntegrityError(
                    f"{label} changed since it was counted: around {tensor.name} its bytes have checksum "
                    f"{found:016x}, they had {expected:016x}; restore it, or remove the unfinished run"
                )

    def _counted(self, unit: int, counted: Sequence[Any], result: UnitResult) -> None:
        records = np.array(counted, tallies.tally_dtype(self.setup.count.agents))
        changed = tallies.changed(records).sum(axis=0)
        result.tallies, result.changed = tallies.encode(records), changed.tolist()
        if self._store is not None and changed.any():
            size = min(GRAIN, self.setup.count.flat.total - unit * GRAIN)
            planes = self._planes.view(np.uint8)[:, : -(-size // 8)]
            result.chunk = str(self._store.write_bits(unit, planes))

    def _piece(
        self,
        work: Work,
        tensor: PlannedTensor,
        piece: Piece,
        hashes: Sequence[Any],
        output: Any,
        result: UnitResult,
    ) -> Any:
        """One piece, read once for whatever is to be done; the record of its tallies where it is counted."""
        slot = self.setup.merge.slots(work.unit)[piece.tensor] if work.merge and self.setup.merge else None
        record = None
        begin, end = piece.begin, piece.end
        if self.setup.count.is_grain(work.unit):
            record = self._merged(work, tensor, piece, hashes, slot, result)
        else:
            self._copied(work, tensor, piece, hashes, slot, result)
            itemsize = ITEMSIZE.get(tensor.dtype, 1)
            begin, end = begin // itemsize, end // itemsize
        if slot is not None:
            itemsize = ITEMSIZE.get(slot.dtype, 1)
            data = self._buffer[: (end - begin) * itemsize]
            self._writer.write(slot.file, slot.offset + begin * itemsize, data)
            output.update(data)
            result.files.append(slot.file)
            result.written += len(data)
        return record

    def _merged(
        self,
        work: Work,
        tensor: PlannedTensor,
        piece: Piece,
        hashes: Sequence[Any],
        slot: Slot | None,
        result: UnitResult,
    ) -> Any:
        """A piece of a merged tensor, strip by strip; the merged elements lie in the buffer afterwards."""
        wide, storage = tensor.wide, Dtype[tensor.dtype]
        if work.count:
            self._counter.begin(storage, wide, work.unit % STEP_GRAINS == 0)
            start = self.setup.count.flat.starts[piece.tensor] - work.unit * GRAIN
        for begin in range(piece.begin, piece.end, STRIP):
            n = min(STRIP, piece.end - begin)
            base = self._load(work, tensor, begin, n, hashes)
            if work.count:
                word = (start + begin) // 64
                self._counter.strip(self._sources, n, self._planes[:, word : word + -(-n // 64)])
            if slot is not None:
                self._merge_strip(tensor, piece, slot, begin, n, base)
            for reader in self._readers:
                reader.release()
        if slot is not None:
            self._take(piece, result)
        return self._counter.finish() if work.count else None

    def _load(
        self, work: Work, tensor: PlannedTensor, begin: int, n: int, hashes: Sequence[Any]
    ) -> NDArray[np.uint8]:
        """Point `sources` at elements begin .. begin + n of every checkpoint; the base's bytes."""
        base = None
        for k, source in enumerate(tensor.sources):
            valid = 0 if source is None else max(min(source.valid - begin, n), 0)
            if source is None or not valid or k in work.unchanged:
                self._sources.set(k, Kind.ABSENT, 0, 0)
                continue
            itemsize = ITEMSIZE[source.dtype]
            data = self._read(k, source, begin * itemsize, valid * itemsize, itemsize, hashes)
            self._sources.set(k, Dtype[source.dtype], data.ctypes.data, valid)
            base = data if k == 0 else base
        assert base is not None, "the base has every element"
        return base

    def _read(
        self, k: int, source: Source, begin: int, nbytes: int, alignment: int, hashes: Sequence[Any]
    ) -> NDArray[np.uint8]:
        data = self._readers[k].read(source.file, source.offset + begin, nbytes, alignment)
        hashes[k].update(data)
        return data

    def _merge_strip(
        self, tensor: PlannedTensor, piece: Piece, slot: Slot, begin: int, n: int, base: NDArray[np.uint8]
    ) -> None:
        dtype = Dtype[slot.dtype]
        first = (begin - piece.begin) * dtype.itemsize
        out = self._buffer[first : first + n * dtype.itemsize]
        if slot.dtype == tensor.dtype and (self._sources.codes[1:] == Kind.ABSENT).all():
            out[...] = base
            return
        coefficients = self.setup.coefficients
        assert coefficients is not None, "coefficients are known before anything is merged"
        self._merge(self._sources, n, coefficients[piece.tensor], tensor.wide, dtype, out)

    def _take(self, piece: Piece, result: UnitResult) -> None:
        overflow, moved = self._take_counts()
        result.moved += moved
        if overflow:
            result.overflow.append([piece.tensor, overflow])

    def _copied(
        self,
        work: Work,
        tensor: PlannedTensor,
        piece: Piece,
        hashes: Sequence[Any],
        slot: Slot | None,
        result: UnitResult,
    ) -> None:
        """A range of a tensor that is not merged: the agents' bytes are compared, the base's go out."""
        itemsize = ITEMSIZE.get(tensor.dtype, 1)
        for begin in range(piece.begin, piece.end, STRIP):
            nbytes = min(STRIP, piece.end - begin)
            for k, source in enumerate(tensor.sources):
                if source is None or (k and (tensor.compare == "ignore" or k in work.unchanged)):
                    continue
                data = self._read(k, source, begin, nbytes, itemsize, hashes)
                if k == 0:
                    base = data
                elif not np.array_equal(base, data) and [piece.tensor, k] not in result.differs:
                    result.differs.append([piece.tensor, k])
            if slot is not None:
                first = (begin - piece.begin) // itemsize
                self._convert(tensor, slot, first, nbytes // itemsize, base)
            for reader in self._readers:
                reader.release()
        if slot is not None:
            self._take(piece, result)

    def _convert(
        self, tensor: PlannedTensor, slot: Slot, first: int, n: int, data: NDArray[np.uint8]
    ) -> None:
        """n copied elements into the buffer; another dtype is a merge in which every agent is absent."""
        itemsize = ITEMSIZE.get(slot.dtype, 1)
        out = self._buffer[first * itemsize : (first + n) * itemsize]
        if slot.dtype == tensor.dtype:
            out[...] = data
            return
        self._sources.set(0, Dtype[tensor.dtype], data.ctypes.data, n)
        for k in range(1, self.setup.count.agents + 1):
            self._sources.set(k, Kind.ABSENT, 0, 0)
        ones = np.ones(self.setup.count.agents)
        self._merge(self._sources, n, ones, tensor.dtype == "F64", Dtype[slot.dtype], out)


def _merger(setup: Setup) -> tuple[Callable[..., None], Callable[[], tuple[int, int]]]:
    """The numba core on the CPU where the method has one, otherwise the torch form: merge a strip, take counts."""
    assert setup.merge is not None
    method, options = setup.merge.method, _kernel_options(setup.count)
    if setup.device == "cpu" and method.kernel is not None:
        merger = host.Merger(*options)
        return partial(merger.strip, method.kernel), merger.take
    from ramstream.kernels.torch import TorchMerger

    form = TorchMerger(method, *options, device=setup.device.removesuffix(":torch"))
    return form.strip, form.take


def _kernel_options(plan: CountPlan) -> tuple[int, float, str, Dtype | None]:
    return plan.agents, plan.epsilon, plan.options.on_nonfinite, plan.options.compare_dtype
