"""Exact order statistics of magnitudes, from histograms that come in parts: numpy only, no files.

A magnitude is |δ| as float32, taken as its 31 bits, which are ordered as the values are. The k-th largest of a set
is found in at most two stages. The coarse one's keys are the upper 15 bits and whether any of the lower 16 is set.
Where none is, the key says the value: such are nearly all differences of 16-bit floats, which need no second stage.
The fine one's keys are the lower bits of the magnitudes that share the upper ones. Zeros are in no histogram: a
rank that the others do not reach is theirs. A set is the elements that one agent has in one group: a tensor, or the
whole model.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LOW = 16
"""Bits of a magnitude that only the fine stage looks at."""
KEYS = 1 << LOW
"""Keys of a coarse histogram, and of each wanted bucket in a fine one."""
INFINITY = 0x7F800000
"""NaNs have more than these bits: they count as the largest, and where one is asked for the answer is ∞."""
NOTHING = -1
"""The key of a query whose rank lies in the zeros, or of none."""


class Part(NamedTuple):
    """A part of one set's histogram: ascending keys and how often each occurs."""

    group: int
    agent: int
    keys: NDArray[np.uint32]
    """Coarse: bucket · 2 + whether lower bits are set. Fine: the bucket's place among the wanted · KEYS + these."""
    counts: NDArray[np.integer]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return int(self.keys.nbytes + self.counts.nbytes)


@dataclass(frozen=True, eq=False)
class Queries:
    """Which ranks are wanted: G groups, T agents, up to Q different ranks of one set."""

    ranks: NDArray[np.int64]
    """(G, T, Q): k for the k-th largest, 1 is the largest; 0 where there is no query."""
    place: NDArray[np.int64]
    """(tensors, T): which of its set's queries a tensor's threshold is; NOTHING where `fixed` says it."""
    fixed: NDArray[np.float64]
    """(tensors, T): thresholds that are known beforehand: 0 to keep all, ∞ to keep nothing."""
    by_tensor: bool
    """Whether each tensor is a group; otherwise there is one."""
    buckets: NDArray[np.int64] | None = None
    """(G, T, Q): for the fine stage the bucket of each query, in which `ranks` counts."""

    @property
    def any(self) -> bool:
        """Whether anything is wanted."""
        return bool(self.ranks.any())

    @property
    def is_fine(self) -> bool:
        """Whether these are for the fine stage."""
        return self.buckets is not None

    @property
    def slots(self) -> int:
        """Most buckets that one set can need: Q."""
        return int(self.ranks.shape[2])

    @property
    def keys(self) -> int:
        """How many keys a histogram has."""
        return self.slots * KEYS if self.is_fine else KEYS

    @cached_property
    def sets(self) -> NDArray[np.bool_]:
        """(G, T): whether anything is wanted of a set."""
        return np.asarray((self.ranks > 0).any(axis=2))

    def group(self, tensor: int) -> int:
        """The group of a tensor."""
        return tensor if self.by_tensor else 0

    def wanted(self, tensor: int) -> NDArray[np.bool_]:
        """(T,): whether a tensor's elements of each agent are needed."""
        return np.asarray(self.sets[self.group(tensor)])

    def wanted_buckets(self, group: int, agent: int) -> NDArray[np.int64]:
        """The buckets of a set that the fine stage looks into, ascending: their places make its keys."""
        assert self.buckets is not None, "only the fine stage has buckets"
        return np.unique(self.buckets[group, agent][self.ranks[group, agent] > 0])

    def pick(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Each query's key, and its rank among the elements that have it, (Q,) each, from a set's histogram."""
        ranks = self.ranks[part.group, part.agent]
        if self.buckets is None:
            return kth_largest(part.keys, part.counts, ranks)
        found, left = np.full(len(ranks), NOTHING), np.zeros(len(ranks), np.int64)
        for slot, bucket in enumerate(self.wanted_buckets(part.group, part.agent)):
            begin, end = np.searchsorted(part.keys, (slot * KEYS, (slot + 1) * KEYS))
            mine = (self.buckets[part.group, part.agent] == bucket) & (ranks > 0)
            keys, left[mine] = kth_largest(part.keys[begin:end], part.counts[begin:end], ranks[mine])
            assert (keys >= 0).all(), "both stages see the same elements"
            found[mine] = keys - slot * KEYS
        return found, left


def kth_largest(
    keys: NDArray[np.uint32], counts: NDArray[np.integer], ranks: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The key of the elements of these ranks, and their ranks among those with that key.

    NOTHING and 0 where a rank is 0 or more than all counts. Ties have one key, whichever of them is meant.
    """
    above = np.concatenate([[0], np.cumsum(counts[::-1], dtype=np.int64)])
    places = np.searchsorted(above, ranks) - 1  # the first that reaches the rank
    there = (places >= 0) & (places < len(keys))
    found, left = np.full(len(ranks), NOTHING), np.zeros(len(ranks), np.int64)
    found[there] = keys[::-1][places[there]]
    left[there] = ranks[there] - above[places[there]]
    return found, left


def queries(density: NDArray[np.float64], elements: Sequence[int], scope: str) -> Queries:
    """What is wanted to keep the share `density` (tensors, T) of the largest magnitudes.

    `elements` of each tensor; scope `tensor` is a share of its own elements, `model` of all of them: then a
    tensor's threshold is the whole model's quantile for its own density.
    """
    sizes = np.asarray(elements, np.int64)
    by_tensor = scope == "tensor"
    among = sizes[:, None] if by_tensor else np.full((len(sizes), 1), sizes.sum())
    open_ = (density > 0) & (density < 1) & (among > 0)
    fixed = np.where(density > 0, 0.0, np.inf)
    wanted = np.where(open_, np.maximum(1, (density * among).astype(np.int64)), 0)
    if by_tensor:
        return Queries(wanted[:, :, None], np.where(open_, 0, NOTHING), fixed, by_tensor)
    different = [np.unique(column[column > 0]) for column in wanted.T]
    ranks = np.zeros((1, density.shape[1], max(map(len, different), default=0)), np.int64)
    place = np.full(density.shape, NOTHING)
    for t, mine in enumerate(different):
        ranks[0, t, : len(mine)] = mine
        place[:, t] = np.where(open_[:, t], np.searchsorted(mine, wanted[:, t]), NOTHING)
    return Queries(ranks, place, fixed, by_tensor)


CHOSEN = np.dtype([("group", "<u4"), ("agent", "<u4"), ("key", "<i4"), ("left", "<i8")])
"""What one query of a set is answered with, for sets of one query whose histogram is not worth handing around."""


class Stage:
    """One stage of the search: histograms are added part by part, and dropped as soon as a group is complete."""

    def __init__(self, queries: Queries) -> None:
        self.queries = queries
        self.keys = np.full(queries.ranks.shape, NOTHING)
        self.left = np.zeros(queries.ranks.shape, np.int64)
        self._parts: dict[int, dict[int, _Growing]] = {}

    def add(self, part: Part) -> None:
        """Add to a set's histogram."""
        agents = self._parts.setdefault(part.group, {})
        agents.setdefault(part.agent, _Growing()).add(part)

    def close(self, group: int) -> None:
        """Answer a group's queries: its histograms are complete."""
        for agent, histogram in self._parts.pop(group, {}).items():
            picked = self.queries.pick(histogram.part(group, agent))
            self.keys[group, agent], self.left[group, agent] = picked

    def choose(self, chosen: NDArray[np.void]) -> None:
        """Take over answers, an array of CHOSEN."""
        place = chosen["group"], chosen["agent"], 0
        self.keys[place], self.left[place] = chosen["key"], chosen["left"]

    def fine(self) -> Queries:
        """After the coarse stage: what is left for the fine one, perhaps nothing."""
        left = np.where((self.keys >= 0) & (self.keys & 1 == 1), self.left, 0)
        return replace(self.queries, ranks=left, buckets=self.keys >> 1)


def thresholds(coarse: Stage, fine: Stage, wide: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The least magnitudes to keep, (tensors, T); `wide` (tensors,) says where float64 is compared with them."""
    queries, tensors = coarse.queries, len(wide)
    if not queries.any:
        return queries.fixed
    bits = np.where(coarse.keys >= 0, coarse.keys >> 1 << LOW, 0)
    bits += np.where(fine.keys >= 0, fine.keys, 0)
    groups = np.arange(tensors)[:, None] if queries.by_tensor else np.zeros((tensors, 1), np.int64)
    found = bits[groups, np.arange(bits.shape[1])[None, :], queries.place]
    floats = np.where(wide[:, None], least_double(found), as_double(found))
    return np.where(queries.place == NOTHING, queries.fixed, floats)


class _Growing:
    """A histogram that grows: counts of all keys between the least and the largest that occurred."""

    def __init__(self) -> None:
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, part: Part) -> None:
        if not len(part.keys):
            return
        first, end = int(part.keys[0]), int(part.keys[-1]) + 1
        if not len(self._counts):
            self._first = first
        before = max(self._first - first, 0)
        after = max(end - self._first - len(self._counts), 0)
        if before or after:
            self._counts, self._first = np.pad(self._counts, (before, after)), self._first - before
        self._counts[part.keys - np.uint32(self._first)] += part.counts

    def part(self, group: int, agent: int) -> Part:
        there = np.flatnonzero(self._counts)
        return Part(group, agent, (there + self._first).astype(np.uint32), self._counts[there])


def as_double(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Magnitudes from their bits; ∞ for NaN."""
    return np.minimum(bits, INFINITY).astype(np.uint32).view(np.float32).astype(np.float64)


def least_double(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """The least float64 that float32 rounds to these magnitudes or more: to nearest, ties to even."""
    bits = np.minimum(bits, INFINITY)
    below = as_double(np.maximum(bits - 1, 0))
    middle = (below + np.where(bits == INFINITY, 2.0**128, as_double(bits))) / 2
    least = np.where(bits & 1, np.nextafter(middle, np.inf), middle)
    return np.where(bits == 0, 0.0, least)


def combined(parts: Iterable[Part]) -> list[Part]:
    """The same histograms, one part a set."""
    sets: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in parts:
        sets[part.group, part.agent].append(part)
    return [_sum(group, agent, found) for (group, agent), found in sorted(sets.items())]


def _sum(group: int, agent: int, parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    total = _Growing()
    for part in parts:
        total.add(part)
    return total.part(group, agent)


def encode(parts: Sequence[Part], chosen: NDArray[np.void]) -> str:
    """ASCII form of parts and answers for a journal line."""
    sets = np.array([(part.group, part.agent, len(part.keys)) for part in parts], "<i8").reshape(-1, 3)
    steps = [np.diff(part.keys, prepend=np.uint32(0)) for part in parts]
    head = np.array([len(parts), len(chosen)], "<i8")
    arrays = (head, sets, chosen, *steps, *(part.counts.astype("<i8") for part in parts))
    data = b"".join(array.tobytes() for array in arrays)
    return base64.b64encode(zlib.compress(data, 1)).decode("ascii")


def decode(text: str) -> tuple[list[Part], NDArray[np.void]]:
    """The inverse of `encode`."""
    data = zlib.decompress(base64.b64decode(text, validate=True))
    number, answers = np.frombuffer(data, "<i8", 2)
    sets = np.frombuffer(data, "<i8", 3 * number, 16).reshape(-1, 3)
    place = 16 + sets.nbytes
    chosen = np.frombuffer(data, CHOSEN, answers, place)
    ends = np.cumsum(sets[:, 2])
    steps = np.frombuffer(data, "<u4", ends[-1] if len(ends) else 0, place + chosen.nbytes)
    counts = np.frombuffer(data, "<i8", len(steps), place + chosen.nbytes + steps.nbytes)
    parts = [
        Part(int(group), int(agent), np.cumsum(steps[end - n : end], dtype=np.uint32), counts[end - n : end])
        for (group, agent, n), end in zip(sets, ends, strict=True)
    ]
    return parts, chosen
