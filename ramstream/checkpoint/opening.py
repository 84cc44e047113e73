"""A checkpoint: its files, tensors and config, opened with every problem listed at once."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ramstream.checkpoint import hub
from ramstream.checkpoint.endings import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ramstream.checkpoint.float8 import dequantised
from ramstream.checkpoint.folder import Chosen, choose, index_problems, read_json
from ramstream.checkpoint.lora import adapter_tensors
from ramstream.checkpoint.refused import refusals
from ramstream.checkpoint.safetensors import Room, WeightFile
from ramstream.checkpoint.torchbin import reader_of
from ramstream.checkpoint.wording import at_most, shown
from ramstream.errors import CheckpointError, IntegrityError
from ramstream.types import TensorInfo

_MOST_PROBLEMS = 1000
"""Lines of an error about one checkpoint."""
_MOST_TENSORS = 500_000
"""Of all files together: what is known of one takes up to 600 bytes."""
_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of one checkpoint say; no weights are read."""

    label: str
    """Short name for messages."""
    folder: Path
    """Real folder that holds the files."""
    files: Mapping[str, WeightFile]
    """Weight files by path relative to `folder`, sorted by it."""
    tensors: Mapping[str, TensorInfo]
    """By file, then by offset in it."""
    config: Mapping[str, Any] | None
    """`config.json` parsed; None without one, and for a single file."""
    single_file: bool
    adapter: bool = False
    """Whether it is a LoRA adapter: what it does not name is the base's."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it was read."""

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a folder, one `.safetensors` or `.bin` file, or a Hub id. CheckpointError lists all its problems."""
        return _open(source, _label(source))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Weight files in order."""
        return tuple(self.folder / name for name in self.files)

    def fingerprint(self) -> str:
        """sha256 (hex) of headers, sizes and 64 samples of 4 KiB spread evenly over each file.

        Content, not path. CheckpointError for a file that cannot be read, IntegrityError for a changed one.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(b"ramstream checkpoint 1\n")
        for name, file in self.files.items():
            digest.update(f"{file.header} {file.size}\n".encode())
            for block in _samples(self.folder / name, file.size, self._shown(name)):
                digest.update(block)
        return digest.hexdigest()

    def _shown(self, name: str) -> str:
        return self.label if self.single_file else f"{self.label}/{name}"


def open_all(sources: Sequence[str | Path]) -> list[Checkpoint]:
    """Open every source; one CheckpointError lists the problems of all of them."""
    short = [_label(source) for source in sources]
    taken = Counter(short)
    checkpoints, problems = [], []
    for source, label in zip(sources, short, strict=True):
        try:
            checkpoints.append(_open(source, label if taken[label] == 1 else _typed(source)))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems)))
    return checkpoints


def _typed(source: str | Path) -> str:
    text = str(source)
    return text.rstrip("/") or text


def _label(source: str | Path) -> str:
    """As typed; of an absolute path the last name only."""
    text = _typed(source)
    name = os.path.basename(text)
    if name in ("", ".", ".."):
        return shown(os.path.basename(os.path.realpath(text)) or text)
    return shown(name if os.path.isabs(text) else text)


def _locate(source: str | Path, label: str) -> Path:
    """An existing path is always a path; what else looks like a Hub id is one."""
    text = str(source)
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(text):
            target = shown(os.readlink(text))
            raise CheckpointError(
                f"{label}: is a link to {target}, which does not exist; download it again"
            ) from None
        if isinstance(source, str) and hub.is_id(text):
            return hub.fetch(text, _faults)
        raise CheckpointError(f"{shown(text)}: no such file or folder") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{shown(text)}: cannot be read: {reason}") from error
    return Path(text)


def _faults(folder: Path) -> str:
    """What a snapshot in the Hub's cache lacks: other programs leave it with a few files only."""
    try:
        chosen = choose(folder, "the snapshot")
    except CheckpointError as error:
        return str(error).replace("\n", "; ")
    faults = list(chosen.problems)
    faults += [f"{shown(file)} is a link to nowhere" for file in chosen.files if not (folder / file).exists()]
    return "; ".join(faults[:3])


def _open(source: str | Path, label: str) -> Checkpoint:
    path = _locate(source, label)
    if not path.is_dir():
        # The link's own folder and name, not its target's: in the Hub's cache that is a blob without a name.
        return _read(label, path.parent.resolve(), Chosen((path.name,)), None, single_file=True)
    problems: list[str] = []
    chosen = None
    try:
        chosen = choose(path, label)
    except CheckpointError as error:
        problems.append(str(error))
    is_adapter = chosen is not None and chosen.files == (ADAPTER_WEIGHTS,)
    config = None if is_adapter else _side_json(path, "config.json", label, problems)
    adapter = _side_json(path, ADAPTER_CONFIG, label, problems) if is_adapter else None
    if is_adapter and adapter is None and not problems:
        problems.append(f"{label}: holds {ADAPTER_WEIGHTS} without its {ADAPTER_CONFIG}; download it again")
    try:
        if chosen is not None and (adapter is not None or not is_adapter):
            checkpoint = _read(label, path.resolve(), chosen, config, False, adapter)
    except CheckpointError as error:
        problems.append(str(error))
    if problems:
        raise CheckpointError(_lines(problems, label))
    return checkpoint


def _lines(problems: Sequence[str], label: str) -> str:
    """A line for each problem, as many as anyone reads."""
    lines = [line for problem in problems for line in problem.splitlines()]
    return "\n".join(at_most(lines, _MOST_PROBLEMS, label))


def _side_json(folder: Path, name: str, label: str, problems: list[str]) -> Mapping[str, Any] | None:
    """A JSON file of a folder, None where it is not there or, with a problem, cannot be read."""
    try:
        if os.path.lexists(folder / name):
            return read_json(folder / name, f"{label}/{name}", lenient=True)
    except CheckpointError as error:
        problems.append(str(error))
    return None


def _read(
    label: str,
    folder: Path,
    chosen: Chosen,
    config: Mapping[str, Any] | None,
    single_file: bool,
    adapter: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Read the header of every chosen file and hold them against the index and each other."""
    problems = list(chosen.problems)
    files: dict[str, WeightFile] = {}
    by_file: dict[str, list[TensorInfo]] = {}
    room, count = Room(), 0
    for name in chosen.files:
        try:
            shown_name = label if single_file else f"{label}/{name}"
            files[name], by_file[name] = reader_of(name)(folder / name, name, shown_name, room)
            count += len(by_file[name])
        except CheckpointError as error:
            problems.append(str(error))
        if count > _MOST_TENSORS:
            problems.append(
                f"{label}: holds more than {_MOST_TENSORS:,} tensors; save it in fewer, stacked ones"
            )
        if count > _MOST_TENSORS or room.left < 0:
            break
    if chosen.weight_map is not None:
        problems += index_problems(by_file, chosen.weight_map, label)
    tensors = {info.name: info for infos in by_file.values() for info in infos}
    notes: list[str] = []
    if adapter is None:
        problems += [f"{label}: {refusal}" for refusal in refusals(tensors)]
        tensors, faults, notes = dequantised(config, tensors, label)
    else:
        tensors, faults = adapter_tensors(adapter, tensors, label)
    problems += faults
    if not tensors and not problems:
        problems.append(f"{label}: holds no tensors; give the folder with the weights")
    if problems:
        raise CheckpointError(_lines(problems, label))
    return Checkpoint(label, folder, files, tensors, config, single_file, adapter is not None, tuple(notes))


def _samples(path: Path, size: int, label: str) -> Iterator[bytes]:
    """64 blocks of 4 KiB spread evenly over the file, or all of a smaller one."""
    last = size - _SAMPLE_BYTES
    offsets = [last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    if size <= _SAMPLES * _SAMPLE_BYTES:
        offsets = list(range(0, size, _SAMPLE_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            for offset in offsets:
                nbytes = min(_SAMPLE_BYTES, size - offset)
                block = os.pread(stream.fileno(), nbytes, offset)
                if len(block) != nbytes:
                    raise IntegrityError(f"{label}: {_resized(size, offset + len(block))}")
                yield block
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}") from error


def _resized(then: int, now: int) -> str:
    return (
        f"had {then:,} bytes when it was opened, now has {now:,}; restore it, or start anew with it as it is"
    )
