"""What one worker does with a unit, whatever thread, process or machine it is in.

It is handed everything in picklable values (`Setup`, `Work`) and returns plain results. Doing a unit twice
writes the same bytes to the same places.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from ramstream import durable, memory, tallies
from ramstream.checkpoint.reader import open_reader
from ramstream.engine.computed import Computed
from ramstream.engine.lending import store_of
from ramstream.engine.surveyor import NOTHING, Surveyed, Surveyor, rule_of, surveyor
from ramstream.errors import IntegrityError, RamstreamError
from ramstream.kernels import host
from ramstream.kernels.philox import name_key
from ramstream.kernels.program import COPY, Program
from ramstream.plan import CountPlan, MergePlan, PlannedTensor, Slot, Source
from ramstream.quantiles import Queries
from ramstream.types import GRAIN, ITEMSIZE, STRIP, Dtype, Kind, Piece
from ramstream.writer import RangeWriter

STEP_GRAINS = 16
"""The step histogram is taken on every 16th grain, so that it costs next to nothing."""

_WORDS = GRAIN // 64


@dataclass(frozen=True)
class Setup:
    """What all tasks of a pass share; without `merge` it only counts, or only compares checksums."""

    count: CountPlan
    io: str
    store: Path | None = None
    """Where bits go; None to keep tallies only."""
    origin: Path | None = None
    """The folder of what earlier passes saw of the inputs."""
    merge: MergePlan | None = None
    out: Path | None = None
    devices: tuple[str, ...] = ("cpu",)
    """Worker k merges on number k of these, over and over."""
    numbers: NDArray[np.float64] | None = None
    """The numbers of the method's program (tensors, columns)."""
    survey: str = ""
    """The stage of the survey (see `survey`), if this pass is one."""
    queries: Queries | None = None
    """What it asks; None to measure the merge."""
    lent: Path | None = None
    """Where the bits of each grain go, for the driver to give them their place (see `lending`); None where workers
    are threads of the driver, which write to the store itself."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells setups apart."""


@dataclass(frozen=True)
class Work:
    """What to do with one unit."""

    unit: int
    count: bool
    merge: bool
    expected: tuple[int, ...] = ()
    """The inputs' checksums that an earlier pass saw, to be compared with what is read now."""
    unchanged: frozenset[int] = frozenset()
    """Agents (1..T) that changed nothing in this unit, or do not matter; their files are not read."""
    survey: bool = False


@dataclass
class UnitResult:
    """What was done with one unit; checksums are xxh3-64."""

    unit: int
    counted: bool
    inputs: list[int] = field(default_factory=list)
    """Checksums of base and agents; where one was not read, the one it was counted with."""
    tallies: str | None = None
    changed: list[int] | None = None
    differs: list[list[int]] = field(default_factory=list)
    """[tensor, agent] of copied tensors whose bytes are not the base's."""
    output: int | None = None
    overflow: list[list[int]] = field(default_factory=list)
    """[tensor, elements] that left the output's range."""
    moved: int = 0
    squares: float = 0.0
    """Σ of the squares of the merged deltas."""
    surveyed: Surveyed | None = None
    files: list[int] = field(default_factory=list)
    chunk: str | None = None
    read: int = 0
    written: int = 0


class _Unit:
    """One unit while it is worked on."""

    def __init__(self, work: Work, sources: int, slots: tuple[Slot, ...] | None, surveyor: Surveyor) -> None:
        self.work, self.slots, self.surveyor = work, slots, surveyor
        self.inputs: list[Any] = [xxhash.xxh3_64() for _ in range(sources)]
        self.output: Any = xxhash.xxh3_64()
        self.records: list[Any] = []
        self.written: dict[int, tuple[int, int]] = {}
        """The span of each output file that was written."""
        self.result = UnitResult(work.unit, work.count)

    def slot(self, piece: Piece) -> Slot | None:
        """Where a piece goes, None where nothing is written."""
        return self.slots[piece.tensor] if self.slots is not None else None


class Worker:
    """Readers, kernels and buffers of one thread, allocated once."""

    def __init__(self, setup: Setup, device: str = "cpu") -> None:
        if not host.flush_to_zero_is_off():
            raise RamstreamError("this thread flushes subnormal numbers to zero; results would not be exact")
        self.setup, self._plan = setup, setup.count
        self._readers = [open_reader(setup.io, ref.paths) for ref in self._plan.checkpoints]
        self._computed = Computed(self._readers)
        self._sources = host.Sources(self._plan.agents)
        self._counter = host.Counter(self._plan.agents, *rule_of(self._plan))
        self._planes = np.zeros((self._plan.agents, _WORDS), np.uint64)
        self._store = store_of(setup.store, setup.lent) if setup.store else None
        self._surveyor = surveyor(setup)
        if setup.merge and setup.out:
            self._writer = RangeWriter(setup.out, setup.merge.outputs)
            self._merger = _merger(setup, device)
            self._buffer = np.empty(memory.output(setup.merge.itemsize), np.uint8)

    def do(self, work: Work) -> UnitResult:
        """Count, survey, merge, or none of it (only compare checksums), one unit."""
        slots = self.setup.merge.slots(work.unit) if work.merge and self.setup.merge else None
        unit = _Unit(work, len(self._readers), slots, self._surveyor if work.survey else NOTHING)
        one_piece = self._merged if self._plan.is_grain(work.unit) else self._copied
        for tensor, piece in self._plan.pieces(work.unit):
            one_piece(unit, tensor, piece)
        unit.result.inputs = self._compared(unit)
        unit.result.surveyed = unit.surveyor.finish()
        if work.count and self._plan.is_grain(work.unit):
            self._counted(unit)
        if work.merge:
            unit.result.output = unit.output.intdigest()
            unit.result.files = sorted(unit.written)
            for file, (begin, end) in unit.written.items():
                self._writer.hand_over(file, begin, end)
        return unit.result

    def sync(self, results: Sequence[UnitResult]) -> None:
        """Have what was done just now on disk; otherwise the driver sees to that."""
        for result in results:
            if result.chunk is not None:
                durable.sync(Path(result.chunk))
        if files := [file for result in results for file in result.files]:
            self._writer.sync(files)

    def _compared(self, unit: _Unit) -> list[int]:
        """The inputs' checksums; IntegrityError where one is not what was expected."""
        inputs = [checksum.intdigest() for checksum in unit.inputs]
        for k, expected in enumerate(unit.work.expected):
            if k in unit.work.unchanged:
                inputs[k] = expected
            elif expected != inputs[k]:
                tensor = next(self._plan.pieces(unit.work.unit))[0]
                origin = self.setup.origin
                instead = f", or remove {origin}, which was made of the former" if origin else ""
                raise IntegrityError(
                    f"{self._plan.checkpoints[k].label} changed since it was counted: around {tensor.name} its "
                    f"bytes have checksum {inputs[k]:016x}, they had {expected:016x}; restore it{instead}"
                )
        return inputs

    def _counted(self, unit: _Unit) -> None:
        number = unit.work.unit
        records = np.array(unit.records, tallies.tally_dtype(self._plan.agents))
        changed = tallies.changed(records).sum(axis=0)
        unit.result.tallies, unit.result.changed = tallies.encode(records), changed.tolist()
        if self._store is not None and changed.any():
            size = min(GRAIN, self._plan.flat.total - number * GRAIN)
            self._planes[:, -(-size // 64) :] = 0  # an earlier grain's, beyond the end of the last
            unit.result.chunk = str(self._store.write_bits(number, self._planes.view(np.uint8)))

    def _merged(self, unit: _Unit, tensor: PlannedTensor, piece: Piece) -> None:
        """A piece of a merged tensor, strip by strip, read once for whatever is to be done with it."""
        count, slot = unit.work.count, unit.slot(piece)
        unit.surveyor.begin(tensor, piece)
        if count:
            self._counter.begin(Dtype[tensor.dtype], tensor.wide, unit.work.unit % STEP_GRAINS == 0)
        start = self._plan.flat.starts[piece.tensor] - unit.work.unit * GRAIN
        for begin in range(piece.begin, piece.end, STRIP):
            n = min(STRIP, piece.end - begin)
            base = self._load(unit, tensor, begin, n)
            if count:
                word = (start + begin) // 64
                self._counter.strip(self._sources, n, self._planes[:, word : word + -(-n // 64)])
            unit.surveyor.strip(self._sources, n)
            if slot is not None:
                self._merge_strip(tensor, piece, slot, n, base)
                self._write(unit, slot, begin, n)
            self._release()
        unit.surveyor.end()
        if count:
            unit.records.append(self._counter.finish())
        if slot is not None:
            self._note_merged(unit, piece, self._merger.take())

    def _load(self, unit: _Unit, tensor: PlannedTensor, begin: int, n: int) -> NDArray[np.uint8]:
        """Point `sources` at elements begin .. begin + n of every checkpoint; the base's bytes."""
        base = None
        if self._program is not None and self._program.random:
            self._sources.at(name_key(tensor.name), begin)
        for k, source in enumerate(tensor.sources):
            valid = 0 if source is None else max(min(source.valid - begin, n), 0)
            if source is None or not valid or k in unit.work.unchanged:
                self._sources.set(k, Kind.ABSENT, 0, 0)
                continue
            data = self._read(unit, k, source, begin, valid)
            self._sources.set(k, source.code, data.ctypes.data, valid)
            base = data if k == 0 else base
        assert base is not None, "the base has every element"
        return base

    def _read(self, unit: _Unit, k: int, source: Source, begin: int, n: int) -> NDArray[np.uint8]:
        """The bytes of elements begin .. begin + n of a source."""
        if source.recipe is None:
            itemsize = source.stored_itemsize
            offset = source.offset + begin * itemsize
            data = self._readers[k].read(source.file, offset, n * itemsize, itemsize)
        else:
            data = self._computed.values(k, source, begin, n)
        unit.inputs[k].update(data)
        unit.result.read += n * source.stored_itemsize
        return data

    def _release(self) -> None:
        for reader in self._readers:
            reader.release()

    def _merge_strip(
        self, tensor: PlannedTensor, piece: Piece, slot: Slot, n: int, base: NDArray[np.uint8]
    ) -> None:
        """The n elements that were loaded, merged into the buffer."""
        dtype, numbers = Dtype[slot.dtype], self.setup.numbers
        out = self._buffer[: n * dtype.itemsize]
        assert self._program is not None, "only what is merged comes here"
        assert numbers is not None, "known before anything is merged"
        untouched = not self._program.moves_unchanged and self._sources.codes[0] == dtype
        if untouched and (self._sources.codes[1:] == Kind.ABSENT).all():
            out[...] = base
            return
        self._merger.strip(self._sources, n, numbers[piece.tensor], tensor.wide, dtype, out)

    def _write(self, unit: _Unit, slot: Slot, begin: int, n: int) -> None:
        """Write the buffer as elements begin .. begin + n of a tensor."""
        itemsize = ITEMSIZE.get(slot.dtype, 1)
        data, offset = self._buffer[: n * itemsize], slot.offset + begin * itemsize
        self._writer.write(slot.file, offset, data)
        unit.output.update(data)
        unit.result.written += len(data)
        first, last = unit.written.get(slot.file, (offset, 0))
        unit.written[slot.file] = min(first, offset), max(last, offset + len(data))

    def _note_merged(self, unit: _Unit, piece: Piece, taken: host.Taken) -> None:
        unit.result.moved += taken.moved
        unit.result.squares += taken.squares
        if taken.overflow:
            unit.result.overflow.append([piece.tensor, taken.overflow])

    def _copied(self, unit: _Unit, tensor: PlannedTensor, piece: Piece) -> None:
        """A range of a tensor that is not merged: the agents' bytes are compared, the base's go out."""
        itemsize, slot = ITEMSIZE.get(tensor.dtype, 1), unit.slot(piece)
        differs = unit.result.differs
        for begin in range(piece.begin, piece.end, STRIP):
            first, n = begin // itemsize, min(STRIP, piece.end - begin) // itemsize
            for k, source in enumerate(tensor.sources):
                if source is None or (k and (tensor.compare == "ignore" or k in unit.work.unchanged)):
                    continue
                data = self._read(unit, k, source, first, n)
                if k == 0:
                    base = data
                elif not np.array_equal(base, data) and [piece.tensor, k] not in differs:
                    differs.append([piece.tensor, k])
            if slot is not None:
                self._convert(tensor, slot, n, base)
                self._write(unit, slot, first, n)
            self._release()
        if slot is not None and slot.dtype != tensor.dtype:
            self._note_merged(unit, piece, self._converter.take())

    def _convert(self, tensor: PlannedTensor, slot: Slot, n: int, data: NDArray[np.uint8]) -> None:
        """n copied elements into the buffer; another dtype is a merge of no agents."""
        out = self._buffer[: n * ITEMSIZE.get(slot.dtype, 1)]
        source = tensor.sources[0]
        assert source is not None, "the base has every element"
        if slot.dtype == source.dtype:
            out[...] = data
            return
        alone = host.Sources(0)
        alone.set(0, source.code, data.ctypes.data, n)
        self._converter.strip(alone, n, np.empty(0), tensor.dtype == "F64", Dtype[slot.dtype], out)

    @cached_property
    def _converter(self) -> host.Merger:
        return host.Merger(COPY, *rule_of(self._plan))

    @cached_property
    def _program(self) -> Program | None:
        return self.setup.merge.program if self.setup.merge else None


class Merging(Protocol):
    """What merges strips: numba's loops on the CPU, or torch; see `host.Merger`."""

    def strip(
        self,
        sources: host.Sources,
        elements: int,
        numbers: NDArray[np.float64],
        wide: bool,
        out_dtype: Dtype,
        out: NDArray[np.uint8],
    ) -> None: ...

    def take(self) -> host.Taken: ...


def _merger(setup: Setup, device: str) -> Merging:
    assert setup.merge is not None
    program, seed = setup.merge.program, setup.merge.seed
    if device == "cpu":
        return host.Merger(program, *rule_of(setup.count), seed)
    from ramstream.kernels.torch import TorchMerger

    return TorchMerger(program, *rule_of(setup.count), seed, device=device.removesuffix(":torch"))
