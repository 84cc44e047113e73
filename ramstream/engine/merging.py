"""Merge a plan into OUT: pass 1 where it is needed, pass 2, the side files, and the name at the very end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream import durable, folder, overlap, record, writer
from ramstream.checkpoint.endings import INDEX
from ramstream.engine.counting import check_counts, compare_inputs, count_pass, open_store
from ramstream.engine.disk import check_disk
from ramstream.engine.events import Listener, Note, ignore
from ramstream.engine.inputs import input_stats, refuse_changed
from ramstream.engine.ledgers import CountLedger, Ledger, MergeLedger
from ramstream.engine.limits import Capacity, Limits, capacity, peak_memory
from ramstream.engine.passes import Books, run_pass
from ramstream.engine.place import Place
from ramstream.engine.worker import Setup
from ramstream.errors import ContentError, IntegrityError, PlanError
from ramstream.overlap import OverlapStore
from ramstream.plan import CountPlan, Described, MergePlan
from ramstream.statistics import lambda_text, statistics
from ramstream.tallies import Tallies

KEEP_STORE_LIMIT = 10 * 10**9
"""A store under this size is kept after the merge unless the user decides otherwise."""


@dataclass(frozen=True)
class Outcome:
    """What a merge did. `summary` is plain data: `statistics`, outputs, sizes."""

    out: Path
    already_complete: bool
    summary: dict[str, Any]


def merge(
    plan: MergePlan,
    out: str | Path,
    limits: Limits | None = None,
    *,
    store: Path | None = None,
    keep_store: bool | None = None,
    overwrite: bool = False,
    listener: Listener = ignore,
) -> Outcome:
    """Merge into the folder `out`, which appears complete or not at all.

    The same call again goes on where a killed one stopped. `store` is an overlap store to use or make elsewhere
    than in `OUT.ramstream`. Raises every class of `ramstream.errors`.
    """
    began = time.monotonic()
    place = Place.of(out)
    finished = place.finished(plan)
    if finished is not None:
        if finished.inputs != input_stats(plan.count):
            listener(Note("input files were touched since this merge; what was sampled of them is the same"))
        return Outcome(place.out, True, finished.summary)
    keep = keeps_store(plan.count, store, keep_store)
    found = preflight(plan, place, limits or Limits(), store, keep, overwrite)
    with ExitStack() as stack:
        stack.enter_context(durable.disk_full_is_an_error(place.work))
        durable.make_folder(place.work)
        stack.enter_context(durable.lock(place.lock, str(place.work)))
        if place.claim(plan, overwrite):
            listener(Note("an unfinished output made with other parameters was dropped; its counts are used"))
        if not place.published(plan):
            try:
                _build(plan, place, found, store or place.store, keep, listener, began)
            except ContentError:
                place.give_up()
                raise
            place.publish(overwrite)
        place.clear(keep_store=keep)
    summary = record.Record.read(place.out).summary
    kept = _where(store or place.store) if keep else {}
    return Outcome(place.out, False, {**summary, **kept, "peak_memory": peak_memory()})


def preflight(
    plan: MergePlan, place: Place, limits: Limits, store: Path | None, keep: bool, overwrite: bool
) -> Capacity:
    """Refuse what can be refused before anything is written; what the run may take.

    PlanError, BudgetError, DiskFullError.
    """
    place.refuse_overlaps(plan.count, store)
    place.refuse_existing(plan, overwrite)
    found = capacity(limits, plan.count, plan)
    if store is not None and store.exists():
        OverlapStore(store).refuse_other(plan.count, keep)
    if not place.published(plan):
        check_disk(plan, place, (store or place.store) if keep else None)
    return found


def _build(
    plan: MergePlan,
    place: Place,
    found: Capacity,
    store: Path,
    keep: bool,
    listener: Listener,
    began: float,
) -> None:
    """Do what is left of both passes, and of everything beside the weights."""
    with ExitStack() as stack:
        kept, counts, share = stack.enter_context(open_store(store, plan.count, keep))
        merges = MergeLedger(place.journal, plan)
        stack.callback(merges.close)
        run = _Run(plan, place, found, kept, counts, share, merges, listener)
        if not merges.publishing:
            run.passes()
            run.complete(time.monotonic() - began)
            merges.begin_publishing()


def keeps_store(plan: CountPlan, store: Path | None, keep_store: bool | None) -> bool:
    """Whether the bits are worth writing: the store is asked for, or small enough to stay. PlanError for both."""
    if store is not None and keep_store is False:
        raise PlanError(f"--store {store} names a store to keep; leave out --no-keep-store")
    if keep_store is not None:
        return keep_store
    return store is not None or overlap.projected_size(plan) < KEEP_STORE_LIMIT


def _where(store: Path) -> dict[str, Any]:
    return {"store": str(store), "store_size": OverlapStore(store).size()} if store.exists() else {}


@dataclass
class _Run:
    """One merge under way: what `merge` holds open while it works."""

    plan: MergePlan
    place: Place
    capacity: Capacity
    store: OverlapStore
    counts: CountLedger
    share: Callable[[], None]
    """Lets other readers use the store."""
    merges: MergeLedger
    listener: Listener

    def passes(self) -> None:
        """Count and merge what is left of either."""
        self._begin()
        method, workers = self.plan.method, self.capacity.workers
        if not self.store.complete and method.needs_counts:
            setup = Setup(self.plan.count, self.capacity.io, self._bits())
            counted = count_pass(setup, self.counts, workers, self.listener)
            self.store.finish(*counted, self.counts.changed_grains())
            self.share()
        if self.store.complete:
            self._merge_pass("merging", self._numbers(self.store.tallies()["overlap"]))
            return
        shape = (len(self.plan.count.merged), self.plan.count.agents, self.plan.count.agents)
        self._merge_pass("counting and merging", self._numbers(np.zeros(shape, np.int64)))
        tallies = self.counts.tallies()
        found = check_counts(self.plan.count, self.counts, tallies)
        self.store.finish(tallies, found, self.counts.changed_grains())

    def _numbers(self, overlap: NDArray[np.int64]) -> NDArray[np.float64]:
        """The numbers of the method's program, (tensors, columns)."""
        count, method = self.plan.count, self.plan.method
        values = method.settings([tensor.name for tensor in count.merged], count.agents)
        values["lambdas"] = method.coefficients(overlap)
        if not np.isfinite(values["lambdas"]).all():
            raise PlanError(f"{method}: a coefficient is not finite; use smaller parameters")
        values["thresholds"] = np.zeros((len(count.merged), count.agents))
        return self.plan.program.numbers(values)

    def _bits(self) -> Path | None:
        return self.store.path if self.store.has_bits else None

    def _begin(self) -> None:
        """Check the inputs against what is done, and have the output's files ready."""
        ledgers: list[Ledger] = [self.merges] if self.store.complete else [self.counts, self.merges]
        for ledger in ledgers:
            compare_inputs(self.plan.count, ledger, self.capacity, self.listener)
        if not writer.intact(self.place.staged, self.plan.outputs):
            if self.merges.done.any():
                raise IntegrityError(
                    f"{self.place.staged} lacks files that its journal vouches for; remove {self.place.work} "
                    "to start anew"
                )
            self.place.staged.mkdir(exist_ok=True)
            writer.create_files(self.place.staged, self.plan.outputs)
        durable.sync(self.place.work)

    def _merge_pass(self, title: str, numbers: NDArray[np.float64]) -> None:
        """Merge what is left, counting on the way what is not yet counted.

        Backwards where everything is counted: what pass 1 read last is still in the page cache. Agents that
        changed nothing in a unit are not read, unless an input was touched since it was counted.
        """
        self.merges.use_numbers(numbers)
        left = np.flatnonzero(~(self.merges.done & self.counts.done))
        order = left[::-1] if self.counts.complete else left
        skip = self.counts.inputs == input_stats(self.plan.count)
        setup = Setup(
            self.plan.count,
            self.capacity.io,
            self._bits(),
            self.plan,
            self.place.staged,
            self.capacity.device,
            numbers,
        )
        run_pass(
            title,
            Books(setup, self.counts, self.merges, self.listener),
            order.tolist(),
            lambda unit: self.counts.work(unit, merge=not self.merges.done[unit], skip=skip),
            self.capacity.workers,
        )
        refuse_changed(self.plan.count, self.merges.inputs)

    def complete(self, seconds: float) -> None:
        """Write everything of the output that is not weights; durable on return."""
        plan, staged, count = self.plan, self.place.staged, self.plan.count
        base = count.checkpoints[0]
        tallies = self.store.tallies()
        written = folder.write_side_files(
            Path(base.folder), plan.side_files, staged, plan.dtype, dequantised=count.dequantised
        )
        index = writer.index(plan.outputs, ((t.name, slot.file, slot.nbytes) for t, slot in plan.tensors()))
        if index is not None:
            written[INDEX] = folder.write(staged / INDEX, folder.json_bytes(index))
        summary = self._summary(tallies, seconds)
        licences = [] if base.single_file else folder.licence(Path(base.folder))
        card = folder.model_card(base.label, count.labels, licences, str(plan.method), _rows(summary))
        folder.write(staged / folder.CARD, card)  # people edit it: not among what verify compares
        whole = record.make_record(
            plan,
            self._described(),
            tallies,
            self.merges.outputs.tolist(),
            input_stats(count),
            written,
            summary,
        )
        folder.write(staged / folder.RECORD, whole.to_bytes())
        durable.sync_tree(staged)

    def _described(self) -> Described:
        """What was counted, in this plan's words and the output's dtypes."""
        dtypes = tuple(slot.dtype for slot in self.plan.merged)
        return replace(self.store.described_as(self.plan.count), dtypes=dtypes)

    def _summary(self, tallies: Tallies, seconds: float) -> dict[str, Any]:
        count = self.plan.count
        overflow = {
            (count.merged if merged else count.copied)[tensor].name: n
            for (merged, tensor), n in sorted(self.merges.overflow.items())
        }
        return {
            "statistics": statistics(self._described(), tallies, self.plan.method),
            "moved_by_lambda": self.merges.moved,
            "overflow": overflow,
            "bytes_written": self.plan.written,
            "left_behind": list(self.plan.left_behind),
            "seconds": round(seconds, 3),
            "workers": self.capacity.workers,
            "device": self.capacity.device,
            "projected_memory": self.capacity.projected,
            "peak_memory": peak_memory(),
        }


def _rows(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The model card's table: agent, changed, only by it, λ."""
    stats = summary["statistics"]
    return [
        (
            agent["label"],
            f"{100 * agent['changed_share']:.2f} %",
            f"{100 * agent['overlapping'][0]:.2f} %",
            lambda_text(stats["lambda"], t),
        )
        for t, agent in enumerate(stats["agents"])
    ]
