"""What a worker does with a unit in a survey: takes histograms of its deltas, or measures what a merge changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ramstream import memory
from ramstream.kernels.host import Merger, Sources
from ramstream.kernels.sifting import Sifter
from ramstream.plan import CountPlan, PlannedTensor
from ramstream.quantiles import CHOSEN, Part, Queries
from ramstream.types import Dtype, Piece

if TYPE_CHECKING:
    from ramstream.engine.worker import Setup


@dataclass
class Surveyed:
    """What a survey found in one unit."""

    parts: list[Part] = field(default_factory=list)
    """Histograms of tensors that are not wholly in the unit, or of the model's part."""
    chosen: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Answers about tensors that are: rows of `quantiles.CHOSEN`."""
    squares: list[tuple[int, float]] = field(default_factory=list)
    """(tensor, Σ of the squares of its merged deltas)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the histograms."""
        return sum(part.nbytes for part in self.parts)

    @property
    def answers(self) -> NDArray[np.void]:
        """`chosen` as an array."""
        return np.array(self.chosen, CHOSEN)


class Surveyor:
    """Looks at the strips of a unit's pieces, in order. This one looks at nothing: no survey is going on."""

    def begin(self, tensor: PlannedTensor, piece: Piece) -> None:
        """Start a piece."""

    def strip(self, sources: Sources, n: int) -> None:
        """Look at the next n elements of the piece."""

    def end(self) -> None:
        """End the piece."""

    def finish(self) -> Surveyed | None:
        """What was found in the unit."""
        return None


class _Sifting(Surveyor):
    """Takes histograms for quantiles."""

    def __init__(self, count: CountPlan, queries: Queries) -> None:
        self._queries, self._sifter = queries, Sifter(queries, count.agents, *rule_of(count))
        self._found, self._wanted, self._whole = Surveyed(), False, False

    def begin(self, tensor: PlannedTensor, piece: Piece) -> None:
        self._wanted = bool(self._queries.wanted(piece.tensor).any())
        self._whole = self._queries.by_tensor and piece.end - piece.begin == tensor.elements
        if self._wanted:
            self._sifter.begin(self._queries.group(piece.tensor), tensor.wide)

    def strip(self, sources: Sources, n: int) -> None:
        if self._wanted:
            self._sifter.strip(sources, n)

    def end(self) -> None:
        if not self._wanted or not self._queries.by_tensor:
            return
        for part in self._sifter.finish():
            if self._whole:
                (key,), (left,) = self._queries.pick(part)
                self._found.chosen.append((part.group, part.agent, int(key), int(left)))
            else:
                self._found.parts.append(part)

    def finish(self) -> Surveyed:
        found, self._found = self._found, Surveyed()
        if not self._queries.by_tensor:
            found.parts = self._sifter.finish()
        return found


class _Measuring(Surveyor):
    """Merges into a buffer that nobody reads, for the norm of the merged deltas."""

    def __init__(self, setup: Setup) -> None:
        assert setup.merge is not None, "a merge is measured"
        self._plan = setup.merge
        self._merger = Merger(self._plan.program, *rule_of(setup.count), self._plan.seed)
        self._numbers, self._buffer = setup.numbers, np.empty(memory.output(self._plan.itemsize), np.uint8)
        self._found = Surveyed()

    def begin(self, tensor: PlannedTensor, piece: Piece) -> None:
        self._tensor, self._index = tensor, piece.tensor

    def strip(self, sources: Sources, n: int) -> None:
        assert self._numbers is not None, "known before anything is measured"
        tensor, dtype = self._tensor, Dtype[self._plan.merged[self._index].dtype]
        out = self._buffer[: n * dtype.itemsize]
        self._merger.strip(sources, n, self._numbers[self._index], tensor.wide, dtype, out)

    def end(self) -> None:
        self._found.squares.append((self._index, self._merger.take().squares))

    def finish(self) -> Surveyed:
        found, self._found = self._found, Surveyed()
        return found


def rule_of(plan: CountPlan) -> tuple[float, str, Dtype | None]:
    """When an element counts as changed, as the kernels take it."""
    return plan.epsilon, plan.options.on_nonfinite, plan.options.compare_dtype


NOTHING = Surveyor()
"""For units that are not surveyed."""


def surveyor(setup: Setup) -> Surveyor:
    """What a worker surveys with."""
    if not setup.survey:
        return NOTHING
    return _Measuring(setup) if setup.queries is None else _Sifting(setup.count, setup.queries)
