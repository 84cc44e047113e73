"""The journal: an append-only file of lines that vouch for finished work.

A line is `<xxh3-64 of the rest, 16 hex digits> <JSON>\\n`. Replay stops at the first line that is torn or does
not match its checksum, and cuts the file there: what no line vouches for was not done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ramstream import durable
from ramstream.durable import write_at
from ramstream.errors import IntegrityError

Line = dict[str, Any]


def _line(record: Line) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n"


def _parse(line: bytes) -> Line | None:
    checksum, _, text = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or checksum != xxhash.xxh3_64_hexdigest(text).encode():
        return None
    record: Line = json.loads(text)
    return record


class Journal:
    """One journal file. `survives=False` leaves fsync out, for a journal that need not."""

    def __init__(self, path: Path, survives: bool = True) -> None:
        self.path = path
        self._survives = survives
        self._refused: OSError | None = None
        try:
            self._descriptor = durable.disk.create(path)
        except OSError as error:
            if error.errno not in durable.READ_ONLY or not path.exists():
                raise
            self._descriptor, self._refused = os.open(path, os.O_RDONLY), error
        self._end = 0

    @property
    def writable(self) -> bool:
        """Whether lines can be appended."""
        return self._refused is None

    def replay(self) -> Iterator[tuple[int, Line]]:
        """Every intact record with its position, in order; then the file ends after the last of them, on disk.

        Whoever wrote them may have been killed before they were on disk, and what is built on them would be first.
        """
        position = 0
        with open(self.path, "rb") as file:
            for line in file:
                record = _parse(line)
                if record is None:
                    break
                yield position, record
                position += len(line)
        self._end = position
        if self.writable:
            with durable.naming(self.path):
                self._cut()
                self._sync()

    def append(self, records: Sequence[Line]) -> list[int]:
        """Append records and return their positions; on return they are on disk."""
        if self._refused is not None:
            raise self._refused
        positions, lines, end = [], [], self._end
        for record in records:
            positions.append(end)
            lines.append(_line(record))
            end += len(lines[-1])
        with durable.naming(self.path):
            self._cut()  # what a full disk cut short, and could follow on these lines
            write_at(self._descriptor, memoryview(b"".join(lines)), self._end)
            self._sync()
        self._end = end
        return positions

    def read(self, position: int) -> Line:
        """The record that `append` or `replay` placed there. IntegrityError where it is not there any more."""
        with open(self.path, "rb") as file:
            file.seek(position)
            record = _parse(file.readline())
        if record is None:
            raise IntegrityError(
                f"{self.path}: the line at byte {position:,} was whole before and is not now; look after that disk "
                "and run the same command again, it goes on from the lines before"
            )
        return record

    def close(self) -> None:
        """Close the file; the journal can be opened again."""
        os.close(self._descriptor)

    def _cut(self) -> None:
        if os.fstat(self._descriptor).st_size > self._end:
            durable.disk.truncate(self._descriptor, self._end)

    def _sync(self) -> None:
        if self._survives:
            durable.disk.sync(self._descriptor)
