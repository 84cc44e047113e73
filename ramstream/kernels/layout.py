"""What the loops work on: sizes, the float formats by Dtype code, and the arrays they are handed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ramstream.types import Dtype, Kind

BLOCK = 4096
"""Elements of a block: float32 rows of 16 KiB."""
LANES = 1024
"""Partial sums of every float tally: lane j adds the elements ≡ j mod 1024 of its piece."""
SPARE = 4
"""Rows after base and agents: zeros, then three of scratch."""
REFUSED, SPECIAL = np.uint8(1), np.uint8(2)
"""Marks of elements: the base is refused; some agent is not finite."""

F32, F64, BF16, F16 = int(Dtype.F32), int(Dtype.F64), int(Dtype.BF16), int(Dtype.F16)
E4M3, E5M2 = int(Dtype.F8_E4M3), int(Dtype.F8_E5M2)
DELTA, ABSENT = int(Kind.DELTA), int(Kind.ABSENT)

# By Dtype code.
ITEMSIZE = np.array([dtype.itemsize for dtype in Dtype])
MANTISSA = np.array([dtype.mantissa for dtype in Dtype])
BIAS = np.array([dtype.bias for dtype in Dtype])
# float32 magnitudes from here on round to infinity, or are beyond E4M3's 464 (which still rounds to 448).
LIMIT = np.array([0x7F800000, 0x7F800000, 0x7F7F8000, 0x477FF000, 0x43E80001, 0x47700000], np.uint32)
BEYOND = np.array([0x7F800000, 0, 0x7F80, 0x7C00, 0x7E, 0x7C], np.uint64)
NAN = np.array([0x7FC00000, 0x7FF8000000000000, 0x7FC0, 0x7E00, 0x7F, 0x7F], np.uint64)


class Inputs(NamedTuple):
    """One strip's sources, base first (see `host.Sources`)."""

    codes: Any
    addresses: Any
    valid: Any


class Rule(NamedTuple):
    """When an element counts as changed."""

    epsilon: Any
    """In the width."""
    compare: int
    """Dtype code both sides are rounded to before they are compared, or -1."""
    keep: bool
    """Whether agents contribute where base or agent is not finite."""


class Room(NamedTuple):
    """A worker's buffers for one width."""

    rows: Any
    """float (at least T + 1 + SPARE, BLOCK): base, agents (soon masked deltas), zeros, scratch, and perhaps more
    (`cores.rows_of`)."""
    bits: Any
    """The same memory as uint32 or uint64."""
    raw: Any
    """uint32, like `rows`: values as float32 bits. The same memory once more when the width is float32."""
    other: Any
    """uint64 (BLOCK,): narrowed values to compare with."""
    mark: Any
    """uint8 (BLOCK,): REFUSED and SPECIAL; zero between blocks."""
    active: Any
    """uint8 (T,): whether the agent's row of this block may hold anything but zeros."""
    finite: Any
    """int64 (3, T + 1): the tallies `nonfinite`, `refused`, `refused_first`."""


class Task(NamedTuple):
    """What the merging loop does with a strip."""

    core: Any
    """Address of the method's core."""
    code: int
    """Dtype code of the output."""
    random: bool
    """Whether the core reads draws."""
    moves_unchanged: bool
    seed: Any
    name: Any
    """uint64: the tensor, for its draws."""
    first: int
    """The strip's first element in its tensor."""


class Report(NamedTuple):
    """What merging adds up."""

    counts: Any
    """int64 (2,): overflow, moved."""
    lanes: Any
    """float64 (LANES,): squares of the merged deltas."""


class Counts(NamedTuple):
    """The other tallies of a piece (see `tallies`), and room to take them."""

    overlap: Any
    pairs: Any
    conflicts: Any
    patterns: Any
    """Until `close`: elements whose contributors include this set."""
    steps: Any
    l1: Any
    dots: Any
    planes: Any
    """uint64 (3, T, BLOCK / 64): changed, negative and positive deltas of the block, packed."""
    stack: Any
    """uint64 (9, BLOCK / 64)"""
    lanes: Any
    """float64 (T + T (T + 1) / 2, LANES): l1, then dots s ≤ t."""
    used: Any
    """uint8, one for each: whether the lanes hold anything; otherwise they are not even zeroed."""
    scale: Any
    """uint8 (BLOCK,): steps of each element."""
    histogram: Any
    """int64 (4, 128)"""
