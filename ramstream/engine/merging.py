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
from ramstream.engine import lending
from ramstream.engine.counting import compare_inputs, count_pass, open_store, totals
from ramstream.engine.disk import check_disk
from ramstream.engine.events import Listener, Note, ignore
from ramstream.engine.executors import Workers, connected
from ramstream.engine.inputs import input_stats, refuse_changed
from ramstream.engine.ledgers import CountLedger, Ledger, MergeLedger
from ramstream.engine.limits import Capacity, Limits, peak_memory
from ramstream.engine.passes import Books, run_pass
from ramstream.engine.place import Place
from ramstream.engine.survey import COARSE, FINE, NORMS, TITLES, SurveyLedger
from ramstream.engine.worker import Setup, Work
from ramstream.errors import ContentError, IntegrityError, PlanError
from ramstream.overlap import OverlapStore
from ramstream.plan import CountPlan, Described, MergePlan
from ramstream.statistics import lambda_text, norms, statistics
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
        return Outcome(place.out, True, _told(finished, plan))
    keep = keeps_store(plan.count, store, keep_store)
    with ExitStack() as stack:
        workers = stack.enter_context(connected(limits or Limits(), listener))
        found = preflight(plan, place, workers, store, keep, overwrite)
        stack.enter_context(durable.disk_full_is_an_error(place.work))
        durable.make_folder(place.work)
        stack.enter_context(durable.lock(place.lock, str(place.work)))
        lending.clear(place.work)
        if found.cluster is not None:
            lending.refuse_no_links(place.work)
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
    summary = _told(record.Record.read(place.out), plan)
    kept = _where(store or place.store) if keep else {}
    return Outcome(place.out, False, {**summary, **kept, "peak_memory": peak_memory()})


def preflight(
    plan: MergePlan, place: Place, workers: Workers, store: Path | None, keep: bool, overwrite: bool
) -> Capacity:
    """Refuse what can be refused before anything is written; what the run may take.

    PlanError, BudgetError, DiskFullError.
    """
    place.refuse_overlaps(plan.count, store)
    place.refuse_existing(plan, overwrite)
    if store is not None and store.exists():
        OverlapStore(store).refuse_other(plan.count, keep)
    found = workers(plan.count, plan)
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
        survey = SurveyLedger(place.survey, plan)
        stack.callback(survey.close)
        merges = MergeLedger(place.journal, plan)
        stack.callback(merges.close)
        run = _Run(plan, place, found, kept, counts, share, survey, merges, listener)
        if merges.publishing:
            compare_inputs(plan.count, merges, found, listener)
        else:
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


def _told(found: record.Record, plan: MergePlan) -> dict[str, Any]:
    """The summary of a finished merge, and whether its inputs were touched since."""
    return {**found.summary, "inputs_touched": found.inputs != input_stats(plan.count)}


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
    survey: SurveyLedger
    merges: MergeLedger
    listener: Listener
    backwards: bool = False
    """Which way the next scan goes."""

    def passes(self) -> None:
        """Count, survey and merge what is left of each."""
        self._begin()
        counts_first = self.plan.method.needs_counts and not self.survey.left(COARSE).any()
        if counts_first:
            self._count()
        for stage in (COARSE, FINE):
            self._survey_pass(stage)
        self._merge_pass(self._numbers())

    def _count(self) -> None:
        """Have the store complete."""
        if not self.store.complete:
            count_pass(self._setup, self.counts, self.capacity, self.listener)
            self._finish_counts()
            self.backwards = True

    def _numbers(self) -> NDArray[np.float64]:
        """The numbers of the method's program, (tensors, columns)."""
        count, method, program = self.plan.count, self.plan.method, self.plan.program
        shape = (len(count.merged), count.agents, count.agents)
        overlap = self.store.tallies()["overlap"] if self.store.complete else np.zeros(shape, np.int64)
        values = dict(self.plan.settings)
        values["lambdas"] = method.coefficients(overlap)
        if not np.isfinite(values["lambdas"]).all():
            raise PlanError(f"{method}: a coefficient is not finite; use smaller parameters")
        values["thresholds"] = self.survey.thresholds()
        if method.max_norm != "none" and count.merged:
            self._survey_pass(NORMS, program.numbers(values))
            self._count()  # where the survey is an earlier run's and the store is not
            values["scale"] = values["scale"] * self.survey.factors(self.store.tallies()["l2"])[:, None]
        return program.numbers(values)

    def _finish_counts(self) -> None:
        """Complete the store where everything is counted; ContentError where that must not be merged."""
        if not self.store.complete and self.counts.complete:
            self.store.finish(*totals(self.plan.count, self.counts), self.counts.changed_grains())
            self.share()

    def _bits(self) -> Path | None:
        return self.store.path if self.store.has_bits else None

    def _begin(self) -> None:
        """Check the inputs against what is done, and have the output's files ready."""
        ledgers: list[Ledger] = [self.survey, self.merges]
        for ledger in ledgers if self.store.complete else [self.counts, *ledgers]:
            compare_inputs(self.plan.count, ledger, self.capacity, self.listener)
        self.backwards = self.counts.complete
        if not self.merges.done.any():  # anew: what an fsync failed on may look whole
            writer.create_files(self.place.staged, self.plan.outputs)
        elif not writer.intact(self.place.staged, self.plan.outputs):
            raise IntegrityError(
                f"{self.place.staged} lacks files that its journal vouches for; remove {self.place.work} "
                "to start anew"
            )
        durable.sync(self.place.work)

    def _survey_pass(self, stage: str, numbers: NDArray[np.float64] | None = None) -> None:
        """What is left of a stage of the survey, counting on the way what is not yet counted."""
        if self.survey.left(stage).any():
            merge = self.plan if stage == NORMS else None
            queries = self.survey.queries(stage)
            setup = replace(self._setup, merge=merge, numbers=numbers, survey=stage, queries=queries)
            self._scan(TITLES[stage], setup, self.survey.left(stage))
        self._finish_counts()

    def _merge_pass(self, numbers: NDArray[np.float64]) -> None:
        """Merge what is left, counting on the way what is not yet counted."""
        self.merges.use_numbers(numbers)
        devices, out = self.capacity.devices, self.place.staged
        setup = replace(self._setup, merge=self.plan, out=out, devices=devices, numbers=numbers)
        self._scan("merging", setup, ~self.merges.done)
        self._finish_counts()

    @property
    def _setup(self) -> Setup:
        return Setup(self.plan.count, self.capacity.io, self._bits(), self.counts.folder)

    def _scan(self, title: str, setup: Setup, wanted: NDArray[np.bool_]) -> None:
        """Count what is not yet counted, and survey or merge the units that are `wanted`.

        Every other scan goes backwards: what the one before it read last is still in the page cache. Agents that
        changed nothing in a unit are not read, unless an input was touched since it was counted.
        """
        left, counting = np.flatnonzero(wanted | ~self.counts.done), not self.counts.complete
        order = left[::-1] if self.backwards else left
        skip = self.counts.inputs == input_stats(self.plan.count)

        def work(unit: int) -> Work:
            merge = setup.out is not None and bool(wanted[unit])
            found = self.counts.work(unit, merge, skip)
            return self.survey.work(setup.survey, found) if setup.survey and wanted[unit] else found

        run_pass(
            title if self.store.complete else f"counting and {title}",
            Books(setup, self.counts, self.merges, self.listener, survey=self.survey),
            order.tolist(),
            work,
            self.capacity,
        )
        refuse_changed(self.plan.count, self.merges.inputs)
        if counting:  # otherwise all that was read was compared with what was counted
            compare_inputs(self.plan.count, self.counts, self.capacity, self.listener)
        self.backwards = not self.backwards

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
        stats = statistics(self._described(), tallies, self.plan.method)
        stats["norms"] = norms(stats["agents"], self.merges.norm)
        return {
            "statistics": stats,
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
