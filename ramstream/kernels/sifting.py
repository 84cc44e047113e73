"""Histograms of |delta| as float32 bits, for exact quantiles (see `ramstream.quantiles`).

Counting takes no branch on an element: what does not count is spread over counters that nobody reads, as the same
counter over and over waits for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream.kernels import layout
from ramstream.kernels.deltas import masked_deltas
from ramstream.kernels.formats import bare_room, unowned
from ramstream.kernels.host import Buffers, Sources, merger_bytes, quiet
from ramstream.kernels.intrinsics import bits_of
from ramstream.kernels.jit import entry, inner
from ramstream.kernels.layout import BLOCK
from ramstream.quantiles import KEYS, LOW, Part, Queries
from ramstream.types import Dtype

SPREAD = 32
"""Counters after the keys' own."""
GROUP = 64
"""Elements that are looked at together for whether any of them counts in the fine stage."""

_LOW, _BELOW, _MAGNITUDE = np.uint32(LOW), np.uint32(KEYS - 1), np.uint32(0x7FFFFFFF)
_ZERO, _ONE, _KEYS, _SPREAD = np.uint32(0), np.uint32(1), np.uint32(KEYS), np.uint32(SPREAD - 1)


@entry
def coarse(room: Any, inputs: Any, rule: Any, elements: int, wanted: Any, counts: Any, spans: Any) -> None:
    """One strip of the agents that are `wanted`, uint8 (T,).

    counts uint32 (T, KEYS + SPREAD) grow, and so do spans int64 (T, 2): the least and the largest key so far.
    """
    room, agents = bare_room(room), len(room.active)
    keys, counts, spans = room.raw[agents + 2], unowned(counts), unowned(spans)
    for start in range(0, elements, BLOCK):
        n = min(BLOCK, elements - start)
        if masked_deltas(room, inputs, rule, start, n, 0):
            room.mark[:n] = 0
        for t in range(agents):
            if room.active[t] and wanted[t]:
                coarse_keys(room.rows[t + 1], keys, n, spans[t])
                add(keys, n, counts[t])


@inner
def coarse_keys(row: Any, keys: Any, n: int, span: Any) -> None:
    """Each element's key; zeros get one of those that are not read."""
    least, largest = _KEYS, _ZERO
    for i in range(n):
        size = np.uint32(bits_of(np.float32(row[i])) & _MAGNITUDE)
        rest = _ONE if np.uint32(size & _BELOW) != _ZERO else _ZERO
        key = np.uint32(np.uint32(np.uint32(size >> _LOW) << _ONE) | rest)
        largest = max(largest, key)
        keys[i] = key if size != _ZERO else np.uint32(_KEYS + np.uint32(np.uint32(i) & _SPREAD))
        least = min(least, keys[i])
    span[0], span[1] = min(span[0], np.int64(least)), max(span[1], np.int64(largest))


@inner
def add(keys: Any, n: int, counts: Any) -> None:
    for i in range(n):
        counts[keys[i]] += _ONE


@entry
def fine(
    room: Any, inputs: Any, rule: Any, elements: int, ranges: Any, slots: Any, counts: Any, spans: Any
) -> None:
    """One strip. ranges uint32 (T, 2): the least and the largest magnitude that can count; 1, 0 for none.

    slots uint16 (T, KEYS): a bucket's place among the wanted ones, from 1 on, or 0. counts uint32 (T, keys) and
    spans as for `coarse`.
    """
    room, agents = bare_room(room), len(room.active)
    keys, ranges, slots = room.raw[agents + 2], unowned(ranges), unowned(slots)
    counts, spans = unowned(counts), unowned(spans)
    for start in range(0, elements, BLOCK):
        n = min(BLOCK, elements - start)
        if masked_deltas(room, inputs, rule, start, n, 0):
            room.mark[:n] = 0
        for t in range(agents):
            if room.active[t] and ranges[t, 0] <= ranges[t, 1]:
                found = fine_keys(room.rows[t + 1], keys, n, ranges[t], slots[t])
                for i in range(found):
                    spans[t, 0] = min(spans[t, 0], np.int64(keys[i]))
                    spans[t, 1] = max(spans[t, 1], np.int64(keys[i]))
                add(keys, found, counts[t])


@inner
def fine_keys(row: Any, keys: Any, n: int, range_: Any, slots: Any) -> int:
    """The keys of the elements that count, one after the other; how many. Most groups have none."""
    least, width, number = range_[0], np.uint32(range_[1] - range_[0]), 0
    for begin in range(0, n, GROUP):
        part, hits = row[begin : begin + GROUP], _ZERO
        for i in range(GROUP):  # zeros follow the last element
            size = np.uint32(bits_of(np.float32(part[i])) & _MAGNITUDE)
            hits |= _ONE if np.uint32(size - least) <= width else _ZERO
        for i in range(GROUP if hits else 0):
            size = np.uint32(bits_of(np.float32(part[i])) & _MAGNITUDE)
            slot = np.uint32(slots[size >> _LOW])
            rest = np.uint32(size & _BELOW)
            keys[number] = np.uint32(np.uint32(np.uint32(slot - _ONE) << _LOW) | rest)
            number += (slot != _ZERO) & (rest != _ZERO)
    return number


class Sifter(Buffers):
    """Takes the histograms of a group, a strip at a time: `begin` and strips for each piece, then `finish`."""

    def __init__(
        self, queries: Queries, agents: int, epsilon: float, on_nonfinite: str, compare: Dtype | None
    ) -> None:
        super().__init__(agents, agents + 1 + layout.SPARE, epsilon, on_nonfinite, compare)
        self._queries = queries
        self._wanted = np.zeros(agents, np.uint8)
        self._ranges = np.zeros((agents, 2), np.uint32)
        self._slots = np.zeros((agents, KEYS if queries.is_fine else 0), np.uint16)
        self._buckets: dict[int, NDArray[np.int64]] = {}
        """Of each agent, what is set in `_slots`."""
        self._counts = np.zeros((agents, queries.keys + SPREAD), np.uint32)
        self._spans = np.zeros((agents, 2), np.int64)
        self._group, self._wide = -1, False
        self._empty()

    def begin(self, group: int, wide: bool) -> None:
        """Start a piece of a group; `wide` computes its deltas in float64. At most 2³² elements until `finish`."""
        self._wide = wide
        if group == self._group:
            return
        self._group = group
        self._wanted[:] = self._queries.sets[group]
        if self._queries.is_fine:
            self._look_into(group)

    def _look_into(self, group: int) -> None:
        """Set the fine stage's tables; only what was set before is cleared, as they are large."""
        for t, buckets in self._buckets.items():
            self._slots[t, buckets] = 0
        self._buckets = {
            int(t): self._queries.wanted_buckets(group, int(t)) for t in np.flatnonzero(self._wanted)
        }
        self._ranges[:] = 1, 0
        for t, buckets in self._buckets.items():
            self._slots[t, buckets] = np.arange(1, len(buckets) + 1)
            self._ranges[t] = (buckets[0] << LOW) + 1, (buckets[-1] << LOW) + KEYS - 1

    def strip(self, sources: Sources, elements: int) -> None:
        """Count the magnitudes of the next `elements` elements."""
        room, rule = self._width(self._wide)
        given, grown = (room, sources.inputs(), rule, elements), (self._counts, self._spans)
        with quiet():
            if self._queries.is_fine:
                fine(*given, self._ranges, self._slots, *grown)
            else:
                coarse(*given, self._wanted, *grown)

    def finish(self) -> list[Part]:
        """The group's histograms so far, one for each agent that has any; they start again from 0."""
        parts = []
        for t, (least, largest) in enumerate(self._spans.tolist()):
            if least <= largest:
                counts = self._counts[t, least : largest + 1]
                there = np.flatnonzero(counts)
                parts.append(Part(self._group, t, (there + least).astype(np.uint32), counts[there]))
                counts[:] = 0
        self._empty()
        return parts

    def _empty(self) -> None:
        self._spans[:, 0], self._spans[:, 1] = self._queries.keys, -1


def sifter_bytes(agents: int, slots: int) -> int:
    """Upper bound of the bytes a `Sifter` holds, both widths in use; `slots` as in `Queries`."""
    histograms = 4 * (slots * KEYS + SPREAD) + 2 * KEYS + 64
    return merger_bytes(agents, agents + 1 + layout.SPARE) + agents * histograms
