"""Read and validate the header of a safetensors file; our own, so that unknown dtypes may pass.

Layout: 8 bytes little-endian header length, the header (a JSON object), the data. See
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from ramstream.checkpoint.sniff import HEAD, looks_like
from ramstream.checkpoint.strict import parse_object
from ramstream.checkpoint.wording import at_most, listed, shown
from ramstream.errors import CheckpointError
from ramstream.types import ITEMSIZE, TensorInfo

MAX_HEADER = 100_000_000
"""Bytes a header may have, the limit of the safetensors library."""

MOST_DIMENSIONS = 64
"""Of a tensor, the limit of numpy and of most of torch."""
_MOST_LETTERS = 4096
"""Of a tensor's name."""
_DTYPE = re.compile(r"\w{1,32}", re.ASCII)

MOST_SHOWN = 20
"""Lines of an error about one file."""
MOST_LOOKED_AT = 1000
"""Wrong tensors of a file; a file with more is wrong as a whole."""
_LARGEST = (1 << 63) - 1
_TRUNCATED = "it is truncated, download it again"


@dataclass(frozen=True)
class WeightFile:
    """One weight file as its header describes it."""

    size: int
    """Bytes of the file."""
    header: str
    """sha256 (hex) of the header's bytes."""
    data_start: int
    """Absolute offset of the first byte of data."""


class Room:
    """What is still read to describe a checkpoint, in bytes of headers: its files may all be links to one."""

    def __init__(self) -> None:
        self.left = 2 * MAX_HEADER

    def take(self, size: int) -> None:
        """ValueError where so much is too much."""
        self.left -= size
        if self.left < 0:
            raise ValueError(
                f"is one file too many: headers of {2 * MAX_HEADER:,} bytes are read for one checkpoint, or "
                "pickles of a twentieth; save it in fewer tensors"
            )


def read_header(
    path: Path, file: str, label: str, room: Room | None = None
) -> tuple[WeightFile, list[TensorInfo]]:
    """The file's description and its tensors by offset; `file` goes into every TensorInfo.

    CheckpointError with a line for every problem found, each beginning with `label`. The header is taken out of
    `room`.
    """
    try:
        size, header = _read(path, room or Room())
        tensors, problems = _parse(header, size, file)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{label}: {error}") from error
    if problems:
        lines = [f"{label}: {problem}; download it again" for problem in problems]
        raise CheckpointError("\n".join(at_most(lines, MOST_SHOWN, label)))
    digest = hashlib.sha256(header).hexdigest()
    return WeightFile(size=size, header=digest, data_start=8 + len(header)), tensors


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a regular file; ValueError when it is something else or longer than `limit`.

    No more than its size says: the system's own files (/proc) say 0, and may have no end or make one wait.
    """
    size = regular_size(path)
    if size > limit:
        raise ValueError(f"has {size:,} bytes, more than the {limit:,} expected of such a file")
    with path.open("rb", buffering=0) as stream:
        return _exactly(stream, size, "it was read")


def regular_size(path: Path) -> int:
    """A pipe must not be opened, it would wait for ever."""
    try:
        status = path.stat()
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        target = os.readlink(path)
        raise ValueError(
            f"is a link to {shown(target)}, which does not exist; the download is incomplete, download it again"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    return status.st_size


def _read(path: Path, room: Room) -> tuple[int, bytes]:
    """Size of the file, and its header's bytes."""
    size = regular_size(path)
    with path.open("rb", buffering=0) as stream:
        head = stream.read(HEAD)
        length = int.from_bytes(head[:8], "little")
        if problem := _length_problem(head, length, size):
            plausible = head[8:9] == b"{" and length <= MAX_HEADER
            raise ValueError(problem if plausible else looks_like(head) or problem)
        room.take(length)
        stream.seek(8)
        return size, _exactly(stream, length, "its header was read")


def _exactly(stream: FileIO, size: int, what: str) -> bytes:
    """So many bytes; one call may give fewer."""
    data = b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise ValueError(f"ended while {what}; {_TRUNCATED}")
        data += more
    return data


def _length_problem(head: bytes, length: int, size: int) -> str | None:
    if size < 10:
        return f"has {size} bytes, fewer than the smallest safetensors file; {_TRUNCATED}"
    if length > MAX_HEADER:
        return (
            f"is no safetensors file: its first 8 bytes say the header has {length:,} bytes, "
            f"the limit is {MAX_HEADER:,}; download it again"
        )
    if length < 2 or head[8:9] != b"{":
        return "is no safetensors file: no JSON object follows the header length; download it again"
    if 8 + length > size:
        return (
            f"header says it has {length:,} bytes, the file has {size - 8:,} after the length; {_TRUNCATED}"
        )
    return None


def _parse(header: bytes, size: int, file: str) -> tuple[list[TensorInfo], list[str]]:
    """Tensors by offset, and what is wrong. ValueError when the header is no JSON object."""
    try:
        entries = parse_object(header)
    except ValueError as error:
        raise ValueError(f"header {error}; download it again") from error
    problems = _metadata_problems(entries.pop("__metadata__", None))
    tensors = []
    start = 8 + len(header)
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(name, entry, file, start))
        except ValueError as error:
            problems.append(f"{shown(name)}: {error}")
        if len(problems) >= MOST_LOOKED_AT:
            break
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    if not problems:
        problems = _layout_problems(tensors, start, size)
    return tensors, problems


def _metadata_problems(metadata: object) -> list[str]:
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return [f"__metadata__ is {shown(metadata)}, not an object"]
    wrong = ((key, value) for key, value in metadata.items() if not isinstance(value, str))
    return [
        f"__metadata__: {shown(key)} is {shown(value)}, not a string"
        for key, value in islice(wrong, MOST_LOOKED_AT)
    ]


def _tensor(name: str, entry: object, file: str, start: int) -> TensorInfo:
    """One header entry; ValueError says what is wrong with it."""
    if fault := name_fault(name):
        raise ValueError(fault)
    if not isinstance(entry, dict):
        raise ValueError(f"described by {shown(entry)}, not by an object")
    absent = [key for key in ("dtype", "shape", "data_offsets") if key not in entry]
    if absent:
        raise ValueError(f"the header lacks its {', '.join(absent)}")
    if len(entry) > 3:
        more = listed([key for key in entry if key not in ("dtype", "shape", "data_offsets")])
        raise ValueError(f"the header says more of it than is known, {more}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype is {shown(dtype)}, not a name")
    if not _are_sizes(shape):
        raise ValueError(f"shape is {shown(shape)}, not a list of non-negative integers")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"shape has {len(shape):,} dimensions, the limit is {MOST_DIMENSIONS}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets are {shown(offsets)}, not a begin and an end after it")
    begin, end = offsets
    _check_bytes(dtype, shape, end - begin)
    return TensorInfo(name, dtype, tuple(shape), file, start + begin, end - begin)


def name_fault(name: str) -> str:
    """Why no tensor may have this name, empty where one may: what no terminal or file takes, or no one reads."""
    if len(name) > _MOST_LETTERS:  # first: a pickle may use one huge text for all names
        return f"the name has {len(name):,} letters, the limit is {_MOST_LETTERS:,}"
    try:
        name.encode()
    except UnicodeEncodeError:  # JSON's escapes can spell half a surrogate pair
        return "the name is no valid Unicode"
    return "" if name.isprintable() else "the name holds control characters"


def _are_sizes(value: Any) -> bool:
    """Python takes True for 1; JSON does not."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _LARGEST for v in value)


def _check_bytes(dtype: str, shape: list[int], nbytes: int) -> None:
    elements = 0 if 0 in shape else 1
    for extent in shape:
        elements *= extent
        if elements > _LARGEST:
            raise ValueError(f"shape {shown(tuple(shape))} has more than 2^63 elements")
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is not None and elements * itemsize != nbytes:
        raise ValueError(
            f"shape {shown(tuple(shape))} of {dtype} takes {elements * itemsize:,} bytes, "
            f"its data_offsets span {nbytes:,}"
        )


def _layout_problems(tensors: list[TensorInfo], start: int, size: int) -> list[str]:
    """The tensors must cover the data from its first byte to the last of the file, each byte once."""
    problems = []
    position, before = start, "the header"
    for tensor in tensors:
        name = shown(tensor.name)
        if tensor.offset < position:
            problems.append(f"{name} overlaps {before} by {position - tensor.offset:,} bytes")
        elif tensor.offset > position:
            problems.append(f"a hole of {tensor.offset - position:,} bytes lies between {before} and {name}")
        if tensor.offset + tensor.nbytes >= position:
            position, before = tensor.offset + tensor.nbytes, name
    said, found = position - start, size - start
    if said != found:
        fault = "it is truncated" if found < said else "something was appended"
        problems.insert(0, f"header says {said:,} bytes of data, the file has {found:,}; {fault}")
    return problems
