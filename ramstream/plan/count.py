"""The count plan: what pass 1 reads, and in which order of elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramstream.errors import PlanError
from ramstream.plan.layout import Space, digest
from ramstream.plan.matching import Match, MatchOptions, SameBytes, match
from ramstream.types import (
    ALIGNMENT,
    BYTE_RANGE,
    GRAIN,
    ITEMSIZE,
    MAX_AGENTS,
    Dtype,
    Kind,
    LowRank,
    Piece,
    Recipe,
    Scaled,
    Strided,
    TensorInfo,
)

if TYPE_CHECKING:
    from ramstream.checkpoint import Checkpoint

SEMANTICS = 1
"""Raised whenever the same inputs and parameters may give other counts or other bytes."""


@dataclass(frozen=True)
class Operand:
    """Another tensor that a computed one needs, whole: a scale, a factor."""

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Where one checkpoint holds a tensor; `valid` leading elements of it correspond to the base's."""

    file: int
    offset: int
    dtype: str
    """Of the elements that the kernels get."""
    valid: int
    shape: tuple[int, ...] = ()
    """The checkpoint's own, for a computed tensor."""
    recipe: Recipe | None = None
    operands: tuple[Operand, ...] = ()

    @cached_property
    def code(self) -> int:
        """What the kernels are told: a dtype, or that these are deltas."""
        return int(Kind.DELTA if isinstance(self.recipe, LowRank) else Dtype[self.dtype])

    @cached_property
    def stored_itemsize(self) -> int:
        """Bytes that an element takes in the file; 0 where elements are not read one after the other."""
        if self.recipe is None:
            return ITEMSIZE.get(self.dtype, 1)
        return ITEMSIZE[self.recipe.stored] if isinstance(self.recipe, Scaled) else 0

    @property
    def identity(self) -> list[Any]:
        """What of it decides the elements, beside the bytes of the files."""
        if self.recipe is None:
            return [self.dtype, self.valid]
        how = {key: value for key, value in vars(self.recipe).items() if not isinstance(value, TensorInfo)}
        return [self.dtype, self.valid, type(self.recipe).__name__, how, self.shape]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the base and its sources, base first; None where a checkpoint has nothing to say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int
    sources: tuple[Source | None, ...]
    compare: str = "ignore"
    """For a copied tensor: what follows where an agent's bytes differ (ignore, warn, error)."""
    reason: str = ""
    """For a copied tensor: why it is not merged."""

    @property
    def wide(self) -> bool:
        """Whether the arithmetic is float64: base or an agent stores float64."""
        return any(source is not None and source.dtype == "F64" for source in self.sources)


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint as the plan remembers it: label, folder, file names and sizes, identity of the content."""

    label: str
    folder: str
    files: tuple[tuple[str, int], ...]
    fingerprint: str
    single_file: bool
    """Whether the user named one file, so that the rest of its folder is none of our business."""

    @property
    def paths(self) -> list[Path]:
        """Weight files in order."""
        return [Path(self.folder) / name for name, _ in self.files]


@dataclass(frozen=True)
class CountPlan:
    """What pass 1 does: everything that decides the counts, and nothing that only decides speed."""

    checkpoints: tuple[CheckpointRef, ...]
    merged: tuple[PlannedTensor, ...]
    copied: tuple[PlannedTensor, ...]
    options: MatchOptions
    epsilon: float
    notes: tuple[str, ...] = field(default=(), compare=False)
    mismatches: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    """(agent, what) where an agent's dtype is another than the base's."""

    @property
    def agents(self) -> int:
        """T, the number of agents."""
        return len(self.checkpoints) - 1

    @property
    def labels(self) -> list[str]:
        """The agents' labels in command-line order."""
        return [checkpoint.label for checkpoint in self.checkpoints[1:]]

    @cached_property
    def flat(self) -> Space:
        """The merged tensors' space, in elements; its units are grains."""
        return Space.lay([tensor.elements for tensor in self.merged], ALIGNMENT, GRAIN)

    @cached_property
    def bytes(self) -> Space:
        """The copied tensors' space, in bytes of the base."""
        return Space.lay([tensor.nbytes for tensor in self.copied], 8, BYTE_RANGE)

    @property
    def dequantised(self) -> bool:
        """Whether the base stores float8 with scales; the output does not."""
        bases = (tensor.sources[0] for tensor in (*self.merged, *self.copied))
        return any(base is not None and isinstance(base.recipe, Scaled) for base in bases)

    @property
    def units(self) -> int:
        """Units of work: the grains, then the byte ranges."""
        return self.flat.units + self.bytes.units

    @property
    def all_notes(self) -> list[str]:
        """Notes and dtype mismatches: what the user should be told before anything is read."""
        return [*self.notes, *(text for _, text in self.mismatches)]

    @property
    def bytes_read(self) -> int:
        """Bytes that one pass over everything reads."""
        compared = (t.sources if t.compare != "ignore" else t.sources[:1] for t in self.copied)
        read = (*(t.sources for t in self.merged), *compared)
        return sum(s.valid * s.stored_itemsize for sources in read for s in sources if s is not None)

    def is_grain(self, unit: int) -> bool:
        """Whether a unit is a grain of merged tensors."""
        return unit < self.flat.units

    def pieces(self, unit: int) -> Iterator[tuple[PlannedTensor, Piece]]:
        """The tensors' parts in one unit."""
        grains = self.flat.units
        if unit < grains:
            return ((self.merged[piece.tensor], piece) for piece in self.flat.pieces(unit))
        return ((self.copied[piece.tensor], piece) for piece in self.bytes.pieces(unit - grains))

    def reads(self, unit: int, k: int) -> Iterator[tuple[int, int, int]]:
        """(file, first byte, end) of what a unit reads of checkpoint k, in order; ranges that touch are joined."""
        file, begin, end = -1, 0, 0
        for tensor, piece in self.pieces(unit):
            source = tensor.sources[k]
            if source is None or (k > 0 and tensor.reason and tensor.compare == "ignore"):
                continue
            first, last, itemsize = piece.begin, piece.end, source.stored_itemsize
            if tensor.reason:
                nominal = ITEMSIZE.get(tensor.dtype, 1)
                first, last = first // nominal, last // nominal
            first, last = first * itemsize, min(last, source.valid) * itemsize
            if last <= first:
                continue
            if (source.file, source.offset + first) == (file, end):
                end += last - first
                continue
            if end > begin:
                yield file, begin, end
            file, begin, end = source.file, source.offset + first, source.offset + last
        if end > begin:
            yield file, begin, end

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the counts, by name; two plans with equal identities count the same."""
        tensors = [
            [
                tensor.name,
                tensor.dtype,
                list(tensor.shape),
                [s and s.identity for s in tensor.sources],
            ]
            for tensor in (*self.merged, *self.copied)
        ]
        return {
            "base": self.checkpoints[0].fingerprint,
            "agents": [checkpoint.fingerprint for checkpoint in self.checkpoints[1:]],
            "layout": digest([len(self.merged), tensors]),
            **({"recipes": recipes} if any(recipes := self._recipes()) else {}),
            **self.options.identity(),
            "epsilon": self.epsilon,
            "grain": GRAIN,
            "semantics": SEMANTICS,
        }

    def _recipes(self) -> list[list[str]]:
        """What of each checkpoint is computed how, each way once: the layout's digest has them tensor by tensor."""
        ways: list[set[str]] = [set() for _ in self.checkpoints]
        for tensor in (*self.merged, *self.copied):
            for k, source in enumerate(tensor.sources):
                if source is not None and source.recipe is not None:
                    ways[k].add(" ".join(map(str, source.identity[2:4])))
        return [sorted(found)[:8] for found in ways]

    @cached_property
    def digest(self) -> str:
        """The count digest: sha256 over `identity`."""
        return digest(self.identity)


def plan_count(
    base: Checkpoint,
    agents: Sequence[Checkpoint],
    epsilon: float = 1e-5,
    options: MatchOptions | None = None,
    same_bytes: SameBytes | None = None,
) -> CountPlan:
    """Plan pass 1 over `agents`, all trained from `base`.

    `same_bytes` compares two tensors of one checkpoint, needed where an agent stores a tied tensor twice.
    PlanError or CheckpointError, with every problem that the headers show.
    """
    if not 1 <= len(agents) <= MAX_AGENTS:
        raise PlanError(f"{len(agents)} agents; a merge takes 1 to {MAX_AGENTS}")
    options = options or MatchOptions()
    matched = match(base, agents, options, same_bytes)
    checkpoints = tuple(
        CheckpointRef(
            checkpoint.label,
            str(checkpoint.folder),
            tuple((name, file.size) for name, file in checkpoint.files.items()),
            checkpoint.fingerprint(),
            checkpoint.single_file,
        )
        for checkpoint in (base, *agents)
    )
    position = [{name: i for i, name in enumerate(c.files)} for c in (base, *agents)]
    merged = tuple(_planned(entry, position) for entry in matched.entries if not entry.reason)
    copied = tuple(_planned(entry, position) for entry in matched.entries if entry.reason)
    return CountPlan(
        checkpoints, merged, copied, options, epsilon, tuple(matched.notes), tuple(matched.mismatches)
    )


def _planned(entry: Match, position: Sequence[dict[str, int]]) -> PlannedTensor:
    base = entry.sources[0]
    assert base is not None
    sources = tuple(
        None if source is None else _source(source, base.elements, position[k])
        for k, source in enumerate(entry.sources)
    )
    nbytes = base.nbytes if base.recipe is None else base.elements * ITEMSIZE[base.dtype]
    return PlannedTensor(
        base.name, base.dtype, base.shape, base.elements, nbytes, sources, entry.compare, entry.reason
    )


def _source(info: TensorInfo, elements: int, position: dict[str, int]) -> Source:
    """`valid` counts whole items of unknown dtypes as bytes: they are only copied and compared."""
    valid = min(info.elements, elements) if info.dtype in ITEMSIZE else info.nbytes
    file = position[info.file]
    if info.recipe is None:
        return Source(file, info.offset, info.dtype, valid)
    needed = {Scaled: ("scale",), LowRank: ("a", "b"), Strided: ()}[type(info.recipe)]
    operands = tuple(
        Operand(position[other.file], other.offset, other.dtype, other.shape)
        for other in (getattr(info.recipe, name) for name in needed)
    )
    dtype = info.dtype if isinstance(info.recipe, Strided) else "F32"
    return Source(file, info.offset, dtype, valid, info.shape, info.recipe, operands)
