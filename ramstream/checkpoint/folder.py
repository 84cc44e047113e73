"""Which files of a folder are its weights: the index decides, else the only weight file; safetensors wins."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ramstream.checkpoint.endings import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Candidates,
    candidates,
    deciding_index,
)
from ramstream.checkpoint.safetensors import MAX_HEADER, read_regular
from ramstream.checkpoint.sniff import HEAD, looks_like
from ramstream.checkpoint.strict import parse_object
from ramstream.checkpoint.wording import listed, shown
from ramstream.errors import CheckpointError
from ramstream.types import TensorInfo

_MOST_FAULTS = 500
"""Files of an index that are looked for in vain; there are models of hundreds."""

_INSTEAD = (
    (
        (ADAPTER_CONFIG, "adapter_model.bin"),
        f"a LoRA adapter without {ADAPTER_WEIGHTS}; download it again, or save it with peft as safetensors",
    ),
    (
        (".bin",),
        "what PyTorch keeps of a training run, which is no weights; give the folder with the weights",
    ),
    (
        (".pt", ".pth", ".ckpt"),
        "PyTorch files that may hold anything; save their state dict as pytorch_model.bin, or as safetensors",
    ),
    ((".distcp",), "a distributed PyTorch checkpoint; convert it to safetensors"),
    ((".gguf",), "GGUF, whose quantised blocks cannot be averaged; use the safetensors it was made from"),
    ((".h5", ".msgpack", ".onnx", ".npz"), "weights of another framework; convert them to safetensors"),
)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".aria2", ".download", ".tmp")


@dataclass(frozen=True)
class Chosen:
    """The weight files of a folder, by name, and what the index says about the tensors."""

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None
    problems: tuple[str, ...] = ()
    """A line for every shard of the index that is missing or has an unsafe name; it is not among `files`."""


def choose(folder: Path, label: str) -> Chosen:
    """The weight files of `folder`. CheckpointError when it does not tell which they are."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{label}: the folder cannot be read: {error.strerror or error}") from error
    index = deciding_index(names)
    if index is not None:
        return _by_index(folder, index, label)
    found = candidates(names)
    if fault := _undecided(folder, names, found):
        raise CheckpointError(f"{label}: {fault}")
    (file,) = found.weights
    if not file.isprintable():
        raise CheckpointError(f"{label}: its weights' name is {shown(file)}; rename the file")
    return Chosen((file,))


def _undecided(folder: Path, names: Sequence[str], found: Candidates) -> str:
    """Why a folder without a deciding index does not tell its weights; empty where it does."""
    weights, usual = found.weights, found.usual_index
    if len(found.indexes) > 1:
        return f"holds several indexes, none named {usual}: {listed(found.indexes)}; leave one of them"
    if not weights:
        return _what_else(folder, names)
    if len(weights) > 1:
        return (
            f"holds {len(weights)} {found.ending[1:]} files and no {usual} that says which belong together: "
            f"{listed(weights, 20)}; add the index, or give one file by its name"
        )
    if (shard := _SHARD.search(weights[0])) and int(shard[1]) > 1:
        return (
            f"holds {listed(weights)} alone, one shard of {int(shard[1])}, and no {usual}; download it again, "
            "or give the one file by its name"
        )
    if weights == [ADAPTER_WEIGHTS] and ADAPTER_CONFIG not in names:
        return f"holds {ADAPTER_WEIGHTS} without its {ADAPTER_CONFIG}; download it again"
    return ""


def read_json(path: Path, label: str, lenient: bool = False) -> dict[str, object]:
    """The JSON object in a side file or index; CheckpointError says what is wrong with it."""
    try:
        data = read_regular(path, MAX_HEADER)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{label}: {error}") from error
    try:
        return parse_object(data, lenient)
    except ValueError as error:
        seen = None if data[:1] in (b"{", b"[") else looks_like(data[:HEAD])
        raise CheckpointError(f"{label}: {seen or f'{error}; download it again'}") from error


def index_problems(
    tensors: Mapping[str, Sequence[TensorInfo]], weight_map: Mapping[str, str], label: str
) -> list[str]:
    """Where the index and the headers of the shards (`tensors` by file) disagree: a line a shard and kind.

    `tensors` may lack shards whose headers could not be read.
    """
    present = {file: {info.name for info in infos} for file, infos in tensors.items()}
    faults = {file: _Disagreement() for file in tensors}
    for name, file in weight_map.items():
        if file in present and name not in present[file]:
            faults[file].lacks.append(name)
    for file, infos in tensors.items():
        for name in (info.name for info in infos):
            home = weight_map.get(name)
            if home is None:
                faults[file].unnamed.append(name)
            elif home != file:
                twice = name in present.get(home, ())
                (faults[file].twice if twice else faults[file].misplaced).append(name)
    return [f"{label}/{shown(file)}: {line}" for file, fault in faults.items() for line in fault.lines()]


@dataclass
class _Disagreement:
    """Names of one shard by the way in which it and the index disagree."""

    lacks: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        kinds = (
            (self.lacks, "lacks tensors the index says it holds"),
            (self.unnamed, "holds tensors the index does not name"),
            (self.misplaced, "holds tensors the index places in another shard"),
            (self.twice, "holds tensors another shard holds too"),
        )
        advice = "index and shards are of different checkpoints, download both again"
        return [f"{text}: {listed(names)}; {advice}" for names, text in kinds if names]


def _by_index(folder: Path, index: str, label: str) -> Chosen:
    where = f"{label}/{shown(index)}"
    weight_map = _weight_map(read_json(folder / index, where), where)
    files: list[str] = []
    faults: list[str] = []
    for file in sorted(set(weight_map.values())):
        if len(faults) == _MOST_FAULTS:
            faults.append(
                f"{where}: more of its files are missing or misnamed, the others were not looked for"
            )
            break
        fault = _shard_problem(folder, file, label, index)
        files += [file] if fault is None else []
        faults += [fault] if fault is not None else []
    return Chosen(tuple(files), weight_map, tuple(faults))


def _weight_map(index: Mapping[str, object], label: str) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{label}: weight_map is {shown(weight_map)}, not an object of tensor and file names; download it again"
        )
    wrong = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if wrong:
        raise CheckpointError(f"{label}: weight_map names no file for {listed(wrong)}; download it again")
    return weight_map


def _shard_problem(folder: Path, file: str, label: str, index: str) -> str | None:
    """The name itself must be safe; what it links to may lie elsewhere, as in the Hub's cache."""
    parts = file.split("/")
    if not file.isprintable() or "\\" in file or not {"", ".", ".."}.isdisjoint(parts):
        return f"{label}/{shown(index)}: shard {shown(file)} is not a plain name inside the folder"
    path = folder / file
    if os.path.lexists(path):
        return None
    where = f"{label}/{shown(file)}"
    unfinished = [file + ending for ending in _UNFINISHED if os.path.lexists(f"{path}{ending}")]
    if unfinished:
        return (
            f"{where}: is missing, but {shown(unfinished[0])} is there; the download is incomplete, finish it"
        )
    return f"{where}: is missing, {shown(index)} lists it; download it again"


def _what_else(folder: Path, names: Sequence[str]) -> str:
    found = []
    rest = list(names)
    for endings, text in _INSTEAD:
        matching = [name for name in rest if name.endswith(endings)]
        if matching:
            found.append(f"holds {text} ({listed(matching, 3)})")
            rest = [name for name in rest if not name.endswith(endings)]
    unfinished = [name for name in names if name.endswith(_UNFINISHED)]
    if unfinished:
        found.append(f"holds an unfinished download ({listed(unfinished, 3)}); download it again")
    below = [name for name in names if _holds_weights(folder / name)]
    if below:
        found.append(
            f"holds no weights itself, but its subfolders do: {listed(below, 10)}; give one of those"
        )
    if found:
        return "no safetensors weights: " + "; ".join(found)
    holds = listed(names, 10) if names else "nothing"
    return f"no safetensors weights: holds {holds}; give the folder with the weights"


def _holds_weights(folder: Path) -> bool:
    try:
        return bool(candidates(os.listdir(folder)).weights)
    except OSError:
        return False
