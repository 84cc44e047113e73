"""Verify an output: its structure, or every byte. Nothing is repaired.

The structure says that every file is there with the recorded size and header and that the small files are
unchanged. It cannot see a byte of a weight that changed; reading the data can.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from ramstream.checkpoint.reader import open_reader
from ramstream.errors import RamstreamError
from ramstream.folder import RECORD
from ramstream.record import Range, Record
from ramstream.types import ITEMSIZE

_STEP = 4 << 20


@dataclass
class Report:
    """What was looked at and every problem found."""

    out: Path
    files: int
    bytes_read: int = 0
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {**vars(self), "out": str(self.out), "ok": not self.problems}


def verify_output(
    out: str | Path, read_data: bool = False, progress: Callable[[int], None] | None = None
) -> Report:
    """Check the output `out` against its record, every byte of the weights with `read_data`.

    `progress` is called with the number of bytes read. PlanError where `out` is no output of ramstream.
    """
    folder = Path(out)
    record = Record.read(folder)
    report = Report(folder, len(record.files) + len(record.side_files))
    report.problems.extend(_structure(folder, record))
    if read_data:
        _data(folder, record, report, progress or (lambda nbytes: None))
    return report


def _structure(folder: Path, record: Record) -> Iterator[str]:
    for file in record.files:
        yield from _weight_file(folder / file["name"], file)
    for name, sha256 in record.side_files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            yield f"{name} changed: its sha256 is not {sha256[:12]}…"
    known = {file["name"] for file in record.files} | set(record.side_files) | {RECORD}
    strays = (
        path for path in folder.rglob("*.safetensors") if path.relative_to(folder).as_posix() not in known
    )
    for path in sorted(strays):
        yield f"{path.relative_to(folder)} does not belong to this merge"


def _weight_file(path: Path, file: dict[str, Any]) -> Iterator[str]:
    name, size = file["name"], file["size"]
    if not path.is_file():
        yield f"{name} is missing"
        return
    found = path.stat().st_size
    if found != size:
        yield f"{name} has {found} bytes, it was written with {size}"
    with open(path, "rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        header = prefix + stream.read(length) if length <= size else prefix
    if hashlib.sha256(header).hexdigest() != file["header_sha256"]:
        yield f"{name}: its header is not the one that was written"
    elif found == size and set(file["dtypes"]) <= ITEMSIZE.keys():
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            yield f"{name}: safetensors' own reader refuses it: {error}"


def _data(folder: Path, record: Record, report: Report, progress: Callable[[int], None]) -> None:
    names = [file["name"] for file in record.files]
    reader = open_reader("mmap", [folder / name for name in names])
    intact = {f["name"] for f in record.files if _has_size(folder / f["name"], f["size"])}
    for checksum, ranges in record.units():
        if not {part.file for part in ranges} <= intact:
            continue  # a missing or cut file, which the structure already reports
        try:
            found = _checksum(reader, names, ranges, progress)
        except RamstreamError as error:
            report.problems.append(f"{_spelled(ranges)}: cannot be compared: {error}")
            continue
        report.bytes_read += sum(part.nbytes for part in ranges)
        if found != checksum:
            report.problems.append(f"{_spelled(ranges)}: something differs from what was written")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _spelled(ranges: list[Range]) -> str:
    """`model.safetensors, bytes 4096 to 8191` for every file that a unit lies in."""
    spans: dict[str, tuple[int, int]] = {}
    for part in ranges:
        begin, end = spans.get(part.file, (part.offset, 0))
        spans[part.file] = min(begin, part.offset), max(end, part.offset + part.nbytes)
    return " and ".join(f"{file}, bytes {begin} to {end - 1}" for file, (begin, end) in spans.items())


def _checksum(reader: Any, names: list[str], ranges: list[Range], progress: Callable[[int], None]) -> str:
    checksum = xxhash.xxh3_64()
    for part in ranges:
        for offset in range(part.offset, part.offset + part.nbytes, _STEP):
            nbytes = min(_STEP, part.offset + part.nbytes - offset)
            checksum.update(reader.read(names.index(part.file), offset, nbytes, 1))
            reader.release()
            progress(nbytes)
    return checksum.hexdigest()
