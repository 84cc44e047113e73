"""Spaces: tensors laid end to end and cut into units of work, and the digests of plain data."""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ramstream.types import Piece


@dataclass(frozen=True)
class Space:
    """Tensors laid end to end; `starts[i] .. starts[i] + lengths[i]` belong to tensor i."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    unit: int

    @classmethod
    def lay(cls, lengths: Sequence[int], alignment: int, unit: int) -> Space:
        """Lay tensors of these lengths in order, each start aligned."""
        starts, position = [], 0
        for length in lengths:
            position = -(-position // alignment) * alignment
            starts.append(position)
            position += length
        return cls(tuple(starts), tuple(lengths), unit)

    @property
    def total(self) -> int:
        """Length of the space, from 0 to the end of the last tensor."""
        return self.starts[-1] + self.lengths[-1] if self.starts else 0

    @property
    def units(self) -> int:
        """How many units of work cover the space."""
        return -(-self.total // self.unit)

    def pieces(self, unit: int) -> Iterator[Piece]:
        """The parts of tensors in one unit, in order; empty tensors have none."""
        begin, end = unit * self.unit, (unit + 1) * self.unit
        for index in range(max(bisect.bisect_right(self.starts, begin) - 1, 0), len(self.starts)):
            start = self.starts[index]
            if start >= end:
                return
            first, last = max(begin - start, 0), min(end - start, self.lengths[index])
            if first < last:
                yield Piece(index, first, last)


def digest(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """What differs between two identities: every field with both values; digests are cut.

    The layout follows from the inputs and is only named where nothing else differs.
    """
    fields = [key for key in (ours | theirs) if ours.get(key) != theirs.get(key)]
    named = [key for key in fields if key != "layout"] or fields
    return "; ".join(
        f"{key} is {_brief(ours.get(key))} here and {_brief(theirs.get(key))} there" for key in named
    )


def _brief(value: Any) -> str:
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", json.dumps(value))
