"""The nouns every layer shares: dtypes, tensors in files, and what a checkpoint hands over for a piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from ramstream.errors import UsageError

GRAIN = 1 << 22
"""Elements of the flat space that are counted, checksummed, journaled and stored as one."""

ALIGNMENT = 64
"""Every merged tensor starts on a multiple of this many elements, so its bits start on a 64-bit word."""

BYTE_RANGE = GRAIN
"""Bytes of copied tensors that are one unit of work."""

STRIP = 1 << 18
"""Elements a worker holds at a time of every source: a few hundred KiB each, which stay in the cache."""

MAX_AGENTS = 64
"""Contributors of an element are a set of at most 64 agents."""

MAX_PATTERNS = 8
"""Up to this many agents, elements are also tallied by their exact set of contributors (2^T numbers)."""

STEPS = 33
"""Bins of the step histogram: 1, 2, .. 32 steps of the storage dtype, and more."""


class Dtype(IntEnum):
    """The floating-point dtypes of safetensors that are merged; the value is the kernels' code."""

    F32 = 0
    F64 = 1
    BF16 = 2
    F16 = 3
    F8_E4M3 = 4
    F8_E5M2 = 5

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return (4, 8, 2, 2, 1, 1)[self]

    @property
    def mantissa(self) -> int:
        """Explicit bits of the mantissa."""
        return (23, 52, 7, 10, 3, 2)[self]

    @property
    def bias(self) -> int:
        """Bias of the exponent."""
        return (127, 1023, 127, 15, 7, 15)[self]


class Kind(IntEnum):
    """What a source hands over for a piece, beside raw bytes of a `Dtype` (the same number line)."""

    DELTA = 100
    """float32 deltas: the agent is base + delta and was never materialised (LoRA)."""
    ABSENT = 101
    """Nothing: the agent is unchanged here."""


ITEMSIZE = {
    **{d.name: d.itemsize for d in Dtype},
    **dict.fromkeys(("I64", "U64"), 8),
    **dict.fromkeys(("I32", "U32"), 4),
    **dict.fromkeys(("I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes of one element of every safetensors dtype we know; another is copied by its bytes."""

_SPELLINGS = {
    "F32": ("float32", "fp32", "float"),
    "F64": ("float64", "fp64", "double"),
    "BF16": ("bfloat16",),
    "F16": ("float16", "fp16", "half"),
    "F8_E4M3": ("float8_e4m3fn", "float8_e4m3", "fp8_e4m3", "f8e4m3"),
    "F8_E5M2": ("float8_e5m2", "fp8_e5m2", "f8e5m2"),
}


def parse_dtype(text: str) -> Dtype:
    """A float dtype by any common name: `bf16`, `bfloat16`, `torch.bfloat16`, `BF16`. UsageError otherwise."""
    word = text.lower().removeprefix("torch.")
    for name, spellings in _SPELLINGS.items():
        if word == name.lower() or word in spellings:
            return Dtype[name]
    known = ", ".join(name.lower() for name in _SPELLINGS)
    raise UsageError(f"{text!r} is not a float dtype ramstream knows; use one of {known}")


def config_name(dtype: Dtype) -> str:
    """The spelling `config.json` uses for a dtype: `bfloat16`, `float32`, …"""
    return "float8_e4m3fn" if dtype is Dtype.F8_E4M3 else _SPELLINGS[dtype.name][0]


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: a file of its checkpoint, and the absolute byte range in that file."""

    name: str
    dtype: str
    """safetensors' spelling: BF16, F32, I64, …; perhaps one we do not know. What a computed tensor counts as."""
    shape: tuple[int, ...]
    file: str
    """Path relative to the checkpoint's folder."""
    offset: int
    """Absolute offset of the first byte in `file`."""
    nbytes: int
    recipe: Recipe | None = None
    """How its elements are computed from what lies there; None where they lie there one after the other."""

    @property
    def elements(self) -> int:
        """Number of elements: the product of the shape, 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Scaled:
    """float8 elements times a scale of their block; computed as float32, one rounding.

    Block (i, j) of the last two dimensions has the scale's element (i, j); leading dimensions go together. A
    block as large as the tensor is one scale for all, one of (1, columns) a scale a row.
    """

    stored: str
    """Dtype of the bytes."""
    scale: TensorInfo
    block: tuple[int, int]


@dataclass(frozen=True)
class LowRank:
    """A delta of low rank, float32: element (x, y) is scaling · Σₖ b[x, k] · a[k, y], k ascending from 0.

    One multiplication and one addition a step, then one multiplication by `scaling`. With `transposed` the delta is
    that of the transposed tensor: element (x, y) is scaling · Σₖ b[y, k] · a[k, x].
    """

    a: TensorInfo
    """(rank, columns)"""
    b: TensorInfo
    """(rows, rank)"""
    scaling: float
    transposed: bool = False


@dataclass(frozen=True)
class Strided:
    """Elements that do not lie one after the other: strides of every dimension, in elements."""

    strides: tuple[int, ...]


Recipe = Scaled | LowRank | Strided


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that lies in one unit of work.

    `begin` and `end` count from the start of the tensor, in elements for merged tensors and in bytes for
    copied ones.
    """

    tensor: int
    begin: int
    end: int
