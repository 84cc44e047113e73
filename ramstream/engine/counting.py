"""Pass 1: count who changed what, into a store or only into tallies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ramstream import durable
from ramstream.engine import lending
from ramstream.engine.events import Listener, Note, ignore
from ramstream.engine.executors import connected
from ramstream.engine.inputs import input_stats, refuse_changed
from ramstream.engine.ledgers import CountLedger, Ledger
from ramstream.engine.limits import Capacity, Limits
from ramstream.engine.passes import Books, run_pass
from ramstream.engine.place import refuse_overlap
from ramstream.engine.worker import Setup
from ramstream.errors import ContentError, IntegrityError
from ramstream.overlap import JOURNAL, LOCK, OverlapStore
from ramstream.plan import CountPlan, Described
from ramstream.tallies import Tallies


def count(
    plan: CountPlan, limits: Limits | None = None, store: Path | None = None, listener: Listener = ignore
) -> tuple[Described, Tallies]:
    """Count every merged element: what was counted, and the tallies, one record a merged tensor.

    With `store`, bits and tallies are kept there and an unfinished count goes on; without, nothing is kept.
    BudgetError, ContentError (non-finite values under `error`), PlanError (a store of something else),
    IntegrityError (inputs that changed).
    """
    with connected(limits or Limits(), listener) as workers:
        return _count(workers(plan), plan, store, listener)


def _count(
    found: Capacity, plan: CountPlan, store: Path | None, listener: Listener
) -> tuple[Described, Tallies]:
    if store is not None:
        return _count_into(store, plan, found, listener)
    with durable.temporary_folder() as path, durable.disk_full_is_an_error(Path(path)):
        ledger = CountLedger(Path(path) / JOURNAL, plan, durable=False)
        try:
            ledger.note_inputs(input_stats(plan))
            count_pass(Setup(plan, found.io), ledger, found, listener, durable=False)
            tallies, notes = totals(plan, ledger)
        finally:
            ledger.close()
    described = Described.of(plan)
    return replace(described, notes=(*described.notes, *notes)), tallies


def _count_into(
    store: Path, plan: CountPlan, found: Capacity, listener: Listener
) -> tuple[Described, Tallies]:
    refuse_overlap(store, plan, "the store")
    with durable.disk_full_is_an_error(store), open_store(store, plan, bits=True) as (kept, ledger, _):
        compare_inputs(plan, ledger, found, listener)
        if not kept.complete:
            count_pass(Setup(plan, found.io, kept.path, kept.path), ledger, found, listener)
            kept.finish(*totals(plan, ledger), ledger.changed_grains())
        return kept.described_as(plan), kept.tallies()


@contextmanager
def open_store(
    path: Path, plan: CountPlan, bits: bool
) -> Iterator[tuple[OverlapStore, CountLedger, Callable[[], None]]]:
    """The store for a plan, made if there is none, its ledger, and what lets other readers in.

    It is held alone while it is not complete. IntegrityError where a complete one lacks something. On ContentError
    an incomplete one is removed: it could never be completed.
    """
    complete = OverlapStore.open_for(path, plan, bits).complete
    with durable.lock(path / LOCK, str(path), shared=complete) as share:
        store, ledger = OverlapStore(path), CountLedger(path / JOURNAL, plan)
        if not store.complete:
            lending.clear(path)
        try:
            if store.complete:
                store.check_bits()
                if not ledger.complete:
                    raise IntegrityError(f"{path} lost its journal; copy the store again, or remove it")
            yield store, ledger, share
        except ContentError:
            if not store.complete:
                durable.remove(path)
            raise
        finally:
            ledger.close()


def count_pass(
    setup: Setup, ledger: CountLedger, found: Capacity, listener: Listener, durable: bool = True
) -> None:
    """Count the units that are not yet counted."""
    books = Books(setup, ledger, None, listener, durable)
    left = np.flatnonzero(~ledger.done).tolist()
    run_pass("counting", books, left, lambda unit: ledger.work(unit, merge=False, skip=True), found)
    refuse_changed(setup.count, ledger.inputs)
    compare_inputs(setup.count, ledger, found, listener)


def compare_inputs(plan: CountPlan, ledger: Ledger, found: Capacity, listener: Listener) -> None:
    """Compare the inputs with what `ledger`'s finished units saw, and write down their present state there.

    Where an input's size, times or inode are others than when work was last vouched for, the finished units are
    read again and every checksum is compared. IntegrityError where anything differs.
    """
    stats = input_stats(plan)
    if ledger.inputs not in (None, stats) and ledger.done.any():
        listener(Note("input files were touched since they were read; comparing their contents"))
        books = Books(Setup(plan, found.io, origin=ledger.folder), None, None, listener)
        run_pass("checking", books, np.flatnonzero(ledger.done).tolist(), ledger.check, found)
    ledger.note_inputs(stats)


def totals(plan: CountPlan, ledger: CountLedger) -> tuple[Tallies, list[str]]:
    """The tallies of a complete count, and a note for each thing worth saying of it.

    ContentError listing all that was found and must not be merged.
    """
    tallies, found = ledger.tallies(), list[str]()
    problems = list(_nonfinite(plan, tallies)) if plan.options.on_nonfinite == "error" else []
    for index, agent in sorted(ledger.differs):
        tensor, label = plan.copied[index], plan.checkpoints[agent].label
        text = f"{label}: {tensor.name} ({tensor.dtype}) differs from the base's"
        if tensor.compare == "error":
            problems.append(
                f"{text}, and its dtype is unknown; it can only be copied where all hold the same, "
                f"use --exclude {tensor.name} to copy the base's"
            )
        else:
            found.append(f"{text}; the base's is copied")
    if problems:
        raise ContentError("\n".join(problems))
    return tallies, found


def _nonfinite(plan: CountPlan, tallies: Tallies) -> Iterator[str]:
    for tensor, record in zip(plan.merged, tallies, strict=True):
        for checkpoint, n, first in zip(
            plan.checkpoints, record["refused"], record["refused_first"], strict=True
        ):
            if n:
                yield (
                    f"{checkpoint.label}: {tensor.name} has {n} NaN or Inf, the first at index {first}; "
                    "use --on-nonfinite base to leave them unchanged, or keep to merge them"
                )
