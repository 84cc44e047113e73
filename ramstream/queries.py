"""Questions to an overlap store or an output, answered without opening a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream.errors import PlanError
from ramstream.methods import Method
from ramstream.overlap import OverlapStore
from ramstream.plan import Described
from ramstream.record import Record
from ramstream.statistics import Overlap, statistics
from ramstream.tallies import Tallies
from ramstream.types import GRAIN


def stats_of(
    path: Path, method: Method, by: str | None = None, agents: str | None = None, store: Path | None = None
) -> dict[str, Any]:
    """`ramstream stats` of a store or an output folder; `agents` is a selection such as `1,3`.

    `store` is where an output's bits are, if not beside it. PlanError where `path` is neither store nor output,
    where epsilon is another than it was counted with, or where the question needs bits that are not there.
    """
    described, tallies, bits = _open(path, store)
    if method.epsilon != described.epsilon:
        raise PlanError(
            f"{path} was counted with epsilon {described.epsilon}, not {method.epsilon}; "
            "another epsilon needs another count of the checkpoints"
        )
    if agents is None:
        return statistics(described, tallies["overlap"], method, by, tallies)
    chosen = parse_agents(agents, described.labels)
    if bits is None:
        raise PlanError(f"{path}: a subset of the agents needs the overlap bits; name a store with --store")
    return statistics(described, recount(bits, chosen), method, by, tallies, chosen)


def _open(path: Path, store: Path | None) -> tuple[Described, Tallies, OverlapStore | None]:
    if (path / "zarr.json").exists():
        opened = OverlapStore(path)
        if store is not None and store.resolve() != path.resolve():
            raise PlanError(f"{path} is a store itself; leave --store {store} out")
        return opened.described, opened.tallies(), opened
    if not path.is_dir():
        raise PlanError(f"{path}: no such folder; give a store, an output, or a base and its agents")
    record = Record.read(path)
    return record.description(), record.tally_records(), _bits(path, record, store)


def _bits(path: Path, record: Record, store: Path | None) -> OverlapStore | None:
    """The store with an output's bits: the one that was named, or a fitting one beside it."""
    real = path.resolve()
    beside = store or real.with_name(real.name + ".ramstream") / "overlap.zarr"
    if store is None and not beside.exists():
        return None
    opened = OverlapStore(beside)
    if opened.digest == record.count_digest and opened.complete:
        return opened
    if store is not None:
        raise PlanError(
            f"{store} holds the counts {opened.digest[:12]}, {path} was merged from {record.count_digest[:12]}"
        )
    return None


def parse_agents(text: str, labels: Sequence[str]) -> list[int]:
    """Indices of agents given as numbers from 1 or as labels, separated by commas. PlanError otherwise."""
    chosen = []
    for word in text.split(","):
        if word in labels:
            chosen.append(list(labels).index(word))
        elif word.strip().isdecimal() and 1 <= int(word) <= len(labels):
            chosen.append(int(word) - 1)
        else:
            raise PlanError(
                f"--agents {word!r}: use numbers 1 to {len(labels)} or labels of {', '.join(labels)}"
            )
    if len(set(chosen)) != len(chosen):
        raise PlanError(f"--agents {text!r} names an agent twice")
    return chosen


def recount(store: OverlapStore, agents: Sequence[int]) -> Overlap:
    """The overlap tally (tensors, t, t) among some agents only, recounted from the bits grain by grain."""
    import dask
    import dask.array

    bits = dask.array.from_array(store.bits, chunks=(len(store.described.labels), GRAIN // 8))[list(agents)]
    flat = store.flat
    result = np.zeros((len(store.described.names), len(agents), len(agents)), np.int64)
    tasks = []
    for grain in range(flat.units):
        planes = bits[:, grain * (GRAIN // 8) : (grain + 1) * (GRAIN // 8)]
        pieces = [
            (piece.tensor, (flat.starts[piece.tensor] + piece.begin - grain * GRAIN) // 8)
            for piece in flat.pieces(grain)
        ]
        tasks.append((pieces, dask.delayed(_overlap)(planes, [begin for _, begin in pieces])))
    for (pieces, _), counted in zip(tasks, dask.compute(*(task for _, task in tasks)), strict=True):
        for (tensor, _), overlap in zip(pieces, counted, strict=True):
            result[tensor] += overlap
    return result


def _overlap(planes: NDArray[np.uint8], begins: Sequence[int]) -> NDArray[np.int64]:
    """Overlap (pieces, t, t) of one grain whose pieces begin at these bytes; pieces never share a byte."""
    agents = len(planes)
    exactly = [np.full(planes.shape[1], 0xFF, np.uint8)]
    for plane in planes:
        grown = [group & ~plane for group in exactly] + [np.zeros_like(plane)]
        for k, group in enumerate(exactly):
            grown[k + 1] |= group & plane
        exactly = grown
    result = np.empty((len(begins), agents, agents), np.int64)
    for t, plane in enumerate(planes):
        for k in range(agents):
            ones = np.bitwise_count(plane & exactly[k + 1])
            result[:, t, k] = np.add.reduceat(ones, begins, dtype=np.int64)
    return result
