"""What no merge can be faster than: read every input once or twice, write the output's bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmark import caches
from benchmark.commands import child
from benchmark.models import Model
from benchmark.processes import Program, seconds_of
from benchmark.setting import Bench


def _nothing() -> None:
    """The state another program left is the one that is wanted."""


@dataclass
class Floor:
    """Three ways of reading, the fastest of which counts, and one of writing.

    With `twice` each reader runs once more on what the first run left in the page cache.
    """

    bench: Bench
    model: Model
    before: Callable[[], None]
    twice: bool = False
    cgroup: Path | None = None
    readers: list[Program] = field(init=False)
    again: list[Program] = field(init=False)
    writer: Program = field(init=False)

    def __post_init__(self) -> None:
        inputs = self.model.inputs
        ways = {
            "cat": ["sh", "-c", 'exec cat "$@" > /dev/null', "cat", *map(str, inputs)],
            "pread": child("read", "pread", *inputs),
            "mapped": child("read", "mapped", *inputs),
        }
        self.readers = [self._program(f"read by {way}", command) for way, command in ways.items()]
        self.again = [
            self._program(f"{reader.name}, again", reader.command, _nothing) for reader in self.readers
        ]
        out = self.bench.work / "floor"
        self.writer = self._program("write", child("write", out, self.model.output))
        self.writer.leftovers = [out]

    def _program(self, name: str, command: list[str], before: Callable[[], None] | None = None) -> Program:
        return Program(name, command, before=before or self.before, cgroup=self.cgroup)

    @property
    def programs(self) -> list[Program]:
        """In the order they take turns."""
        if not self.twice:
            return [*self.readers, self.writer]
        pairs = zip(self.readers, self.again, strict=True)
        return [*(program for pair in pairs for program in pair), self.writer]

    @property
    def one(self) -> float:
        """Seconds: every input once, the output once."""
        return min(reader.best for reader in self.readers) + self.writer.best

    @property
    def two(self) -> float:
        """Seconds: every input twice, the output once."""
        if self.cgroup is None and not caches.fit(self.model.nbytes):
            return 2 * min(reader.best for reader in self.readers) + self.writer.best
        pairs = zip(self.readers, self.again, strict=True)
        return min(first.best + second.best for first, second in pairs) + self.writer.best

    @property
    def raw(self) -> dict[str, list[float]]:
        return seconds_of(*self.programs)
