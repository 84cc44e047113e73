"""The overlap store: a zarr group of who changed each element, and the tallies, readable on its own.

    changed          uint8 (T, ceil(N / 8)): bit j of byte b is element 8·b + j of the flat space; one chunk a grain
    <tally>          one array a field of `ramstream.tallies`, first axis the merged tensors
    elements, starts int64 (tensors,): a tensor's size, and its first element in the flat space
    attributes       format, epsilon, agents' labels and tensors' names, shapes, dtypes under `described`, …
    journal.jsonl    which grains were counted; the tallies are made from it once, at the end

Chunks are written whole and uncompressed. Measured on scattered and on clustered masks of three agents: zstd-1
makes them 1.36 and 1.71 times smaller at 0.4 to 0.7 GB/s a core, lz4 1.25 and 1.35 times at 1.1 GB/s; a plain write
takes 4 GB/s of a core. Larger chunks or shards would save nothing: a GB of bits takes some 0.1 s of fsyncs.
A stored chunk is no proof of work, only the journal is.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from ramstream import durable
from ramstream.errors import IntegrityError, JournalError, PlanError
from ramstream.plan import CountPlan, Described, Space, differences
from ramstream.tallies import Tallies, empty, tally_dtype
from ramstream.types import ALIGNMENT, GRAIN

FORMAT = "ramstream overlap 3"
BITS = "changed"
JOURNAL = "journal.jsonl"
LOCK = "lock"
_NEW = ".new-"
"""Between the name of a store and the unique one of whoever is making it."""


class OverlapStore:
    """One store, complete or not; reading needs nothing but the store."""

    def __init__(self, path: Path) -> None:
        """Open an existing store; PlanError where `path` is none that this version reads."""
        self.path = path
        try:
            self.attributes: dict[str, Any] = dict(zarr.open_group(path, mode="r").attrs)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} is not an overlap store that can be read ({error!r})") from error
        if self.attributes.get("format") != FORMAT:
            raise PlanError(
                f"{path} has format {self.attributes.get('format')!r}, this version reads {FORMAT!r}"
            )
        try:
            self.digest = str(self.attributes["digest"])
            Described.from_json(self.attributes["described"])
            if self.attributes["complete"]:
                _ = [
                    *self.attributes["found"],
                    *map(int, self.attributes["stored"]),
                    self.attributes["tallies"],
                ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} is not an overlap store that can be read ({error!r})") from error

    @classmethod
    def create(cls, path: Path, plan: CountPlan, bits: bool) -> OverlapStore:
        """Make an empty store for a plan, with or without room for the bits; it appears under its name whole."""
        new = path.with_name(f"{path.name}{_NEW}{uuid.uuid4().hex}")
        try:
            cls._begin(new, plan, bits)
            durable.disk.rename(new, path)
        except OSError:
            with suppress(OSError):
                durable.remove_tree(new)
            if not path.exists():  # otherwise another run was quicker; whoever locks the store first uses it
                raise
        durable.sync(path.parent)
        return cls(path)

    @staticmethod
    def _begin(new: Path, plan: CountPlan, bits: bool) -> None:
        """Make an empty store, on disk, under a name that nobody looks for."""
        attributes = {
            "format": FORMAT,
            "complete": False,
            "digest": plan.digest,
            "identity": plan.identity,
            "grain": GRAIN,
            "bits": bits,
            "described": vars(Described.of(plan)),
        }
        files: dict[str, Buffer] = {}
        zarr.create_group(MemoryStore(files), attributes=attributes)
        durable.write_tree(new, {**_bytes(files), JOURNAL: b""})
        if bits:
            width = -(-plan.flat.total // 8)
            chunk = max(min(GRAIN // 8, width), 1)
            empty = _array((plan.agents, width), np.dtype(np.uint8), (plan.agents, chunk))
            durable.write_tree(new / BITS, empty)
            durable.make_folders(new / BITS / "c" / "0")  # so that its name is on disk before any chunk
        durable.sync_tree(new)

    @classmethod
    def open_for(cls, path: Path, plan: CountPlan, bits: bool) -> OverlapStore:
        """The store at `path` for exactly this plan's counts, made if there is none.

        PlanError where it holds other counts: a store is never overwritten by another's.
        """
        if not path.exists():
            durable.make_folder(path.parent)
            cls.create(path, plan, bits)
        else:
            for folder in (path, path.parent):
                if os.access(folder, os.R_OK | os.W_OK):
                    durable.sync(folder)  # what a killed run named there may not be on disk yet
        store = cls(path)
        store.refuse_other(plan, bits)
        return store

    def refuse_other(self, plan: CountPlan, bits: bool) -> None:
        """PlanError where this is not the store of exactly this plan's counts, or lacks bits that are wanted."""
        if self.digest != plan.digest:
            what = differences(plan.identity, self.attributes["identity"])
            raise PlanError(f"{self.path} holds the counts of something else: {what}; use another --store")
        if bits and not self.has_bits:
            raise PlanError(
                f"{self.path} was begun with --no-keep-store and keeps tallies only; go on with that option, "
                "or remove it to count again"
            )

    @property
    def complete(self) -> bool:
        """Whether every grain was counted and the tallies are written."""
        return bool(self.attributes["complete"])

    @property
    def has_bits(self) -> bool:
        """Whether it keeps who changed each element, not only the tallies."""
        return bool(self.attributes["bits"])

    @property
    def described(self) -> Described:
        """The model it was counted on, with what counting found."""
        return self._with_found(Described.from_json(self.attributes["described"]))

    def described_as(self, plan: CountPlan) -> Described:
        """The same as a plan of the same counts words it: labels and notes may be others than at the counting."""
        return self._with_found(Described.of(plan))

    def _with_found(self, described: Described) -> Described:
        return replace(described, notes=(*described.notes, *self.attributes.get("found", ())))

    @property
    def flat(self) -> Space:
        """The flat space that the bits are laid out in."""
        return Space.lay(self.described.elements, ALIGNMENT, GRAIN)

    @cached_property
    def bits(self) -> zarr.Array[Any]:
        """The zarr array of bits. PlanError where the store has tallies only."""
        if not self.has_bits:
            raise PlanError(f"{self.path} keeps tallies only; count again with --store to keep the bits")
        return self._array(BITS)

    def _array(self, name: str) -> zarr.Array[Any]:
        """One of the store's arrays; IntegrityError where its description is not what was written."""
        try:
            return zarr.open_array(self.path / name, mode="r")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{self.path} is damaged ({error}); copy it again, or remove it") from error

    def write_bits(self, grain: int, planes: NDArray[np.uint8]) -> Path:
        """Store the bits (T, GRAIN / 8) of one grain and return the chunk's file, which is not yet fsynced.

        An uncompressed chunk is its array's bytes, padded to the full shape. Written as such it takes a tenth of
        the 3 ms that zarr takes for it.
        """
        path, width = self._chunk(grain), self.bits.chunks[1]
        durable.write(path, np.ascontiguousarray(planes[:, :width]).data.cast("B"), early=True)
        return path

    def finish(self, tallies: Tallies, found: Sequence[str], stored: Sequence[int]) -> None:
        """Write the tallies, one record a merged tensor, and what else was found; mark the store complete.

        `stored` are the grains that were vouched for with bits. IntegrityError where a chunk of them is gone.
        """
        arrays = {name: np.ascontiguousarray(tallies[name]) for name in tallies.dtype.names or ()}
        arrays["elements"] = np.array(self.described.elements, np.int64)
        arrays["starts"] = np.array(self.flat.starts, np.int64)
        for name, values in arrays.items():
            durable.remove(self.path / name)
            durable.write_tree(self.path / name, _array(values.shape, values.dtype, values.shape, values))
            durable.sync_tree(self.path / name)
        self.attributes |= {
            "complete": True,
            "found": list(found),
            "stored": list(stored) if self.has_bits else [],
            "tallies": xxhash.xxh3_64_hexdigest(tallies.tobytes()),
        }
        for path in list(self.path.parent.iterdir()):
            if re.fullmatch(rf"{re.escape(self.path.name + _NEW)}[0-9a-f]+", path.name):
                durable.remove_tree(path)  # of a run that was killed, or that was not as quick as this one
        self.check_bits()  # they were fsynced before their grains were vouched for
        durable.sync(self.path)
        metadata = self.path / "zarr.json"
        whole = json.loads(metadata.read_text())
        whole["attributes"] = self.attributes
        durable.write_whole(metadata, json.dumps(whole).encode())

    def check_bits(self) -> None:
        """IntegrityError where the bits of a grain are not there: zarr reads a missing chunk as zeros."""
        size = math.prod(self.bits.chunks) if self.has_bits else 0
        for grain in self.attributes["stored"]:
            chunk = self._chunk(grain)
            if not chunk.is_file() or chunk.stat().st_size != size:
                raise IntegrityError(
                    f"{chunk} is missing or cut; copy the store again, or remove it to count anew"
                )

    def _chunk(self, grain: int) -> Path:
        return self.path / BITS / "c" / "0" / str(grain)

    def tallies(self) -> Tallies:
        """The tallies, one record a merged tensor.

        JournalError where the counting is unfinished, IntegrityError where they are not what was written.
        """
        if not self.complete:
            raise JournalError(f"{self.path} is unfinished; run the same command again to complete it")
        described = self.described
        tallies = empty(len(described.labels), len(described.names))
        try:
            for name in tallies.dtype.names or ():
                if tallies[name].size:
                    tallies[name] = self._array(name)[...]
        except (OSError, ValueError, KeyError) as error:
            raise IntegrityError(f"{self.path} is damaged ({error}); copy it again, or remove it") from error
        if xxhash.xxh3_64_hexdigest(tallies.tobytes()) != self.attributes["tallies"]:
            raise IntegrityError(
                f"{self.path}: its tallies are not what was written; copy it again, or remove it"
            )
        return tallies

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def _array(
    shape: Sequence[int],
    dtype: np.dtype[Any],
    chunks: Sequence[int],
    values: NDArray[Any] | None = None,
) -> dict[str, bytes]:
    """The files of a zarr array; of zeros where there are no `values`."""
    files: dict[str, Buffer] = {}
    array = zarr.create_array(
        MemoryStore(files),
        shape=tuple(shape),
        dtype=dtype,
        chunks=tuple(max(size, 1) for size in chunks),
        compressors=None,
        fill_value=0,
    )
    if values is not None:
        array[...] = values
    return _bytes(files)


def _bytes(files: Mapping[str, Buffer]) -> dict[str, bytes]:
    return {name: buffer.to_bytes() for name, buffer in files.items()}


def projected_size(plan: CountPlan) -> int:
    """Bytes a store with bits takes at most."""
    record = tally_dtype(plan.agents).itemsize
    return plan.agents * plan.flat.total // 8 + 2 * record * len(plan.merged) + (1 << 16)
