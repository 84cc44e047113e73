"""Pass 1: count who changed what, into a store or only into tallies."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ramstream import durable, folder
from ramstream.engine.events import Listener, Note, ignore
from ramstream.engine.ledgers import CountLedger, Ledger, input_stats
from ramstream.engine.limits import Capacity, Limits, capacity
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
    BudgetError, ContentError (non-finite values under `error`), PlanError (a store of something else).
    """
    found = capacity(limits or Limits(), plan)
    if store is not None:
        return _count_into(store, plan, found, listener)
    with TemporaryDirectory(prefix="ramstream-") as path, durable.disk_full_is_an_error(Path(path)):
        ledger = CountLedger(Path(path) / JOURNAL, plan, durable=False)
        try:
            books = Books(counting_setup(plan, None, found.io), ledger, None, listener, durable=False)
            tallies, notes = count_pass(books, found.workers)
        finally:
            ledger.close()
    described = Described.of(plan)
    return replace(described, notes=(*described.notes, *notes)), tallies


def _count_into(
    store: Path, plan: CountPlan, found: Capacity, listener: Listener
) -> tuple[Described, Tallies]:
    refuse_overlap(store, plan, "the store")
    try:
        with durable.disk_full_is_an_error(store), open_store(store, plan, bits=True) as (kept, ledger):
            if not kept.complete:
                begin_session(plan, ledger, ledger, found.workers, found.io, listener)
                books = Books(counting_setup(plan, kept.path, found.io), ledger, None, listener)
                kept.finish(*count_pass(books, found.workers))
            return kept.described, kept.tallies()
    except ContentError:
        folder.remove(store)
        raise


@contextmanager
def open_store(path: Path, plan: CountPlan, bits: bool) -> Iterator[tuple[OverlapStore, CountLedger]]:
    """The store for a plan, made if there is none, held by this process, with its ledger."""
    store = OverlapStore.open_for(path, plan, bits)
    with durable.lock(store.path / LOCK, str(store.path)):
        ledger = CountLedger(store.path / JOURNAL, plan)
        try:
            yield OverlapStore(path), ledger
        finally:
            ledger.close()


def counting_setup(plan: CountPlan, store: Path | None, io: str) -> Setup:
    """The setup of a pass that only counts, or only compares checksums."""
    return Setup(uuid.uuid4().hex, plan, None, None, store, io, "cpu", None)


def count_pass(books: Books, workers: int) -> tuple[Tallies, list[str]]:
    """Count the units that are not yet counted, and refuse what cannot be merged; the tallies, and notes."""
    ledger = books.counts
    works = [ledger.work(int(unit), merge=False) for unit in np.flatnonzero(~ledger.done)]
    run_pass("counting", books, works, workers)
    tallies = ledger.tallies()
    return tallies, check_counts(books.setup.count, ledger, tallies)


def begin_session(
    plan: CountPlan,
    counts: CountLedger,
    ledger: Ledger,
    workers: int,
    io: str,
    listener: Listener,
) -> None:
    """Compare the inputs with what `ledger`'s finished units saw, and write down their present state there.

    Sizes must be the headers'. Where an input's size, time or inode is another than when work was last vouched
    for, the finished units are read again and compared. IntegrityError where anything differs.
    """
    check_sizes(plan)
    stats = input_stats(plan)
    if ledger.inputs not in (None, stats) and ledger.done.any():
        listener(Note("input files were touched since the last run; comparing the finished part with them"))
        books = Books(counting_setup(plan, None, io), counts, None, listener, durable=False)
        works = [counts.check(int(unit)) for unit in np.flatnonzero(ledger.done & counts.done)]
        run_pass("checking", books, works, workers)
    ledger.open_session(stats)


def check_sizes(plan: CountPlan) -> None:
    """IntegrityError where an input file no longer has the size its headers were read with."""
    for checkpoint in plan.checkpoints:
        for path, (name, size) in zip(checkpoint.paths, checkpoint.files, strict=True):
            try:
                found = path.stat().st_size
            except OSError as error:
                raise IntegrityError(f"{checkpoint.label}/{name} is gone: {error.strerror}") from error
            if found != size:
                raise IntegrityError(
                    f"{checkpoint.label}/{name} has {found} bytes, it had {size} when the run was planned; "
                    "restore it"
                )


def check_counts(plan: CountPlan, ledger: CountLedger, tallies: Tallies) -> list[str]:
    """ContentError listing all that the scan found and that must not be merged; a note for each of the rest."""
    found: list[str] = []
    problems = list(_nonfinite(plan, tallies)) if plan.options.on_nonfinite == "error" else []
    for index, agent in sorted(ledger.differs):
        tensor, label = plan.copied[index], plan.checkpoints[agent].label
        text = f"{label}: {tensor.name} ({tensor.dtype}) differs from the base's"
        if tensor.compare == "error":
            problems.append(
                f"{text}, and its dtype is unknown; it can only be copied where all hold the same"
            )
        else:
            found.append(f"{text}; the base's is copied")
    if problems:
        raise ContentError("\n".join(problems))
    return found


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
