"""What a merge would read, write and take, before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ramstream import overlap
from ramstream.engine.disk import free_disk
from ramstream.engine.limits import Limits, capacity
from ramstream.engine.merging import keeps_store, preflight
from ramstream.engine.place import Place
from ramstream.errors import PlanError
from ramstream.overlap import OverlapStore
from ramstream.plan import MergePlan

RATE = 1.5e9
"""Bytes per second of one local disk, for an estimate of time."""


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
    check = (plan, place, limits, store, keep, overwrite)
    found = capacity(limits, count, plan) if finished else preflight(*check)
    passes = 0 if finished else 1 if _is_counted(store or place.store, plan) else 2
    kept = overlap.projected_size(count) if keep else 0
    read, written = passes * count.bytes_read, 0 if finished else plan.written
    return {
        "base": count.checkpoints[0].label,
        "agents": count.labels,
        "method": str(plan.method),
        "merged_tensors": len(count.merged),
        "copied_tensors": len(count.copied),
        "elements": sum(tensor.elements for tensor in count.merged),
        "already_complete": finished,
        "passes": passes,
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
        "estimated_seconds": round((read + written + kept) / RATE, 1),
        "count_digest": count.digest,
        "merge_digest": plan.digest,
        "notes": count.all_notes,
    }


def _is_counted(store: Path, plan: MergePlan) -> bool:
    """Whether one pass is left: λ needs no counts, or a complete store has them."""
    if not plan.method.needs_counts:
        return True
    try:
        found = OverlapStore(store)
    except PlanError:
        return False
    return found.complete and found.digest == plan.count.digest
