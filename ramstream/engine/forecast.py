"""What a merge would read, write and take, before it does."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ramstream import overlap
from ramstream.engine.disk import free_disk
from ramstream.engine.events import ignore
from ramstream.engine.executors import connected
from ramstream.engine.limits import Capacity, Limits, available_memory
from ramstream.engine.merging import keeps_store, preflight
from ramstream.engine.passes import Books, run_pass
from ramstream.engine.place import Place
from ramstream.engine.survey import scans
from ramstream.engine.worker import Setup, Work
from ramstream.errors import PlanError
from ramstream.kernels import jit
from ramstream.overlap import OverlapStore
from ramstream.plan import CountPlan, MergePlan

RATE = 1.5e9
"""Bytes per second that a local disk writes, and that a pass reads where too little is there for a rehearsal."""

STARTUP = 0.8
"""Seconds until the first grain: the interpreter, libraries, cached kernels."""

COMPILING = 12.0
"""Seconds that the kernels take where they were never compiled."""

REHEARSED = 8
"""Units in a row that are counted, at two places, to see how fast this machine does it."""


def forecast(
    plan: MergePlan,
    out: str | Path,
    limits: Limits,
    store: Path | None = None,
    keep_store: bool | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """`--dry-run` as plain data, sizes in bytes. Refuses what the merge itself would refuse at once."""
    place, count = Place.of(out), plan.count
    keep = keeps_store(count, store, keep_store)
    finished = place.finished(plan) is not None
    titles = [] if finished else scans(plan, _is_counted(store or place.store, plan))
    kept = overlap.projected_size(count) if keep else 0
    read, written = len(titles) * count.bytes_read, 0 if finished else plan.written
    with connected(limits, ignore) as workers:
        check = (plan, place, workers, store, keep, overwrite)
        found = workers(count, plan) if finished else preflight(*check)
        place.refuse_unfinished(plan)
        seconds = 0.0 if finished else _seconds(count, found, titles, written + kept)
    return {
        "base": count.checkpoints[0].label,
        "agents": count.labels,
        "method": str(plan.method),
        "merged_tensors": len(count.merged),
        "copied_tensors": len(count.copied),
        "elements": sum(tensor.elements for tensor in count.merged),
        "already_complete": finished,
        "passes": len(titles),
        "bytes_read": read,
        "bytes_written": written,
        "files": [f"{file.name} ({file.size} bytes)" for file in plan.outputs],
        "side_files": [file.name for file in plan.side_files],
        "left_behind": list(plan.left_behind),
        "overlap_store_bytes": kept,
        "workers": found.workers,
        "device": found.device,
        "projected_memory_bytes": found.projected,
        "memory_budget_bytes": found.budget,
        "free_disk_bytes": free_disk(place.out),
        "estimated_seconds": round(seconds, 1),
        "count_digest": count.digest,
        "merge_digest": plan.digest,
        "notes": count.all_notes,
    }


def _is_counted(store: Path, plan: MergePlan) -> bool:
    """Whether a complete store has the counts."""
    try:
        found = OverlapStore(store)
    except PlanError:
        return False
    return found.complete and found.digest == plan.count.digest


def _seconds(count: CountPlan, found: Capacity, titles: list[str], written: int) -> float:
    """An estimate from a rehearsal: a few units counted as the inputs lie, on disk or in the cache, and again.

    A scan takes as long as its reading or its kernels, the last one perhaps as long as its writing.
    """
    ready = jit.compiled("counting.count")
    first, again = _rehearsed(count, found) if ready else (RATE, RATE)
    later = again if count.bytes_read < available_memory() else first
    seconds = STARTUP if ready else STARTUP + COMPILING
    for scan, title in enumerate(titles):
        reading = count.bytes_read / (later if scan else first)
        kernels = count.bytes_read / again * (1 + title.startswith("counting and"))
        writing = written / min(first, RATE) if scan == len(titles) - 1 else 0.0
        seconds += max(reading, kernels, writing)
    return seconds


def _rehearsed(plan: CountPlan, found: Capacity) -> tuple[float, float]:
    """Bytes per second of counting units spread over the inputs, and of counting the same ones once more."""
    units = min(REHEARSED, plan.flat.units // 4)
    if not units or not plan.bytes_read:
        return RATE, RATE
    begins = (plan.flat.units // 4, plan.flat.units * 3 // 4 - units)
    chosen = [begin + k for begin in begins for k in range(units)]
    books = Books(Setup(plan, found.io), None, None, ignore, durable=False)
    rates = []
    for sample in ([0, plan.flat.units - 1], chosen, chosen):  # the first of them only loads the kernels
        begun = time.perf_counter()
        run_pass("rehearsal", books, sample, lambda unit: Work(unit, count=True, merge=False), found)
        nbytes = len(sample) * plan.bytes_read / plan.units
        rates.append(nbytes / (time.perf_counter() - begun))
    return rates[1], rates[2]
