"""RAM's unique part: what one agent alone changed, and nothing else.

*Behavior Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572, which splits each agent's changes into
unique and shared ones; plain averaging of T agents divides the unique ones by T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ramstream.errors import UsageError
from ramstream.methods import Block, Method
from ramstream.methods._sums import added


@dataclass(frozen=True)
class RamUnique(Method):
    """τᵗ / dilution where agent t changed the element and no other did."""

    agent: int = 1
    """t: whose unique part, in the order in which agents are given, from 1."""
    dilution: float = 1.0
    """What the unique deltas are divided by; the number of agents shows what averaging does to them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("agent", least=1)
        if self.dilution <= 0:
            raise UsageError(f"{self.name()}: dilution is {self.dilution:g}; it must be more than 0")

    def check_agents(self, agents: int) -> None:
        """UsageError where there is no such agent."""
        if self.agent > agents:
            raise UsageError(
                f"{self.name()}: agent is {self.agent} and there are {agents}; use a number from 1 to {agents}"
            )

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        count = added(delta != 0 for delta in block.deltas)
        return block.where(count == 1, block.deltas[self.agent - 1] / block.p["dilution"], 0.0)
