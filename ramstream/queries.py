"""Questions to an overlap store or an output, answered without opening a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream.errors import PlanError
from ramstream.methods import Method, create
from ramstream.overlap import OverlapStore
from ramstream.plan import Described
from ramstream.record import Record
from ramstream.statistics import Overlap, statistics
from ramstream.tallies import Tallies
from ramstream.types import GRAIN


@dataclass(frozen=True)
class Counts:
    """What a store or an output knows of a count."""

    path: Path
    described: Described
    tallies: Tallies
    bits: OverlapStore | None
    """The store with the bits, if there is one."""
    used: Mapping[str, Any]
    """Name and parameters of the method an output was merged by; empty for a store."""
    norms: Mapping[str, Any] | None = None
    """`statistics.norms` of an output; None for a store."""

    def method(self, name: str | None = None, parameters: Mapping[str, str] | None = None) -> Method:
        """A method as the command line spells it; what is not said is as in the merge, or the default.

        UsageError for a method or parameter that there is not.
        """
        defaults = {"epsilon": repr(self.described.epsilon)}
        if name in (None, self.used.get("name")):
            defaults |= {key: str(value) for key, value in self.used.items() if key != "name"}
        return create(name or self.used.get("name", "ram-plus"), defaults | dict(parameters or {}))

    def _is_own(self, method: Method) -> bool:
        """Whether the output was merged by this very method."""
        return {"name": method.name(), **method.parameters()} == dict(self.used)

    def stats(self, method: Method, by: str | None = None, agents: str | None = None) -> dict[str, Any]:
        """`ramstream stats`; `agents` is a selection such as `1,3`.

        PlanError where epsilon is another than it was counted with, or the bits are wanted and not there.
        """
        if method.epsilon != self.described.epsilon:
            raise PlanError(
                f"{self.path} was counted with epsilon {self.described.epsilon}, not {method.epsilon}; "
                "another epsilon needs another count of the checkpoints"
            )
        if agents is None:
            norms = {"norms": dict(self.norms)} if self.norms and self._is_own(method) else {}
            return {**statistics(self.described, self.tallies, method, by), **norms}
        chosen = parse_agents(agents, self.described.labels)
        if self.bits is None:
            raise PlanError(
                f"{self.path}: a subset of the agents needs the overlap bits; name a store with --store"
            )
        return statistics(self.described, self.tallies, method, by, (chosen, recount(self.bits, chosen)))


def stats_of(
    path: str | Path,
    method: Method | None = None,
    by: str | None = None,
    agents: str | None = None,
    store: str | Path | None = None,
) -> dict[str, Any]:
    """`ramstream stats` of a store or an output folder; see `open_counts` and `Counts.stats`."""
    counts = open_counts(Path(path), Path(store) if store is not None else None)
    return counts.stats(method or counts.method(), by, agents)


def open_counts(path: Path, store: Path | None = None) -> Counts:
    """What a store or an output folder knows; `store` is where an output's bits are, if not beside it.

    PlanError where `path` is neither.
    """
    if (path / "zarr.json").exists():
        opened = OverlapStore(path)
        if store is not None and store.resolve() != path.resolve():
            raise PlanError(f"{path} is a store itself; leave --store {store} out")
        return Counts(path, opened.described, opened.tallies(), opened if opened.has_bits else None, {})
    if not path.is_dir():
        raise PlanError(f"{path}: no such folder; give a store, an output, or a base and its agents")
    record = Record.read(path)
    bits = _bits(path, record, store)
    return Counts(
        path,
        record.description(),
        record.tally_records(),
        bits,
        record.method,
        dict(record.summary.get("statistics") or {}).get("norms"),
    )


def _bits(path: Path, record: Record, store: Path | None) -> OverlapStore | None:
    """The store with an output's bits: the one that was named, or a fitting one beside it."""
    real = path.resolve()
    beside = real.with_name(real.name + ".ramstream") / "overlap.zarr"
    if store is None and not beside.exists():
        return None
    try:
        opened = OverlapStore(store or beside)
    except PlanError:
        if store is not None:
            raise
        return None
    if opened.digest == record.count_digest and opened.complete and opened.has_bits:
        return opened
    if store is not None:
        raise PlanError(
            f"{store} holds the counts {opened.digest[:12]}, {path} was merged from {record.count_digest[:12]}"
        )
    return None


def overlap_counts(store: OverlapStore, tensor: str) -> Any:
    """How many agents changed each element of a tensor: a dask array of uint8 in the tensor's shape.

    PlanError where the store has no such tensor or no bits.
    """
    import dask.array

    described = store.described
    if tensor not in described.names:
        raise PlanError(f"{store.path} counted no tensor {tensor!r}")
    index = described.names.index(tensor)
    shape, start, size = described.shapes[index], store.flat.starts[index], described.elements[index]
    store.check_bits()
    bits = dask.array.from_array(store.bits, chunks=(len(described.labels), GRAIN // 8))
    part = bits[:, start // 8 : -(-(start + size) // 8)]
    counts = part.map_blocks(
        lambda planes: np.unpackbits(planes, axis=1, bitorder="little").sum(axis=0, dtype=np.uint8),
        dtype=np.uint8,
        drop_axis=0,
        chunks=(tuple(8 * chunk for chunk in part.chunks[1]),),
    )
    return counts[:size].reshape(shape)


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

    store.check_bits()
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
