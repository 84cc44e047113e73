"""Tallies: what pass 1 counts per piece and per tensor, as one numpy record each (spec: "What pass 1 keeps").

A record's fields, T agents:

overlap          int64 (T, T)      [t, k]: elements changed by t and by exactly k other agents
pairs            int64 (T, T)      elements changed by both s and t (diagonal: changed by t)
sign_conflicts   int64 (T, T)      of those, deltas of opposite signs
patterns         int64 (2^T,)      elements by exact set of contributors, bit t = agent t; (0,) beyond 8 agents
nonfinite        int64 (T+1,)      NaN or Inf, base first
refused          int64 (T+1,)      of those, the ones that are not bit-equal to the base's (see on_nonfinite)
refused_first    int64 (T+1,)      smallest index of a refused element, -1 for none
l1, l2           float64 (T,)      Σ|δ|, Σδ² over changed elements
dots             float64 (T, T)    Σ δˢδᵗ
steps            int64 (T, 2, 33)  |δ| in steps of the base's storage dtype; [:, 0] unique, [:, 1] shared
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramstream.types import MAX_PATTERNS, STEPS

Tallies = NDArray[Any]
"""A structured array of `tally_dtype(T)`, one record a piece or a tensor."""


def tally_dtype(agents: int) -> np.dtype[Any]:
    """The record of one piece or tensor for T = `agents`."""
    square, sources = (agents, agents), (agents + 1,)
    return np.dtype(
        [
            ("overlap", np.int64, square),
            ("pairs", np.int64, square),
            ("sign_conflicts", np.int64, square),
            ("patterns", np.int64, (2**agents if agents <= MAX_PATTERNS else 0,)),
            ("nonfinite", np.int64, sources),
            ("refused", np.int64, sources),
            ("refused_first", np.int64, sources),
            ("l1", np.float64, (agents,)),
            ("l2", np.float64, (agents,)),
            ("dots", np.float64, square),
            ("steps", np.int64, (agents, 2, STEPS)),
        ]
    )


def empty(agents: int, records: int) -> Tallies:
    """`records` records that have counted nothing."""
    tallies = np.zeros(records, tally_dtype(agents))
    tallies["refused_first"] = -1
    return tallies


def add(total: Tallies, index: int, piece: Any) -> None:
    """Add one piece's record to record `index` of `total`. Float sums: call in grain order."""
    record = total[index]
    first, new = record["refused_first"], piece["refused_first"]
    first[...] = np.where(first < 0, new, np.where(new < 0, first, np.minimum(first, new)))
    for name in record.dtype.names:
        if name != "refused_first":
            record[name][...] += piece[name]


def encode(tallies: Tallies) -> str:
    """ASCII form for a journal line, exact to the bit."""
    return base64.b64encode(zlib.compress(tallies.tobytes(), 1)).decode("ascii")


def decode(text: str, agents: int) -> Tallies:
    """The inverse of `encode`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), tally_dtype(agents)).copy()


def changed(tallies: Tallies) -> NDArray[np.int64]:
    """int64 (records, T): elements each agent changed."""
    counts: NDArray[np.int64] = tallies["overlap"].sum(axis=-1)
    return counts
