"""The output folder apart from its weights: side files, config, index, and the model card."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ramstream import durable
from ramstream.checkpoint.endings import INDEX_SUFFIX, OTHER_WEIGHTS, deciding_index
from ramstream.checkpoint.safetensors import read_regular
from ramstream.checkpoint.wording import shown
from ramstream.errors import CheckpointError, IntegrityError
from ramstream.plan import SideFile
from ramstream.types import Dtype, config_name

SIDE_FILE_LIMIT = 64 << 20
_MOST_FOLDERS = 1000
"""Below a checkpoint; links may make endlessly many of a few."""
RECORD = "ramstream.json"
_QUANTIZATION = "quantization_config"
CARD = "README.md"
_WEIGHTS = (".safetensors", INDEX_SUFFIX, ".bin.index.json", *OTHER_WEIGHTS)


def collect(folder: Path, weights: Collection[str]) -> tuple[list[SideFile], list[str]]:
    """The base's files that go along verbatim, and a line for each that is left behind.

    Regular files up to 64 MB, subfolders included, by content and not as links; not weights, hidden files, the
    README, or a former merge's record. `weights` names the files that are merged. CheckpointError for a file
    or folder that cannot be read.
    """
    files: list[SideFile] = []
    left: list[str] = []
    above = frozenset(os.fspath(path) for path in (folder.resolve(), *folder.resolve().parents))
    names = list(_walk(folder, "", above, count(1)))
    index = deciding_index([name for name in names if "/" not in name])
    for relative in names:
        if relative in weights or relative == index:
            continue
        why = _left_behind(folder / relative, relative)
        if why:
            left.append(f"{shown(relative)} ({why})")
        else:
            data = read(folder / relative)
            files.append(SideFile(relative, len(data), hashlib.sha256(data).hexdigest()))
    return files, left


def _walk(folder: Path, below: str, above: frozenset[str], entered: Iterator[int]) -> Iterator[str]:
    """Relative paths of all files, links followed; one of a folder that is not entered ends in a slash.

    `above` are the real folders that `below` lies in, `entered` counts the folders.
    """
    if next(entered) > _MOST_FOLDERS:
        raise CheckpointError(
            f"{folder}: holds more than {_MOST_FOLDERS:,} folders, links followed; take some out"
        )
    try:
        names = sorted(os.listdir(folder / below))
    except OSError as error:
        raise CheckpointError(f"{folder / below}: cannot be read ({error.strerror})") from error
    for name in names:
        path = folder / below / name
        real = os.path.realpath(path)
        if not path.is_dir():
            yield below + name
        elif name.startswith(".") or real in above:
            yield f"{below}{name}/"
        else:
            yield from _walk(folder, f"{below}{name}/", above | {real}, entered)


def _left_behind(path: Path, relative: str) -> str:
    """Why a file does not go along, empty if it does."""
    if path.name.startswith("."):
        return "hidden"
    if relative.endswith("/"):
        return "links to a folder that it lies in"
    if relative.lower().endswith(_WEIGHTS):
        return "weights or a pickle, and not among what is merged"
    if relative == CARD:
        return "the output has its own model card"
    if relative == RECORD:
        return "the record of a former merge"
    if not path.is_file():
        return "not a regular file"
    if path.stat().st_size > SIDE_FILE_LIMIT:
        return f"{path.stat().st_size >> 20} MiB, side files go up to {SIDE_FILE_LIMIT >> 20} MiB"
    return ""


def read(path: Path) -> bytes:
    """All bytes of a side file; CheckpointError where it cannot be read, is no file, or is too large for one."""
    try:
        return read_regular(path, SIDE_FILE_LIMIT)
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{shown(str(path))}: {error}") from error


def write_side_files(
    base: Path,
    side_files: Iterable[SideFile],
    target: Path,
    dtype: Dtype | None,
    *,
    dequantised: bool = False,
) -> dict[str, str]:
    """Write side files into `target` with the umask's mode; their sha256 as written.

    config.json has its dtype field changed where `dtype` converts the output, and loses its quantisation where
    the output has none (`dequantised`). IntegrityError where a file is not what it was when the merge was planned.
    """
    written = {}
    for side_file in side_files:
        data = read(base / side_file.name)
        found = hashlib.sha256(data).hexdigest()
        if found != side_file.sha256:
            raise IntegrityError(
                f"{base / side_file.name} changed since the merge was planned (sha256 {found[:12]}, "
                f"it was {side_file.sha256[:12]}); restore it, or remove the unfinished run"
            )
        if side_file.name == "config.json":
            data = without_quantization(data) if dequantised else data
            data = data if dtype is None else with_dtype(data, config_name(dtype))
        written[side_file.name] = write(target / side_file.name, data)
    return written


def write(path: Path, data: bytes) -> str:
    """Write one file, folders included, with the umask's mode; its sha256."""
    durable.make_folders(path.parent)
    durable.remove(path)
    durable.write(path, data)
    return hashlib.sha256(data).hexdigest()


def with_dtype(config: bytes, name: str) -> bytes:
    """config.json with its `dtype`/`torch_dtype` set, also in `text_config`; all other bytes stay."""
    text, new = config.decode(), json.dumps(name)
    found = _dtypes(text, _after_space(text, 0), "text_config")
    return _replaced(text, ((member.value, member.end, new) for member in found))


def _dtypes(text: str, opening: int, below: str | None = None) -> Iterator[_Member]:
    """The dtypes in the object that opens at `opening`, and in its members `below`, in order."""
    for member in _members(text, opening):
        if member.key in ("dtype", "torch_dtype") and text[member.value] == '"':
            yield member
        elif member.key == below and text[member.value] == "{":
            yield from _dtypes(text, member.value)


def without_quantization(config: bytes) -> bytes:
    """config.json without `quantization_config`, also in `text_config`; all other bytes stay.

    A member goes with one comma beside it and the space after that, the last member with what is before it.
    """
    text = config.decode()
    ranges = _ranges_to_drop(text, _after_space(text, 0), "text_config")
    return _replaced(text, ((begin, end, "") for begin, end in ranges))


def _ranges_to_drop(text: str, opening: int, below: str | None = None) -> Iterator[tuple[int, int]]:
    """Ranges to cut out of the object that opens at `opening`, and out of its members `below`, in order."""
    kept = (member.begin for member in _members(text, opening) if member.key != _QUANTIZATION)
    last_kept, before = max(kept, default=-1), opening + 1
    for member in _members(text, opening):
        if member.key != _QUANTIZATION:
            if member.key == below and text[member.value] == "{":
                yield from _ranges_to_drop(text, member.value)
        elif member.begin < last_kept:
            yield member.begin, member.following
        else:
            yield before, member.end
        before = member.end


def _replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> bytes:
    """A text with other texts instead of some of its ranges, given in order."""
    parts: list[str] = []
    position = 0
    for begin, end, new in changes:
        parts += text[position:begin], new
        position = end
    return "".join([*parts, text[position:]]).encode()


@dataclass(frozen=True)
class _Member:
    """Where a member of a JSON object lies in the text."""

    key: str
    begin: int
    value: int
    end: int
    following: int
    """Where the next member begins, or the object closes."""


def _members(text: str, opening: int) -> Iterator[_Member]:
    """The members of the object that opens at `opening`, of a valid JSON text."""
    decoder = json.JSONDecoder()
    begin = _after_space(text, opening + 1)
    while text[begin] != "}":
        key, end = decoder.raw_decode(text, begin)
        value = _after_space(text, _after_space(text, end) + 1)
        _, end = decoder.raw_decode(text, value)
        following = _after_space(text, end)
        following = _after_space(text, following + 1) if text[following] == "," else following
        yield _Member(key, begin, value, end, following)
        begin = following


def _after_space(text: str, position: int) -> int:
    while text[position] in " \t\n\r":
        position += 1
    return position


def licence(folder: Path) -> list[str]:
    """The licence lines of the base's model card, as they stand in its front matter."""
    try:
        text = read(folder / CARD).decode(errors="replace")
    except CheckpointError:
        return []
    parts = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    lines = parts.group(1).splitlines() if parts else []
    return [line for line in lines if re.match(r"license(_name|_link)?:", line)]


def model_card(
    base: str,
    agents: Sequence[str],
    licences: Sequence[str],
    method: str,
    rows: Iterable[tuple[str, str, str, str]],
) -> bytes:
    """The model card: Hub metadata, how the model was made, and what the agents changed.

    `rows` give agent, share changed, share of it changed alone, and λ, as text.
    """
    quoted = [json.dumps(label, ensure_ascii=False) for label in (base, *agents)]
    front = [
        *licences,
        "base_model:",
        *(f"- {label}" for label in quoted),
        "base_model_relation: merge",
        "library_name: transformers",
        "tags:",
        "- merge",
        "- ramstream",
    ]
    lines = [
        "---",
        *front,
        "---",
        "",
        "# Merged model",
        "",
        f"Base: `{base}`. Agents trained from it, in order: {', '.join(f'`{label}`' for label in agents)}.",
        "",
        f"Merged with ramstream, method `{method}`.",
        "",
        "| agent | changed | only by it | λ |",
        "|---|---|---|---|",
        *(f"| `{agent}` | {changed} | {alone} | {factor} |" for agent, changed, alone, factor in rows),
        "",
        "The record (plan, digests, tallies, checksums) is in `ramstream.json`; `ramstream verify` checks it.",
        "",
    ]
    return "\n".join(lines).encode(errors="backslashreplace")


def json_bytes(value: Any) -> bytes:
    """Readable JSON with a final newline."""
    return json.dumps(value, indent=2, allow_nan=False).encode() + b"\n"
