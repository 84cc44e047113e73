"""What all groups share: the options, the models, the state of the page cache, and a place for outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from make_checkpoint import Recipe

from benchmark.caches import Caches
from benchmark.models import Model, Models
from benchmark.processes import Program, Say, take_turns

FULL = 500_000_000
"""Elements of each checkpoint at full size."""
SMALL = 500_000
"""Elements of a model of 1 MB."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    parameters: int
    rounds: int
    peers: bool
    peer_rounds: int
    mergekit: str
    cgroup: str | None
    extra: list[str]
    """Options for `ramstream merge`."""

    @property
    def scale(self) -> float:
        """Size to full size."""
        return self.parameters / FULL


@dataclass(frozen=True)
class Bench:
    """Handed to every group."""

    options: Options
    models: Models
    caches: Caches
    work: Path
    """An empty folder for outputs, on the disk the models are on."""
    say: Say

    def main(self) -> Model:
        """The model most lines are about: base and three agents, published profile."""
        return self.models.get(Recipe(self.options.parameters))

    def small(self) -> Model:
        """Base and three agents of 1 MB."""
        return self.models.get(Recipe(SMALL))

    def rounds(self, *programs: Program, at_most: int | None = None, warm_up: bool = True) -> None:
        """Let programs take turns for the rounds that were asked for, perhaps fewer."""
        rounds = min(self.options.rounds, at_most or self.options.rounds)
        take_turns(programs, rounds, self.say, warm_up)
