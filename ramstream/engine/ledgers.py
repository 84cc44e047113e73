"""Ledgers: which units are done and what was found in them, kept in a journal and replayed from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream import tallies
from ramstream.engine.worker import UnitResult, Work
from ramstream.errors import JournalError
from ramstream.journal import Journal, Record
from ramstream.plan import CountPlan, MergePlan

Stats = list[list[list[int]]]
"""[size, mtime, inode] of every file of every checkpoint."""


class Ledger:
    """What both ledgers share: the head line that says whose the journal is, and the state of the inputs."""

    kind = ""

    def __init__(self, path: Path, digest: str, units: int, durable: bool = True) -> None:
        self.done = np.zeros(units, bool)
        self.inputs: Stats | None = None
        """The input files' state when work was last vouched for, None for a fresh journal."""
        self._journal = Journal(path, durable)
        self._digest = digest

    def replay(self) -> None:
        """Take over what the journal vouches for; JournalError where it belongs to another plan."""
        for position, record in self._journal.replay():
            if "journal" in record:
                if (record["journal"], record["digest"]) != (self.kind, self._digest):
                    raise JournalError(
                        f"{self._journal.path} is the {record['journal']} journal of {record['digest'][:12]}, "
                        f"not the {self.kind} journal of {self._digest[:12]}; remove it to start anew"
                    )
                self.inputs = record["inputs"]
            else:
                self.take(position, record)

    def open_session(self, inputs: Stats) -> None:
        """Write down the state of the inputs that all following lines are about."""
        if self.inputs != inputs:
            self._journal.append([{"journal": self.kind, "digest": self._digest, "inputs": inputs}])
            self.inputs = inputs

    def add(self, records: Sequence[Record]) -> None:
        """Vouch for finished work: on disk when this returns."""
        for position, record in zip(self._journal.append(records), records, strict=True):
            self.take(position, record)

    def take(self, position: int, record: Record) -> None:
        """Note one record."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether every unit is done."""
        return bool(self.done.all())

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


class CountLedger(Ledger):
    """Pass 1: inputs' checksums, who changed anything in each unit, and where the tallies' lines are."""

    kind = "count"

    def __init__(self, path: Path, plan: CountPlan, durable: bool = True) -> None:
        super().__init__(path, plan.digest, plan.units, durable)
        self._plan = plan
        self._checksums = np.zeros((plan.units, plan.agents + 1), np.uint64)
        self._changed = np.zeros((plan.units, plan.agents), bool)
        self._position = np.zeros(plan.units, np.int64)
        self.differs: set[tuple[int, int]] = set()
        """(tensor, agent) of copied tensors whose bytes are not the base's."""
        self.replay()

    def take(self, position: int, record: Record) -> None:
        """Note one counted unit."""
        unit = record["unit"]
        self._position[unit] = position
        self._checksums[unit] = record["inputs"]
        self._changed[unit] = np.array(record.get("changed", 0)) > 0
        self.differs.update((tensor, agent) for tensor, agent in record.get("differs", ()))
        self.done[unit] = True

    @staticmethod
    def record(result: UnitResult) -> Record:
        """The journal line of one counted unit."""
        line: Record = {"unit": result.unit, "inputs": result.inputs}
        if result.tallies is not None:
            line |= {"changed": result.changed, "tallies": result.tallies}
        if result.differs:
            line["differs"] = result.differs
        return line

    def work(self, unit: int, merge: bool) -> Work:
        """What is left to do in a unit, with what pass 1 found there."""
        if not self.done[unit]:
            return Work(unit, count=True, merge=merge)
        skipped = frozenset(int(k) + 1 for k in np.flatnonzero(~self._changed[unit]))
        return Work(unit, False, merge, tuple(map(int, self._checksums[unit])), skipped)

    def check(self, unit: int) -> Work:
        """Read a counted unit again and compare every input's checksum."""
        return Work(unit, False, False, tuple(map(int, self._checksums[unit])))

    def tallies(self) -> tallies.Tallies:
        """The tallies, one record a merged tensor, added in grain order."""
        total = tallies.empty(self._plan.agents, len(self._plan.merged))
        for unit in range(self._plan.flat.units):
            record = self._journal.read(int(self._position[unit]))
            pieces = tallies.decode(record["tallies"], self._plan.agents)
            for (_, piece), counted in zip(self._plan.pieces(unit), pieces, strict=True):
                first = counted["refused_first"]
                first[first >= 0] += piece.begin
                tallies.add(total, piece.tensor, counted)
        return total


class MergeLedger(Ledger):
    """Pass 2: the output's checksums, what overflowed, and how many elements the coefficients moved."""

    kind = "merge"

    def __init__(self, path: Path, plan: MergePlan) -> None:
        super().__init__(path, plan.digest, plan.count.units)
        self._grains = plan.count.flat.units
        self.checksums = np.zeros(plan.count.units, np.uint64)
        self.overflow: dict[tuple[bool, int], int] = {}
        """Elements beyond the output's range by (is merged, tensor)."""
        self.moved = 0
        self.coefficients: str | None = None
        """Digest of the coefficients that the merged units used."""
        self.publishing = False
        self.replay()

    def take(self, position: int, record: Record) -> None:
        """Note one merged unit, or one of the two turning points."""
        if "unit" in record:
            unit = record["unit"]
            self.done[unit] = True
            self.checksums[unit] = record["output"]
            self.moved += record.get("moved", 0)
            for tensor, n in record.get("overflow", ()):
                key = (unit < self._grains, tensor)
                self.overflow[key] = self.overflow.get(key, 0) + n
        self.coefficients = record.get("coefficients", self.coefficients)
        self.publishing = record.get("publishing", self.publishing)

    @staticmethod
    def record(result: UnitResult) -> Record:
        """The journal line of one merged unit."""
        line: Record = {"unit": result.unit, "output": result.output}
        if result.moved:
            line["moved"] = result.moved
        if result.overflow:
            line["overflow"] = result.overflow
        return line

    def use_coefficients(self, coefficients: NDArray[np.float64]) -> None:
        """Write down which coefficients are used; JournalError where finished units used others."""
        import hashlib

        name = hashlib.sha256(coefficients.tobytes()).hexdigest()
        if self.coefficients not in (None, name):
            raise JournalError(
                f"{self._journal.path}: units were merged with coefficients {self.coefficients[:12]}, "
                f"now they are {name[:12]}; remove the unfinished run to start anew"
            )
        if self.coefficients is None:
            self.add([{"coefficients": name}])

    def begin_publishing(self) -> None:
        """Vouch that the output is complete and only its name is missing."""
        if not self.publishing:
            self.add([{"publishing": True}])


def input_stats(plan: CountPlan) -> Stats:
    """The present state of every input file."""
    result: Stats = []
    for checkpoint in plan.checkpoints:
        stats: list[Any] = [path.stat() for path in checkpoint.paths]
        result.append([[s.st_size, s.st_mtime_ns, s.st_ino] for s in stats])
    return result
