"""Merge a plan into OUT: pass 1 where it is needed, pass 2, the side files, and the name at the very end."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream import durable, folder, memory, overlap, record, writer
from ramstream.engine.counting import (
    begin_session,
    check_counts,
    check_sizes,
    count_pass,
    counting_setup,
    open_store,
)
from ramstream.engine.events import Listener, ignore
from ramstream.engine.ledgers import CountLedger, Ledger, MergeLedger
from ramstream.engine.limits import Capacity, Limits, capacity, free_disk, peak_memory
from ramstream.engine.passes import Books, run_pass
from ramstream.engine.place import Place
from ramstream.engine.worker import Setup
from ramstream.errors import ContentError, DiskFullError, IntegrityError
from ramstream.overlap import OverlapStore
from ramstream.plan import CountPlan, MergePlan
from ramstream.statistics import statistics
from ramstream.tallies import Tallies, tally_dtype

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
    place.refuse_overlaps(plan.count, store)
    if place.finished(plan):
        return Outcome(place.out, True, record.Record.read(place.out).summary)
    place.refuse_existing(plan, overwrite)
    found = capacity(limits or Limits(), plan.count, plan)
    keep = keeps_store(plan.count, store, keep_store)
    if store is not None and store.exists():
        OverlapStore(store).refuse_other(plan.count, keep)
    check_disk(plan, place, store, keep)
    with ExitStack() as stack:
        stack.enter_context(durable.disk_full_is_an_error(place.work))
        durable.make_folder(place.work)
        stack.enter_context(durable.lock(place.lock, str(place.work)))
        place.claim(plan)
        if not place.published(plan):
            try:
                _build(plan, place, found, store or place.store, keep, listener, began)
            except ContentError:
                place.give_up(store or place.store)
                raise
            place.publish(overwrite)
        place.clear(keep_store=keep)
    summary = record.Record.read(place.out).summary
    kept = _where(store or place.store) if keep else {}
    return Outcome(place.out, False, {**summary, **kept, "peak_memory": peak_memory()})


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
        kept, counts = stack.enter_context(open_store(store, plan.count, keep))
        merges = MergeLedger(place.journal, plan)
        stack.callback(merges.close)
        run = _Run(plan, place, found, kept, counts, merges, listener)
        if not merges.publishing:
            run.passes()
            run.complete(time.monotonic() - began)
            merges.begin_publishing()


def keeps_store(plan: CountPlan, store: Path | None, keep_store: bool | None) -> bool:
    """Whether the bits are worth writing: the store is asked for, or small enough to stay."""
    if keep_store is not None:
        return keep_store or store is not None
    size = overlap.projected_size(plan, tally_dtype(plan.agents).itemsize)
    return store is not None or size < KEEP_STORE_LIMIT


def check_disk(plan: MergePlan, place: Place, store: Path | None, keep: bool) -> None:
    """DiskFullError where output and store together do not fit what is free, naming both numbers."""
    side = sum(file.size for file in plan.side_files)
    needs = {place.out.parent: plan.written + side - _allocated(place.staged)}
    if keep:
        path = store or place.store
        where = _existing_parent(path)
        size = overlap.projected_size(plan.count, tally_dtype(plan.count.agents).itemsize) - _allocated(path)
        same = next((p for p in needs if p.exists() and p.stat().st_dev == where.stat().st_dev), where)
        needs[same] = needs.get(same, 0) + size
    for where, need in needs.items():
        free = free_disk(where)
        if need > free:
            raise DiskFullError(
                f"{where}: the run writes {memory.mebibytes(need)} there and {memory.mebibytes(free)} are free; "
                "free some space, choose another disk, or use --no-keep-store"
            )


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _allocated(path: Path) -> int:
    return (
        sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) if path.exists() else 0
    )


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
    merges: MergeLedger
    listener: Listener

    def passes(self) -> None:
        """Count and merge what is left of either."""
        self._begin()
        if not self.store.complete and self.plan.method.needs_counts:
            setup = counting_setup(self.plan.count, self._bits(), self.capacity.io)
            books = Books(setup, self.counts, None, self.listener)
            self.store.finish(*count_pass(books, self.capacity.workers))
            check_sizes(self.plan.count)
        if self.store.complete:
            self._merge_pass("merging", self.plan.method.coefficients(self.store.tallies()["overlap"]))
            return
        shape = (len(self.plan.count.merged), self.plan.count.agents, self.plan.count.agents)
        self._merge_pass("counting and merging", self.plan.method.coefficients(np.zeros(shape, np.int64)))
        tallies = self.counts.tallies()
        self.store.finish(tallies, check_counts(self.plan.count, self.counts, tallies))

    def _bits(self) -> Path | None:
        return self.store.path if self.store.has_bits else None

    def _begin(self) -> None:
        """Check the inputs against what is done, and have the output's files ready."""
        ledgers: list[Ledger] = [self.merges] if self.store.complete else [self.counts, self.merges]
        for ledger in ledgers:
            limits = (self.capacity.workers, self.capacity.io, self.listener)
            begin_session(self.plan.count, self.counts, ledger, *limits)
        if not writer.intact(self.place.staged, self.plan.outputs):
            if self.merges.done.any():
                raise IntegrityError(
                    f"{self.place.staged} lacks files that its journal vouches for; remove {self.place.work} "
                    "to start anew"
                )
            self.place.staged.mkdir(exist_ok=True)
            writer.create_files(self.place.staged, self.plan.outputs)

    def _merge_pass(self, title: str, coefficients: NDArray[np.float64]) -> None:
        """Merge what is left, counting on the way what is not yet counted.

        Backwards where everything is counted: what pass 1 read last is still in the page cache.
        """
        self.merges.use_coefficients(coefficients)
        left = np.flatnonzero(~(self.merges.done & self.counts.done))
        order = left[::-1] if self.counts.complete else left
        works = [self.counts.work(int(unit), merge=not self.merges.done[unit]) for unit in order]
        setup = Setup(
            uuid.uuid4().hex,
            self.plan.count,
            self.plan,
            self.place.staged,
            self._bits(),
            self.capacity.io,
            self.capacity.device,
            coefficients,
        )
        books = Books(setup, self.counts, self.merges, self.listener)
        run_pass(title, books, works, self.capacity.workers)

    def complete(self, seconds: float) -> None:
        """Write everything of the output that is not weights; durable on return."""
        plan, staged, count = self.plan, self.place.staged, self.plan.count
        base = count.checkpoints[0]
        tallies = self.store.tallies()
        written = folder.write_side_files(Path(base.folder), plan.side_files, staged, plan.dtype)
        tensors = (*zip(count.merged, plan.merged, strict=True), *zip(count.copied, plan.copied, strict=True))
        sizes = ((t.name, slot.file, _nbytes(t, slot.dtype)) for t, slot in tensors)
        index = writer.index(plan.outputs, sizes)
        if index is not None:
            written[folder.INDEX] = folder.write(staged / folder.INDEX, folder.json_bytes(index))
        summary = self._summary(tallies, seconds)
        licences = [] if base.single_file else folder.licence(Path(base.folder))
        card = folder.model_card(base.label, count.labels, licences, _spelled(plan), _card_table(summary))
        written[folder.CARD] = folder.write(staged / folder.CARD, card)
        whole = record.make_record(
            plan,
            self.store.described,
            tallies,
            summary["statistics"]["lambda"],
            self.merges.checksums.tolist(),
            written,
            summary,
        )
        folder.write(staged / folder.RECORD, whole.to_bytes())
        durable.sync_tree(staged)

    def _summary(self, tallies: Tallies, seconds: float) -> dict[str, Any]:
        count = self.plan.count
        overflow = {
            (count.merged if merged else count.copied)[tensor].name: n
            for (merged, tensor), n in sorted(self.merges.overflow.items())
        }
        return {
            "statistics": statistics(
                self.store.described, tallies["overlap"], self.plan.method, None, tallies
            ),
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


def _nbytes(tensor: Any, dtype: str) -> int:
    from ramstream.types import ITEMSIZE

    return int(tensor.nbytes if dtype == tensor.dtype else tensor.elements * ITEMSIZE[dtype])


def _spelled(plan: MergePlan) -> str:
    parameters = ", ".join(f"{key}={value}" for key, value in vars(plan.method).items())
    return f"{plan.method.name()} ({parameters})"


def _card_table(summary: dict[str, Any]) -> str:
    rows = ["| agent | changed | only by it | λ |", "|---|---|---|---|"]
    lambdas = summary["statistics"]["lambda"]
    for t, agent in enumerate(summary["statistics"]["agents"]):
        value = f"{lambdas[t]:.4f}" if isinstance(lambdas, list) and lambdas else "per tensor"
        unique = 100 * agent["overlapping"][0]
        rows.append(
            f"| `{agent['label']}` | {100 * agent['changed_share']:.2f} % | {unique:.2f} % | {value} |"
        )
    return "\n".join(rows)
