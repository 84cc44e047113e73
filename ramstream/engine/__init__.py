"""Run a plan: two streaming passes, workers, and the order of durable steps that lets a killed run go on.

from ramstream.engine import Limits, merge
merge(plan, "out", Limits(memory="2GB"))
"""

from ramstream.engine.counting import count
from ramstream.engine.limits import Capacity, Limits, capacity
from ramstream.engine.merging import KEEP_STORE_LIMIT, Outcome, keeps_store, merge

__all__ = ["KEEP_STORE_LIMIT", "Capacity", "Limits", "Outcome", "capacity", "count", "keeps_store", "merge"]
