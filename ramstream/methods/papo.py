"""PAPO: the other agents add to a primary one where they agree with it, and never turn its sign.

After the properties that the abstract of *Primary Advantage Policy Optimization* publishes for advantages, here
applied to deltas; not that paper's own formula, which is not public. The auxiliary delta a is RAM's (*Behavior
Knowledge Merge in Reinforced Agentic Models*, arXiv 2601.13572) over the agents that are not the primary one, p:

    a = Σ τ / c over the c contributors, 0 where there is none
    merged delta = p + w·a where the signs of p and a agree or one is 0, otherwise p·|p| / (|p| + w·|a|)

RAM averages a sign conflict away; here the primary keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ramstream.errors import UsageError
from ramstream.methods import Block, Method
from ramstream.priority import rule


@dataclass(frozen=True)
class Papo(Method):
    """The primary agent's delta and RAM of the others', fused by `ramstream.priority`."""

    primary: int = 1
    """The agent whose signs count, from 1 in command-line order."""
    weight: float = 1.0
    """w: how much the others count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("primary", least=1)
        self._at_least("weight")

    def check_agents(self, agents: int) -> None:
        """UsageError where there is no such primary agent, or no other one."""
        if agents < 2:
            raise UsageError(
                f"{self.name()} fuses a primary agent with others, and there is only {agents}; give two or more"
            )
        if self.primary > agents:
            raise UsageError(
                f"{self.name()}: primary is {self.primary}, of {agents} agents; it must be 1 .. {agents}"
            )

    def merge(self, block: Block) -> Any:
        """`Method.merge`."""
        total = count = 0.0
        for t, delta in enumerate(block.deltas, start=1):
            if t != self.primary:
                total = total + delta
                count = count + (delta != 0)
        mean = total / block.where(count == 0, 1.0, count)
        return rule(block.deltas[self.primary - 1], mean, block.p["weight"], block.where)
