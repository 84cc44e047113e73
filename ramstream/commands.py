"""What the commands do with parsed options: open, plan, run. The seam between the command line and the library.

Each function imports what it needs: a question to a store is answered before numba would have loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramstream import methods
from ramstream.errors import PlanError
from ramstream.types import parse_dtype

if TYPE_CHECKING:
    from ramstream.engine import Limits, Outcome
    from ramstream.methods import Method
    from ramstream.plan import MatchOptions, MergePlan

READ_RATE = 1.5e9
"""Bytes per second of one local disk, for an estimate of time."""


def parse_parameters(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a dictionary. PlanError for a word without `=` or a name given twice."""
    result: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise PlanError(f"-p {word!r}: write NAME=VALUE, e.g. -p r=0.2")
        if name in result:
            raise PlanError(f"-p {name} is given twice, as {result[name]} and {value}")
        result[name] = value
    return result


def _match_options(options: dict[str, Any]) -> MatchOptions:
    from ramstream.plan import MatchOptions

    compare = options["compare_dtype"]
    return MatchOptions(
        include=options["include"],
        exclude=options["exclude"],
        missing=options["missing"],
        extra=options["extra"],
        vocab=options["vocab"],
        on_nonfinite=options["on_nonfinite"],
        compare_dtype=parse_dtype(compare) if compare else None,
    )


def _limits(options: dict[str, Any]) -> Limits:
    from ramstream.engine import Limits

    return Limits(options["memory"], options["workers"], options.get("device", "cpu"), options["io"])


def plan_from(base: str, agents: Sequence[str], options: dict[str, Any]) -> tuple[MergePlan, Limits]:
    """The plan of `ramstream merge` and its limits."""
    from ramstream.checkpoint import open_all
    from ramstream.engine.limits import parse_size
    from ramstream.planning import plan_merge

    method = methods.create(options["method"], parse_parameters(options["parameters"]))
    dtype = parse_dtype(options["dtype"]) if options["dtype"] else None
    shard_size = parse_size(options["shard_size"]) if options["shard_size"] else None
    match_options, limits = _match_options(options), _limits(options)
    first, *others = open_all([base, *agents])
    return plan_merge(first, others, method, match_options, dtype, shard_size), limits


def run_merge(plan: MergePlan, out: Path, limits: Limits, options: dict[str, Any]) -> Outcome:
    """Run `ramstream merge` with progress on stderr."""
    from ramstream.console import progress
    from ramstream.engine import merge

    with progress(options["quiet"], options["verbose"]) as listener:
        return merge(
            plan,
            out,
            limits,
            store=options["store"],
            keep_store=options["keep_store"],
            overwrite=options["overwrite"],
            listener=listener,
        )


def dry_run(plan: MergePlan, out: Path, limits: Limits, options: dict[str, Any]) -> dict[str, Any]:
    """What the merge would read, write and take, as plain data. BudgetError as the merge itself."""
    from ramstream.engine import capacity, keeps_store
    from ramstream.engine.limits import free_disk
    from ramstream.engine.passes import unit_bytes
    from ramstream.overlap import projected_size
    from ramstream.tallies import tally_dtype

    count_plan = plan.count
    found = capacity(limits, count_plan, plan)
    read = sum(unit_bytes(count_plan, unit) for unit in range(count_plan.units))
    passes = 2 if plan.method.needs_counts and not _is_counted(options["store"], count_plan.digest) else 1
    keep = keeps_store(count_plan, options["store"], options["keep_store"])
    store = projected_size(count_plan, tally_dtype(count_plan.agents).itemsize) if keep else 0
    seconds = (passes * read + plan.written + store) / READ_RATE
    return {
        "base": count_plan.checkpoints[0].label,
        "agents": count_plan.labels,
        "method": f"{plan.method.name()} {vars(plan.method)}",
        "merged_tensors": len(count_plan.merged),
        "copied_tensors": len(count_plan.copied),
        "elements": sum(tensor.elements for tensor in count_plan.merged),
        "passes": passes,
        "bytes_read": passes * read,
        "bytes_written": plan.written,
        "files": [f"{file.name} ({file.size} bytes)" for file in plan.outputs],
        "side_files": [file.name for file in plan.side_files],
        "left_behind": list(plan.left_behind),
        "overlap_store": store,
        "workers": found.workers,
        "device": found.device,
        "projected_memory": found.projected,
        "memory_budget": found.budget,
        "free_disk": free_disk(out),
        "estimated_seconds": round(seconds, 1),
        "count_digest": count_plan.digest,
        "merge_digest": plan.digest,
        "notes": [*count_plan.notes, *(text for _, text in count_plan.mismatches)],
    }


def _is_counted(store: Path | None, digest: str) -> bool:
    from ramstream.overlap import OverlapStore

    if store is None or not store.exists():
        return False
    found = OverlapStore(store)
    return found.complete and found.digest == digest


def stats_from(targets: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """`ramstream stats`: of a store or an output where one target is given, otherwise of checkpoints."""
    from ramstream import queries
    from ramstream.plan import MatchOptions

    method = methods.create("ram-plus", parse_parameters(options["parameters"]))
    by, subset, store = options["by"], options["subset"], options["store"]
    if len(targets) > 1:
        return _stats_of_checkpoints(targets, options, method)
    if _match_options(options) != MatchOptions():
        raise PlanError(
            f"{targets[0]} answers for what it was counted with; give the base and its agents to count with "
            "other --include, --exclude, --missing, --extra, --vocab, --on-nonfinite or --compare-dtype"
        )
    return queries.stats_of(Path(targets[0]), method, by, subset, store)


def _stats_of_checkpoints(targets: Sequence[str], options: dict[str, Any], method: Method) -> dict[str, Any]:
    from ramstream import queries
    from ramstream.checkpoint import open_all
    from ramstream.console import progress
    from ramstream.engine import count
    from ramstream.planning import plan_counts
    from ramstream.statistics import statistics

    by, subset, store = options["by"], options["subset"], options["store"]
    if subset and not store:
        raise PlanError("--agents needs the overlap bits; name a place for them with --store")
    first, *others = open_all(targets)
    plan = plan_counts(first, others, method.epsilon, _match_options(options))
    if subset:
        queries.parse_agents(subset, plan.labels)  # before the counting, not after
    with progress(options["quiet"], options["verbose"]) as listener:
        described, tallies = count(plan, _limits(options), store, listener)
    if subset:
        return queries.stats_of(store, method, by, subset)
    return statistics(described, tallies["overlap"], method, by, tallies)
