"""What is measured of the library from inside; prints one JSON object.

python library.py count STORE|- BASE AGENT...     seconds of `count`, with a store or without
python library.py sweep STORE BASE AGENT...       bytes read to make a store and to merge with ten r from it
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ramstream import Checkpoint, RamPlus, count, merge, plan_counts, plan_merge

VALUES = [round(0.05 * step, 2) for step in range(1, 11)]


class Reads:
    """A listener that adds up what the engine says it read."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, event: Any) -> None:
        self.bytes += getattr(event, "read", 0)


def timed_count(store: str, paths: list[str]) -> dict[str, Any]:
    base, *agents = (Checkpoint.open(path) for path in paths)
    plan = plan_counts(base, agents)
    place = None if store == "-" else Path(store)
    start = time.perf_counter()
    count(plan, store=place)
    return {"seconds": time.perf_counter() - start}


def sweep(store: str, paths: list[str]) -> dict[str, Any]:
    base, *agents = (Checkpoint.open(path) for path in paths)
    inputs = sum(tensor.nbytes for one in (base, *agents) for tensor in one.tensors.values())
    counting = Reads()
    count(plan_counts(base, agents), store=Path(store), listener=counting)
    out, merging = Path(store).with_name("swept"), []
    for value in VALUES:
        reads = Reads()
        merge(plan_merge(base, agents, RamPlus(r=value)), out, store=Path(store), listener=reads)
        merging.append(reads.bytes)
        shutil.rmtree(out)
    return {"inputs": inputs, "counting": counting.bytes, "merging": merging}


def main() -> None:
    what, store, *paths = sys.argv[1:]
    print(json.dumps((timed_count if what == "count" else sweep)(store, paths)))


if __name__ == "__main__":
    main()
