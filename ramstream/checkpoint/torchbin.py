"""Read and validate a PyTorch zip archive: which tensors it holds, and where their bytes lie.

`torch.save` writes a zip archive of one folder: `data.pkl`, a pickle of the state dict, and the bytes of every
storage as they are, `data/KEY`. The pickle is read as data and torch is not even imported: `torch.load` takes
1.5 s and 220 MB of memory before it has loaded anything, and with `mmap=True` it maps files writable, which the
system refuses for those that are larger than memory. See `torch/serialization.py`, `_save` and `_load`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from ramstream.checkpoint import pickled
from ramstream.checkpoint.archive import Member, directory, members
from ramstream.checkpoint.endings import TORCH
from ramstream.checkpoint.safetensors import (
    MAX_HEADER,
    MOST_SHOWN,
    Room,
    WeightFile,
    read_header,
    regular_size,
)
from ramstream.checkpoint.sniff import HEAD, looks_like
from ramstream.checkpoint.statedict import ALONE, KNOWN, tensors_of
from ramstream.checkpoint.wording import at_most, listed, shown
from ramstream.errors import CheckpointError
from ramstream.types import TensorInfo

_SLOWER = 20
"""How many bytes of a header are read while one of a pickle is."""


def reader_of(name: str) -> Callable[[Path, str, str, Room], tuple[WeightFile, list[TensorInfo]]]:
    """`read_archive` or `read_header`, by the ending of a weight file's name."""
    return read_archive if name.endswith(TORCH) else read_header


def read_archive(
    path: Path, file: str, label: str, room: Room | None = None
) -> tuple[WeightFile, list[TensorInfo]]:
    """The file's description and its tensors by offset; `file` goes into every TensorInfo.

    Tensors may share bytes; one whose elements do not lie one after the other is `Strided`. The header's sha256
    is of the pickle and of where the storages lie. CheckpointError with a line for every problem found, each
    beginning with `label`. The directory and the pickle are taken out of `room`.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as stream:
            described, tensors, problems = _parse(stream, size, file, room or Room())
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{label}: {error}") from error
    if problems:
        lines = [f"{label}: {problem}" for problem in problems]
        raise CheckpointError("\n".join(at_most(lines, MOST_SHOWN, label)))
    return described, tensors


def _parse(
    stream: BinaryIO, size: int, file: str, room: Room
) -> tuple[WeightFile, list[TensorInfo], list[str]]:
    """What the file holds, and what is wrong with it. ValueError where it does not tell what it holds."""
    head = stream.read(HEAD)
    if not head.startswith(b"PK\x03\x04"):
        if head[8:9] == b"{":
            raise ValueError("looks like a safetensors file; give it a name that ends in .safetensors")
        raise ValueError(looks_like(head) or "is no zip archive as torch.save writes it; download it again")
    entries = directory(stream, room)
    folder = _folder([entry.filename for entry in entries])
    found, problems = members(stream, entries, size)
    if problems:
        return WeightFile(size, "", size), [], problems
    _check_byteorder(stream, found.get(f"{folder}/byteorder"))
    at = found[f"{folder}/data.pkl"]
    room.take(min(_SLOWER * at.size, MAX_HEADER))
    pickle = _content(stream, at)
    prefix = f"{folder}/data/"
    storages = {name.removeprefix(prefix): at for name, at in found.items() if name.startswith(prefix)}
    tensors, problems = tensors_of(pickled.read(pickle, KNOWN.fullmatch), storages, file)
    header = hashlib.sha256(pickle)
    for key, at in sorted(storages.items(), key=lambda item: item[1]):
        header.update(f"{key!a} {at.offset} {at.size}\n".encode())
    start = min((at.offset for at in storages.values()), default=size)
    return WeightFile(size, header.hexdigest(), start), tensors, problems


def _folder(names: Sequence[str]) -> str:
    """The one folder of the archive; ValueError where it is another kind of archive."""
    folders = [name.removesuffix("/data.pkl") for name in names if name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") for name in names):
        raise ValueError("is a TorchScript program, not weights; save the model's state_dict()")
    if len(folders) != 1:
        raise ValueError(
            f"is a zip archive, but none of weights: {len(folders)} of its members are data.pkl, not one "
            f"({listed(names, 3)}); {ALONE}"
        )
    return folders[0]


def _check_byteorder(stream: BinaryIO, at: Member | None) -> None:
    """What does not say, from before torch 2.1, is little-endian."""
    order = b"little" if at is None else _content(stream, at)
    if order != b"little":
        said = shown(order[:20].decode("ascii", "replace"))
        raise ValueError(f"has byte order {said}, not little; load and save it on a little-endian machine")


def _content(stream: BinaryIO, at: Member) -> bytes:
    if at.size > MAX_HEADER:
        raise ValueError(f"describes tensors in {at.size:,} bytes, the limit is {MAX_HEADER:,}; {ALONE}")
    stream.seek(at.offset)
    data = stream.read(at.size)
    if len(data) != at.size:
        raise ValueError("ended while it was read; it is truncated, download it again")
    return data
