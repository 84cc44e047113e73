"""The merge plan: the method, and the output files to the last offset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ramstream.checkpoint.endings import TORCH
from ramstream.errors import PlanError, RamstreamError, UsageError
from ramstream.kernels.program import Program, trace
from ramstream.plan.count import CountPlan, PlannedTensor
from ramstream.plan.layout import digest
from ramstream.types import ITEMSIZE, Dtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ramstream.methods import Method

DATA_ALIGNMENT = 4096
"""Output headers are padded with spaces so that tensor data starts on this boundary."""


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes in the output."""

    file: int
    offset: int
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class OutputFile:
    """One weight file of the output: its name, its whole header (length prefix included) and its size."""

    name: str
    header: bytes = field(repr=False)
    size: int


@dataclass(frozen=True)
class SideFile:
    """A file of the base that is not weights and goes along verbatim."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class MergePlan:
    """What a merge does: the counts, the method, and the output to the last offset."""

    count: CountPlan
    method: Method
    dtype: Dtype | None
    merged: tuple[Slot, ...]
    copied: tuple[Slot, ...]
    outputs: tuple[OutputFile, ...]
    side_files: tuple[SideFile, ...]
    left_behind: tuple[str, ...] = field(default=(), compare=False)
    """Files of the base that do not go along, said in the summary."""

    def __str__(self) -> str:
        count = self.count
        lines = [
            f"{self.method} of {', '.join(count.labels)} into {count.checkpoints[0].label}",
            f"{len(count.merged)} tensors merged, {sum(t.elements for t in count.merged):,} elements in "
            f"{count.flat.units} grains; {len(count.copied)} copied",
            f"{count.bytes_read:,} bytes to read in each pass, {self.written:,} to write: "
            f"{', '.join(file.name for file in self.outputs)}",
            *(f"note: {note}" for note in count.all_notes),
        ]
        return "\n".join(lines)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the output's bytes."""
        return {
            "counts": self.count.digest,
            "method": self.method.name(),
            "parameters": self.method.parameters(),
            "formula": self._formula(),
            "dtype": None if self.dtype is None else self.dtype.name,
            "outputs": [[file.name, hashlib.sha256(file.header).hexdigest()] for file in self.outputs],
            "side files": [[file.name, file.sha256] for file in self.side_files],
        }

    def _formula(self) -> str:
        """A digest of what the method does, so that other code under its name does not go on with its work."""
        import numpy as np

        agents = self.count.agents
        overlap = np.arange(3 * agents * agents).reshape(3, agents, agents)
        lambdas = self.method.coefficients(overlap).tolist() if self.method.needs_counts else []
        steps = [[step.name, list(map(str, step.operands))] for step in self.program.steps]
        return digest([steps, self.program.columns, lambdas])

    @cached_property
    def digest(self) -> str:
        """The merge digest: sha256 over `identity`."""
        return digest(self.identity)

    @cached_property
    def program(self) -> Program:
        """What the method does with each element. UsageError where a method of one's own cannot be followed."""
        try:
            program = trace(self.method, self.count.agents)
            _check_declared(self.method, program)
            return program
        except RamstreamError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UsageError(f"{self.method.name()}: its merge cannot be followed: {what}") from error

    @cached_property
    def settings(self) -> Mapping[str, NDArray[np.float64]]:
        """`Method.settings` of the merged tensors. PlanError where a parameter does not fit."""
        names, others = ([t.name for t in group] for group in (self.count.merged, self.count.copied))
        found = self.method.settings(names, self.count.agents, others)
        for key in dict.fromkeys(name for name, _ in self.program.columns if name in found):
            self._check_range(key, found[key])
        return found

    def _check_range(self, key: str, values: NDArray[np.float64]) -> None:
        """PlanError for a number that the width of a tensor's arithmetic cannot hold."""
        import numpy as np

        narrow = values[[not tensor.wide for tensor in self.count.merged]]
        with np.errstate(over="ignore"):
            rounded = narrow.astype(np.float32)
        lost = ~np.isfinite(rounded) | ((rounded == 0) & (narrow != 0))
        if lost.any():
            raise PlanError(
                f"{self.method.name()}: {key} is {narrow[lost][0]:g}, which is beyond what float32 holds; the "
                "arithmetic is float32"
            )

    @property
    def seed(self) -> int:
        """Of the method's random draws."""
        return int(self.method.parameters().get("seed", 0))

    @property
    def written(self) -> int:
        """Bytes of weight files."""
        return sum(file.size for file in self.outputs)

    @property
    def itemsize(self) -> int:
        """Bytes of the output's largest element."""
        return max((ITEMSIZE.get(slot.dtype, 1) for slot in self.merged + self.copied), default=1)

    def tensors(self) -> Iterator[tuple[PlannedTensor, Slot]]:
        """Every tensor with its slot, the merged ones first."""
        yield from zip(self.count.merged, self.merged, strict=True)
        yield from zip(self.count.copied, self.copied, strict=True)

    def slots(self, unit: int) -> tuple[Slot, ...]:
        """The slots that `Piece.tensor` indexes in this unit."""
        return self.merged if self.count.is_grain(unit) else self.copied


def plan_output(
    count: CountPlan,
    method: Method,
    dtype: Dtype | None = None,
    shard_size: int | None = None,
    side_files: Sequence[SideFile] = (),
    left_behind: Sequence[str] = (),
) -> MergePlan:
    """Add the method and the output files to a count plan.

    `dtype` converts every float tensor; `shard_size` (bytes) replaces the base's shards by others of at most
    that size, or one tensor. PlanError where the plan counts with another epsilon than the method's, or where the
    method's parameters do not fit these agents and tensors.
    """
    if method.epsilon != count.epsilon:
        raise PlanError(f"the counts use epsilon {count.epsilon}, the method {method.epsilon}; plan with one")
    method.check_agents(count.agents)
    tensors = [(t, _output_dtype(t, dtype)) for t in (*count.merged, *count.copied)]
    shards = _shards(count, tensors, shard_size)
    outputs: list[OutputFile] = []
    slots: dict[str, Slot] = {}
    for index, (name, members) in enumerate(shards):
        header, size = _header(members)
        position = len(header)
        for tensor, out in members:
            slot = Slot(index, position, out, _nbytes(tensor, out))
            slots[tensor.name] = slot
            position += slot.nbytes
        outputs.append(OutputFile(name, header, size))
    merged, copied = (tuple(slots[t.name] for t in group) for group in (count.merged, count.copied))
    plan = MergePlan(
        count, method, dtype, merged, copied, tuple(outputs), tuple(side_files), tuple(left_behind)
    )
    _ = plan.settings  # refuses what does not fit
    return plan


def _check_declared(method: Method, program: Program) -> None:
    """UsageError where a method's merge uses what its class does not ask for."""
    used = {name for name, _ in program.columns}
    for what, uses, asked in (
        ("draws", program.random, method.random and hasattr(method, "seed")),
        ("thresholds", "thresholds" in used, bool(method.quantile) and hasattr(method, "scope")),
        ("lambdas", "lambdas" in used, method.rescales),
    ):
        if uses and not asked:
            wanted = {"draws": "random", "thresholds": "quantile", "lambdas": "rescales"}[what]
            raise UsageError(
                f"{method.name()}: its merge uses block.{what}; set the class variable {wanted}, with the "
                "parameters that its description names"
            )


def _output_dtype(tensor: PlannedTensor, dtype: Dtype | None) -> str:
    is_float = tensor.dtype in Dtype.__members__
    return dtype.name if dtype is not None and is_float else tensor.dtype


def _nbytes(tensor: PlannedTensor, dtype: str) -> int:
    return tensor.nbytes if dtype == tensor.dtype else tensor.elements * ITEMSIZE[dtype]


Members = list[tuple[PlannedTensor, str]]


def _shards(count: CountPlan, tensors: Members, shard_size: int | None) -> list[tuple[str, Members]]:
    """The output's files with their tensors in file order: as the base's, or cut by `shard_size`."""

    def place(member: tuple[PlannedTensor, str]) -> tuple[int, int]:
        base = member[0].sources[0]
        assert base is not None
        return base.file, base.offset

    ordered = sorted(tensors, key=place)
    if shard_size is None:
        names = [name for name, _ in count.checkpoints[0].files]
        if any(name.endswith(TORCH) for name in names):
            names = _usual_names(len(names))
        return [(name, [m for m in ordered if place(m)[0] == i]) for i, name in enumerate(names)]
    shards: list[Members] = [[]]
    room = shard_size
    for tensor, out in ordered:
        need = _nbytes(tensor, out)
        if shards[-1] and need > room:
            shards.append([])
            room = shard_size
        shards[-1].append((tensor, out))
        room -= need
    return list(zip(_usual_names(len(shards)), shards, strict=True))


def _usual_names(count: int) -> list[str]:
    """How transformers names that many weight files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _header(members: Members) -> tuple[bytes, int]:
    """A safetensors header, padded so that data starts on DATA_ALIGNMENT, and the whole file's size."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor, out in members:
        begin, end = end, end + _nbytes(tensor, out)
        table[tensor.name] = {"dtype": out, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    header = (length - 8).to_bytes(8, "little") + text.ljust(length - 8)
    return header, length + end
