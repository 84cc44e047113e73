"""The record of a finished merge, `ramstream.json`: what verifies the output and answers questions about it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ramstream import folder, tallies
from ramstream.errors import PlanError
from ramstream.plan import Described, MergePlan, Space
from ramstream.types import ALIGNMENT, BYTE_RANGE, GRAIN

FORMAT = "ramstream merge 2"
_PACKAGES = ("ramstream", "numpy", "numba", "xxhash", "zarr", "safetensors")

_OF_MODELS = (
    ".json",
    ".safetensors",
    ".bin",
    ".txt",
    ".model",
    ".md",
    ".jinja",
    ".py",
    ".tiktoken",
    ".gitattributes",
)
_BY_NAME = ("LICENSE", "NOTICE")
"""What tells that a file is a part of a model that nothing records."""


@dataclass(frozen=True)
class Range:
    """A contiguous part of an output file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of the output: its size in its space, and where it lies."""

    name: str
    dtype: str
    length: int
    nbytes: int
    file: int
    offset: int


@dataclass
class Record:
    """Everything `verify` and `stats` need to know about an output. Checksums are xxh3-64 a unit, in hex."""

    count_digest: str
    merge_digest: str
    method: dict[str, Any]
    sources: list[dict[str, Any]]
    inputs: list[list[list[int]]]
    """[size, mtime in ns, inode] of every input file, to see later whether one was touched."""
    options: dict[str, Any]
    described: dict[str, Any]
    coefficients: Any
    summary: dict[str, Any]
    files: list[dict[str, Any]]
    """name, size, sha256 of the header with its length prefix, and the dtypes inside."""
    side_files: dict[str, str]
    """sha256 of every other file of the output but this record."""
    left_behind: list[str]
    merged: list[RecordedTensor]
    copied: list[RecordedTensor]
    checksums: list[str]
    encoded_tallies: str
    grain: int = GRAIN
    byte_range: int = BYTE_RANGE
    format: str = FORMAT
    versions: dict[str, str] = field(default_factory=dict)

    def units(self) -> Iterator[tuple[str, list[Range]]]:
        """Each unit's checksum with the ranges of the output it covers, in order."""
        return zip(self.checksums, self._units(), strict=True)

    def _units(self) -> Iterator[list[Range]]:
        flat = Space.lay([tensor.length for tensor in self.merged], ALIGNMENT, self.grain)
        ranges = Space.lay([tensor.length for tensor in self.copied], 8, self.byte_range)
        for space, tensors in ((flat, self.merged), (ranges, self.copied)):
            for unit in range(space.units):
                yield [self._range(tensors[p.tensor], p.begin, p.end) for p in space.pieces(unit)]

    def _range(self, tensor: RecordedTensor, begin: int, end: int) -> Range:
        # A space counts elements, or the base's bytes; either way the output's bytes are proportional.
        first, last = (position * tensor.nbytes // tensor.length for position in (begin, end))
        return Range(self.files[tensor.file]["name"], tensor.offset + first, last - first)

    def to_bytes(self) -> bytes:
        """As it stands in `ramstream.json`."""
        tensors = {group: [vars(t) for t in getattr(self, group)] for group in ("merged", "copied")}
        return folder.json_bytes({**vars(self), **tensors})

    @classmethod
    def read(cls, output: Path) -> Record:
        """The record of an output folder; PlanError where there is none that this version reads."""
        path = output / folder.RECORD
        try:
            data = json.loads(path.read_bytes())
            if data.get("format") != FORMAT:
                raise PlanError(f"{path} has format {data.get('format')!r}, this version reads {FORMAT!r}")
            for group in ("merged", "copied"):
                data[group] = [RecordedTensor(**tensor) for tensor in data[group]]
            record = cls(**data)
            record._check()
            return record
        except FileNotFoundError:
            raise PlanError(f"{output} is no output of ramstream: it has no {folder.RECORD}") from None
        except (OSError, ValueError, TypeError, AttributeError, LookupError, zlib.error) as error:
            raise PlanError(f"{path} cannot be read: {error}") from error

    def _check(self) -> None:
        """ValueError, or another that `read` catches, where parts do not fit each other."""
        units = sum(1 for _ in self._units())
        if len(self.checksums) != units or len(self.tally_records()) != len(self.merged):
            raise ValueError("its units or tensors are not those it has checksums and tallies for")
        if not all(
            isinstance(part, dict) for part in (self.method, self.side_files, self.summary, *self.files)
        ):
            raise ValueError("a part of it is not what it should be")

    def description(self) -> Described:
        """The model that was counted."""
        return Described.from_json(self.described)

    def tally_records(self) -> tallies.Tallies:
        """The tallies of pass 1, one record a merged tensor."""
        return tallies.decode(self.encoded_tallies, len(self.description().labels))


def strays(output: Path) -> list[str]:
    """Files and links in a folder that belong to no output of ours, and, where it is none, to no model either."""
    try:
        record = Record.read(output)
        known = {folder.RECORD, folder.CARD, *record.side_files, *(file["name"] for file in record.files)}
    except PlanError:
        known = {path.name for path in output.iterdir() if path.is_file() and _is_of_a_model(path.name)}
    found = []
    for parent, folders, files in os.walk(output):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [os.path.relpath(os.path.join(parent, name), output) for name in (*files, *links)]
    return sorted(set(found) - known)


def _is_of_a_model(name: str) -> bool:
    return name.endswith(_OF_MODELS) or name.startswith(_BY_NAME)


def make_record(
    plan: MergePlan,
    described: Described,
    counted: tallies.Tallies,
    checksums: Sequence[int],
    inputs: list[list[list[int]]],
    side_files: dict[str, str],
    summary: dict[str, Any],
) -> Record:
    """The record of a merge whose units are all done."""
    count = plan.count
    dtypes: dict[int, set[str]] = {number: set() for number in range(len(plan.outputs))}
    for _, slot in plan.tensors():
        dtypes[slot.file].add(slot.dtype)
    lengths = (*(tensor.elements for tensor in count.merged), *(tensor.nbytes for tensor in count.copied))
    recorded = [
        RecordedTensor(tensor.name, slot.dtype, length, slot.nbytes, slot.file, slot.offset)
        for (tensor, slot), length in zip(plan.tensors(), lengths, strict=True)
    ]
    return Record(
        count_digest=count.digest,
        merge_digest=plan.digest,
        method={"name": plan.method.name(), **plan.method.parameters()},
        sources=[{"label": ref.label, "fingerprint": ref.fingerprint} for ref in count.checkpoints],
        inputs=inputs,
        options={**count.options.identity(), "dtype": plan.identity["dtype"]},
        described=vars(described),
        coefficients=summary["statistics"]["lambda"],
        summary=summary,
        files=[
            {
                "name": file.name,
                "size": file.size,
                "header_sha256": hashlib.sha256(file.header).hexdigest(),
                "dtypes": sorted(dtypes[number]),
            }
            for number, file in enumerate(plan.outputs)
        ],
        side_files=side_files,
        left_behind=list(plan.left_behind),
        merged=recorded[: len(count.merged)],
        copied=recorded[len(count.merged) :],
        checksums=[f"{checksum:016x}" for checksum in checksums],
        encoded_tallies=tallies.encode(counted),
        versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
