"""The place of a run: OUT, and the folder `OUT.ramstream` beside it where everything is built.

OUT.ramstream/plan.json       whose unfinished run this is; gone when it is finished
              overlap.zarr    the overlap store, unless --store puts it elsewhere
              survey.jsonl    what was found in scans before the merge
              journal.jsonl   what of the output is done
              out/            the output while it is built
              old/            the former OUT, for the moment between two renames
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramstream import durable, folder, writer
from ramstream.checkpoint.wording import listed
from ramstream.errors import IntegrityError, JournalError, PlanError
from ramstream.plan import CountPlan, MergePlan, differences
from ramstream.record import Record, strays


@dataclass(frozen=True)
class Place:
    """Paths of one merge; `out` is absolute, its parent real."""

    out: Path

    @classmethod
    def of(cls, out: str | Path) -> Place:
        """The place of an output as the user names it; PlanError for a name that no such folder can have."""
        path = Path(os.path.abspath(out))
        if not path.name:
            raise PlanError(f"{path} cannot be an output; name a folder that is to be made")
        place = cls(path.parent.resolve() / path.name)
        try:
            os.lstat(place.work)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise PlanError(f"{place.work} cannot be made: {error.strerror}; choose another place") from error
        for mine in (place.out, place.work):
            if os.path.ismount(mine) or (mine == place.work and mine.is_symlink()):
                raise PlanError(
                    f"{mine} is a mount point or a link and cannot be renamed; choose a folder in it"
                )
        return place

    @property
    def work(self) -> Path:
        """The folder everything is built in."""
        return self.out.with_name(self.out.name + ".ramstream")

    @property
    def is_fresh(self) -> bool:
        """Whether nothing of a run or of its output is there."""
        return not (os.path.lexists(self.out) or self.work.exists())

    @property
    def staged(self) -> Path:
        """The output while it is built."""
        return self.work / "out"

    @property
    def store(self) -> Path:
        """The overlap store's usual place."""
        return self.work / "overlap.zarr"

    @property
    def journal(self) -> Path:
        """The merge journal."""
        return self.work / "journal.jsonl"

    @property
    def survey(self) -> Path:
        """The survey journal."""
        return self.work / "survey.jsonl"

    @property
    def plan(self) -> Path:
        """Identity of the unfinished run."""
        return self.work / "plan.json"

    @property
    def old(self) -> Path:
        """The former output while it is being replaced."""
        return self.work / "old"

    @property
    def lock(self) -> Path:
        """Held by the process that works here."""
        return self.work / "lock"

    @property
    def set_aside(self) -> Path:
        """The store of the former output, while a merge of something else is built."""
        return self.work / "old.zarr"

    def refuse_overlaps(self, count: CountPlan, store: Path | None) -> None:
        """PlanError where OUT, its work folder or the store is, contains, lies in or links to an input.

        Neither may a store of the user's choice and OUT or the work folder; only the usual place lies in there.
        """
        for mine in (self.out, self.work):
            refuse_overlap(mine, count, "the output")
        if store is not None and store.resolve() != self.store.resolve():
            refuse_overlap(store, count, "the store")
            if os.path.lexists(store) and not store.exists():
                raise PlanError(
                    f"the store {store} is a link to nothing; remove it or choose another --store"
                )
            for mine in (self.out, self.work):
                if _overlap(store, mine):
                    raise PlanError(
                        f"the store {store} and the output {mine} overlap; choose another --store"
                    )

    def finished(self, plan: MergePlan) -> Record | None:
        """The record of OUT where it already is the result of exactly this merge, with nothing left to tidy up."""
        before = self._unfinished()
        if before is not None and before["merge"] == plan.identity:
            return None
        return self._result(plan)

    def published(self, plan: MergePlan) -> bool:
        """Whether the result of this merge has its name: a kill came before the tidying up."""
        return self._result(plan) is not None and not self.staged.exists()

    def _result(self, plan: MergePlan) -> Record | None:
        try:
            record = Record.read(self.out)
        except PlanError:
            return None
        same = record.merge_digest == plan.digest and writer.intact(self.out, plan.outputs)
        return record if same else None

    def refuse_existing(self, plan: MergePlan, overwrite: bool) -> None:
        """PlanError where something stands at OUT that may not be replaced.

        The output of this very merge may: a kill came between its name and the tidying up.
        """
        if self._result(plan) is not None:
            return
        if self.out.is_dir() and not overwrite:
            raise PlanError(f"{self.out} exists; use --overwrite to replace it when the new one is complete")
        self._refuse_other_things()

    def refuse_unfinished(self, plan: MergePlan) -> None:
        """JournalError or IntegrityError where an unfinished run of other counts is in the way."""
        before = self._unfinished()
        if before is not None:
            self._refuse_other_counts(plan.count, before)

    def _refuse_other_things(self) -> None:
        """PlanError where OUT is more than a checkpoint in whatever state: it may be somebody's other things."""
        if os.path.lexists(self.out) and not self.out.is_dir():
            raise PlanError(f"{self.out} exists and is not a folder; choose another output")
        if not self.out.exists():
            return
        signs = (folder.RECORD, "config.json", "*.safetensors", "*.safetensors.index.json")
        if any(self.out.iterdir()) and not any(any(self.out.glob(sign)) for sign in signs):
            raise PlanError(
                f"{self.out} holds files but no model; --overwrite replaces models only, choose another output"
            )
        if others := strays(self.out):
            raise PlanError(
                f"{self.out} holds what is no part of its model: {listed(others)}; move it elsewhere, "
                "--overwrite would remove it"
            )

    def claim(self, plan: MergePlan, overwrite: bool) -> bool:
        """Take over what an earlier run left, as far as it belongs to this merge, and drop the rest of it.

        Whether an unfinished output of the same counts, made otherwise, was dropped. JournalError where it is
        another merge's, IntegrityError where the inputs changed under it, PlanError where a former output that got
        its name back may not be replaced; nothing is dropped then.
        """
        before = self._unfinished()
        if before is None:
            self._refuse_foreign()
        elif before["merge"] == plan.identity:
            if self.staged.exists():
                durable.sync_tree(self.staged)  # a killed run may have had no time to
            return False
        else:
            if self.old.exists() and not os.path.lexists(self.out):
                # A kill came between the two renames of publishing: the former output gets its name back.
                durable.move(self.old, self.out)
            self.refuse_existing(plan, overwrite)
            self._refuse_other_counts(plan.count, before)
            self._drop_output()
        self._set_aside_store(plan.count, unfinished=before is not None)
        identities = {"merge": plan.identity, "counts": plan.count.identity, "inputs": _paths(plan.count)}
        durable.write_whole(self.plan, json.dumps(identities).encode())
        return before is not None

    def _drop_output(self) -> None:
        """Remove what is staged; before it, on disk, what vouches for it."""
        durable.remove(self.journal)
        durable.sync(self.work)
        durable.remove(self.staged)
        durable.remove(self.survey)
        durable.sync(self.work)

    def _refuse_foreign(self) -> None:
        """JournalError where the work folder holds what no run of ours left there."""
        for path in (self.journal, self.survey, self.staged, self.old):
            if os.path.lexists(path):
                raise JournalError(
                    f"{path} is there without {self.plan.name}, which says whose it is; move it away, or remove "
                    f"{self.work} to start anew"
                )

    def _unfinished(self) -> dict[str, Any] | None:
        """What `claim` wrote for the run that is not finished, None where there is none."""
        try:
            identities: dict[str, Any] = json.loads(self.plan.read_bytes())
            if {"merge", "counts", "inputs"} <= identities.keys():
                return identities
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, AttributeError):
            pass
        raise JournalError(f"{self.plan} cannot be read; remove {self.work} to start anew")

    def _refuse_other_counts(self, count: CountPlan, before: dict[str, Any]) -> None:
        now, then = count.identity, before["counts"]
        if now == then:
            return
        if _paths(count) == before["inputs"]:
            seen = zip(count.checkpoints, [then["base"], *then["agents"]], strict=True)
            changed = [checkpoint.label for checkpoint, content in seen if checkpoint.fingerprint != content]
            if changed:
                raise IntegrityError(
                    f"{', '.join(changed)} changed since {self.work} was begun; restore the files, or remove "
                    f"{self.work} to start anew"
                )
        if (mine := _paths(count)) == before["inputs"]:
            what = f"something else: {differences(now, then)}"
        else:
            there, here = (", ".join(map(os.path.commonpath, inputs)) for inputs in (before["inputs"], mine))
            what = f"other inputs, {there}, and this is one of {here}"
        raise JournalError(
            f"{self.work} holds an unfinished merge of {what}; finish that one with its own command, or remove "
            f"{self.work}"
        )

    def _set_aside_store(self, count: CountPlan, unfinished: bool) -> None:
        """A store that a finished merge kept and that does not fit this one goes with the old output."""
        if unfinished:
            return
        self._put_back_store()  # a kill came before the plan of a run was written, or after it was given up
        if not self.store.exists():
            return
        from ramstream.overlap import OverlapStore

        try:
            fits = OverlapStore(self.store).digest == count.digest
        except PlanError:
            fits = False
        if not fits:
            with self._store_alone():
                durable.move(self.store, self.set_aside)

    def _store_alone(self) -> AbstractContextManager[object]:
        """Nobody reads the store in the block: who does goes by its path. JournalError where somebody does now."""
        from ramstream.overlap import LOCK

        return durable.lock(self.store / LOCK, str(self.store)) if self.store.is_dir() else nullcontext()

    def _put_back_store(self) -> None:
        """The store of the former output gets its name back, if it was set aside."""
        if self.set_aside.exists():
            durable.remove(self.store)
            durable.move(self.set_aside, self.store)

    def publish(self, overwrite: bool) -> None:
        """Give the staged output its name; can be repeated from any point where it was interrupted.

        PlanError where something appeared at OUT meanwhile and may not be replaced.
        """
        if self.staged.exists():
            if os.path.lexists(self.out):
                if not overwrite:
                    raise PlanError(f"{self.out} appeared meanwhile; use --overwrite to replace it")
                self._refuse_other_things()
                durable.remove(self.old)
                durable.move(self.out, self.old)
            durable.move(self.staged, self.out)

    def give_up(self) -> None:
        """Drop a run that can never finish; the store that was there before it comes back.

        That last: with the store of another merge under its name, the run could not be taken up again.
        """
        self._drop_output()
        durable.remove(self.plan)
        durable.sync(self.work)
        self._put_back_store()
        self._leave()

    def clear(self, keep_store: bool) -> None:
        """Remove what a finished merge no longer needs; the plan last, since it says that we are not done."""
        for path in (self.old, self.set_aside, self.journal, self.survey):
            durable.remove(path)
        if not keep_store:
            with self._store_alone():
                durable.remove(self.store)
        self._leave()

    def _leave(self) -> None:
        for path in (*self.work.glob("*.new"), *self.work.glob("*.new-*")):
            durable.remove(path)
        for path in self.work.glob(f"*{durable.REMOVED}"):
            with suppress(OSError):  # on NFS a cluster's worker that was stopped may have a file in it open
                durable.remove_tree(path)
        durable.sync(self.work)
        durable.remove(self.plan)
        durable.remove(self.lock)
        with suppress(OSError):  # a kept store is in it, or another run has just begun
            durable.disk.rmdir(self.work)
        durable.sync(self.out.parent)


def refuse_overlap(mine: Path, count: CountPlan, what: str) -> None:
    """PlanError where `mine` is, contains, lies in or links to an input, as they are named and as they are."""
    for checkpoint in count.checkpoints:
        for path in (*checkpoint.paths, *(() if checkpoint.single_file else (Path(checkpoint.folder),))):
            if _overlap(mine, path):
                raise PlanError(
                    f"{what} {mine} and the input {checkpoint.label} ({path}) overlap; "
                    "choose a place outside every input"
                )


def _overlap(one: Path, two: Path) -> bool:
    return any(
        a == b or a in b.parents or b in a.parents
        for a in {Path(os.path.abspath(one)), one.resolve()}
        for b in {Path(os.path.abspath(two)), two.resolve()}
    )


def _paths(count: CountPlan) -> list[list[str]]:
    return [[str(path.resolve()) for path in checkpoint.paths] for checkpoint in count.checkpoints]
