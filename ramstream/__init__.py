"""Merge checkpoints of large language models that were RL-trained from one base, out of core.

from ramstream import Checkpoint, Limits, RamPlus, merge, plan_merge

plan = plan_merge(Checkpoint.open(base), [Checkpoint.open(a) for a in agents], RamPlus(r=0.1))
print(plan)
merge(plan, "out", Limits(memory="2GB"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramstream.checkpoint import Checkpoint
    from ramstream.engine.counting import count
    from ramstream.engine.limits import Limits
    from ramstream.engine.merging import merge
    from ramstream.errors import RamstreamError
    from ramstream.methods import Block, Method
    from ramstream.methods.dare_linear import DareLinear
    from ramstream.methods.dare_ties import DareTies
    from ramstream.methods.linear import Linear
    from ramstream.methods.papo import Papo
    from ramstream.methods.ram import Ram
    from ramstream.methods.ram_plus import RamPlus
    from ramstream.methods.ram_ties import RamTies
    from ramstream.methods.ram_unique import RamUnique
    from ramstream.methods.task_arithmetic import TaskArithmetic
    from ramstream.methods.ties import Ties
    from ramstream.overlap import OverlapStore
    from ramstream.plan import MatchOptions
    from ramstream.planning import plan_counts, plan_merge
    from ramstream.priority import fuse, group_normalised
    from ramstream.queries import stats_of
    from ramstream.verify import verify_output

_HOMES = {
    "Block": "methods",
    "Checkpoint": "checkpoint",
    "DareLinear": "methods.dare_linear",
    "DareTies": "methods.dare_ties",
    "Limits": "engine.limits",
    "Linear": "methods.linear",
    "MatchOptions": "plan",
    "Method": "methods",
    "OverlapStore": "overlap",
    "Papo": "methods.papo",
    "Ram": "methods.ram",
    "RamPlus": "methods.ram_plus",
    "RamTies": "methods.ram_ties",
    "RamUnique": "methods.ram_unique",
    "RamstreamError": "errors",
    "TaskArithmetic": "methods.task_arithmetic",
    "Ties": "methods.ties",
    "count": "engine.counting",
    "fuse": "priority",
    "group_normalised": "priority",
    "merge": "engine.merging",
    "plan_counts": "planning",
    "plan_merge": "planning",
    "stats_of": "queries",
    "verify_output": "verify",
}

__all__ = [
    "Block",
    "Checkpoint",
    "DareLinear",
    "DareTies",
    "Limits",
    "Linear",
    "MatchOptions",
    "Method",
    "OverlapStore",
    "Papo",
    "Ram",
    "RamPlus",
    "RamTies",
    "RamUnique",
    "RamstreamError",
    "TaskArithmetic",
    "Ties",
    "count",
    "fuse",
    "group_normalised",
    "merge",
    "plan_counts",
    "plan_merge",
    "stats_of",
    "verify_output",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Public names load what they need when they are first used: `--help` needs none of it.
    if name in _HOMES:
        return getattr(import_module(f"ramstream.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ramstream' has no attribute {name!r}")
