"""Plans: pure data that say what is read, in which order of elements, and where it is written.

`plan_count` lays the merged tensors end to end in one flat space of elements, and the copied ones in a second
space of bytes; both are cut into units of work that depend on nothing else. `plan_output` adds the method and
the output files. Planning writes nothing and loads no torch.
"""

from ramstream.plan.count import CheckpointRef, CountPlan, Operand, PlannedTensor, Source, plan_count
from ramstream.plan.described import Described
from ramstream.plan.layout import Space, differences, digest
from ramstream.plan.matching import MatchOptions
from ramstream.plan.merge import MergePlan, OutputFile, SideFile, Slot, plan_output

__all__ = [
    "CheckpointRef",
    "CountPlan",
    "Described",
    "MatchOptions",
    "MergePlan",
    "Operand",
    "OutputFile",
    "PlannedTensor",
    "SideFile",
    "Slot",
    "Source",
    "Space",
    "differences",
    "digest",
    "plan_count",
    "plan_output",
]
