"""Ledgers: which units are done and what was found in them, kept in a journal and replayed from it.

One of the counts, one of the merge, one of the survey (`ramstream.engine.survey`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ramstream import tallies
from ramstream.engine.inputs import Stats
from ramstream.engine.worker import UnitResult, Work
from ramstream.errors import JournalError
from ramstream.journal import Journal, Line
from ramstream.plan import CountPlan, MergePlan


class Ledger:
    """What all ledgers share: whose the journal is, the state of the inputs, and what was read of them.

    Every line vouches for one unit or several, and holds the inputs' checksums that it was made from: none depends
    on another journal's being there.
    """

    kind = ""

    def __init__(self, path: Path, digest: str, plan: CountPlan, durable: bool = True) -> None:
        self.done = np.zeros(plan.units, bool)
        self.checksums = np.zeros((plan.units, plan.agents + 1), np.uint64)
        """Of every input, unit by unit, where done."""
        self.inputs: Stats | None = None
        """The input files' state when work was last vouched for, None for a fresh journal."""
        self._plan = plan
        self._journal, self._durable = Journal(path, durable), durable
        self._digest = digest

    @property
    def folder(self) -> Path | None:
        """Where the journal is, and what it vouches for; None where nothing is kept."""
        return self._journal.path.parent if self._durable else None

    def replay(self) -> None:
        """Take over what the journal vouches for; JournalError where it belongs to another plan."""
        for position, line in self._journal.replay():
            if "journal" in line:
                if (line["journal"], line["digest"]) != (self.kind, self._digest):
                    raise JournalError(
                        f"{self._journal.path} is the {line['journal']} journal of {line['digest'][:12]}, "
                        f"not the {self.kind} journal of {self._digest[:12]}; remove it to start anew"
                    )
                self.inputs = line["inputs"]
            else:
                self.take(position, line)

    def note_inputs(self, inputs: Stats) -> None:
        """Write down the state of the inputs that all following lines are about."""
        if self.inputs != inputs and self._journal.writable:
            self._journal.append([{"journal": self.kind, "digest": self._digest, "inputs": inputs}])
            self.inputs = inputs

    def add(self, lines: Sequence[Line]) -> None:
        """Vouch for finished work: on disk when this returns."""
        for position, line in zip(self._journal.append(lines), lines, strict=True):
            self.take(position, line)

    def take(self, position: int, line: Line) -> None:
        """Note one line."""
        units = line.get("unit", line.get("units"))
        if units is not None:
            self.done[units] = True
            self.checksums[units] = line["inputs"]

    def check(self, unit: int) -> Work:
        """Read a finished unit's inputs again and compare every checksum."""
        return Work(unit, False, False, self.expected(unit))

    def expected(self, unit: int) -> tuple[int, ...]:
        """The inputs' checksums that a finished unit was made from."""
        return tuple(map(int, self.checksums[unit]))

    @property
    def complete(self) -> bool:
        """Whether every unit is done."""
        return bool(self.done.all())

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class CountLedger(Ledger):
    """Pass 1: who changed anything in each unit, and where the tallies' lines are."""

    kind = "count"

    def __init__(self, path: Path, plan: CountPlan, durable: bool = True) -> None:
        super().__init__(path, plan.digest, plan, durable)
        self._changed = np.zeros((plan.units, plan.agents), bool)
        self._position = np.zeros(plan.units, np.int64)
        self.differs: set[tuple[int, int]] = set()
        """(tensor, agent) of copied tensors whose bytes are not the base's."""
        self.replay()

    def take(self, position: int, line: Line) -> None:
        """Note one counted unit."""
        super().take(position, line)
        unit = line["unit"]
        self._position[unit] = position
        self._changed[unit] = np.array(line.get("changed", 0)) > 0
        self.differs.update((tensor, agent) for tensor, agent in line.get("differs", ()))

    @staticmethod
    def line(result: UnitResult) -> Line:
        """The journal line of one counted unit."""
        line: Line = {"unit": result.unit, "inputs": result.inputs}
        if result.tallies is not None:
            line |= {"changed": result.changed, "tallies": result.tallies}
        if result.differs:
            line["differs"] = result.differs
        return line

    def work(self, unit: int, merge: bool, skip: bool) -> Work:
        """What is left to do in a unit. With `skip` the files of agents that changed nothing there are not read:
        right as long as the inputs' state is the one they were counted in.
        """
        if not self.done[unit]:
            return Work(unit, count=True, merge=merge)
        unchanged = np.flatnonzero(~self._changed[unit]) + 1 if skip else ()
        return Work(unit, False, merge, self.expected(unit), frozenset(map(int, unchanged)))

    def changed_grains(self) -> list[int]:
        """Grains in which anybody changed anything: those whose bits are stored."""
        return np.flatnonzero(self._changed[: self._plan.flat.units].any(axis=1)).tolist()

    def tallies(self) -> tallies.Tallies:
        """The tallies, one record a merged tensor, added in grain order."""
        total = tallies.empty(self._plan.agents, len(self._plan.merged))
        for unit in range(self._plan.flat.units):
            line = self._journal.read(int(self._position[unit]))
            pieces = tallies.decode(line["tallies"], self._plan.agents)
            for (_, piece), counted in zip(self._plan.pieces(unit), pieces, strict=True):
                first = counted["refused_first"]
                first[first >= 0] += piece.begin
                tallies.add(total, piece.tensor, counted)
        return total


class MergeLedger(Ledger):
    """Pass 2: the output's checksums, what overflowed, and how many elements the coefficients moved."""

    kind = "merge"

    def __init__(self, path: Path, plan: MergePlan) -> None:
        super().__init__(path, plan.digest, plan.count)
        self.outputs = np.zeros(plan.count.units, np.uint64)
        """Checksums of what was written, unit by unit, where done."""
        self.overflow: dict[tuple[bool, int], int] = {}
        """Elements beyond the output's range by (is merged, tensor)."""
        self.moved = 0
        self._squares = np.zeros(plan.count.units)
        self.numbers: str | None = None
        """Digest of the numbers that the merged units used."""
        self.publishing = False
        self.replay()

    def take(self, position: int, line: Line) -> None:
        """Note one merged unit, once, or one of the two turning points."""
        new = "unit" in line and not self.done[line["unit"]]
        super().take(position, line)
        if new:
            unit = line["unit"]
            self.outputs[unit] = line["output"]
            self.moved += line.get("moved", 0)
            self._squares[unit] = line.get("squares", 0.0)
            for tensor, n in line.get("overflow", ()):
                key = (self._plan.is_grain(unit), tensor)
                self.overflow[key] = self.overflow.get(key, 0) + n
        self.numbers = line.get("numbers", self.numbers)
        self.publishing = line.get("publishing", self.publishing)

    @staticmethod
    def line(result: UnitResult) -> Line:
        """The journal line of one merged unit."""
        line: Line = {"unit": result.unit, "inputs": result.inputs, "output": result.output}
        if result.moved:
            line["moved"] = result.moved
        if result.overflow:
            line["overflow"] = result.overflow
        if result.squares:
            line["squares"] = result.squares
        return line

    @property
    def norm(self) -> float:
        """L2 norm of the merged delta, before it was narrowed."""
        return float(np.sqrt(self._squares.sum()))

    def use_numbers(self, numbers: NDArray[np.float64]) -> None:
        """Write down which numbers the merge uses; JournalError where finished units used others."""
        name = hashlib.sha256(numbers.tobytes()).hexdigest()
        if self.numbers not in (None, name):
            raise JournalError(
                f"{self._journal.path}: units were merged with the numbers {self.numbers[:12]}, "
                f"now they are {name[:12]}; remove the unfinished run to start anew"
            )
        if self.numbers is None:
            self.add([{"numbers": name}])

    def begin_publishing(self) -> None:
        """Vouch that the output is complete and only its name is missing."""
        if not self.publishing:
            self.add([{"publishing": True}])
