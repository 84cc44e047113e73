"""From open checkpoints to a plan: what planning has to read from disk is read here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ramstream import folder
from ramstream.checkpoint import Checkpoint
from ramstream.checkpoint.endings import INDEX
from ramstream.checkpoint.reader import open_reader
from ramstream.checkpoint.wording import listed
from ramstream.errors import CheckpointError, PlanError
from ramstream.methods import Method
from ramstream.plan import CountPlan, MatchOptions, MergePlan, plan_count, plan_output
from ramstream.settings import Setting
from ramstream.types import Dtype, TensorInfo

_STEP = 4 << 20
_QUANTISED = "hf_quant_config.json"
"""How ModelOpt says that a checkpoint is quantised."""
_TOKENIZER = (
    "*token*.json",
    "*.tiktoken",
    "tokenizer.model",
    "sentencepiece*.model",
    "spiece.model",
    "vocab.*",
    "merges.txt",
)


def plan_counts(
    base: Checkpoint, agents: Sequence[Checkpoint], epsilon: float = 1e-5, options: MatchOptions | None = None
) -> CountPlan:
    """Plan pass 1. PlanError or CheckpointError with every problem that the headers show."""
    plan = plan_count(base, agents, epsilon, options, same_bytes)
    reading = (note for checkpoint in (base, *agents) for note in checkpoint.notes)
    return replace(plan, notes=(*plan.notes, *reading, *_tokenizer_notes(base, agents)))


def plan_merge(
    base: Checkpoint,
    agents: Sequence[Checkpoint],
    method: Method,
    options: MatchOptions | None = None,
    dtype: Dtype | None = None,
    shard_size: int | None = None,
) -> MergePlan:
    """Plan a merge of `agents`, trained from `base`, by `method`.

    `dtype` converts every float tensor of the output; `shard_size` is in bytes, None keeps the base's shards.
    PlanError or CheckpointError with every problem that the headers show. Writes nothing, loads no torch.
    """
    count = plan_counts(base, agents, method.epsilon, options)
    side_files, left_behind = ([], []) if base.single_file else folder.collect(base.folder, base.files)
    if count.dequantised:
        left_behind += [f"{f.name} (the output is not quantised)" for f in side_files if f.name == _QUANTISED]
        side_files = [file for file in side_files if file.name != _QUANTISED]
    plan = plan_output(count, method, dtype, shard_size, side_files, left_behind)
    _refuse_taken_names(plan)
    unused = _unused_rules(method, [tensor.name for tensor in count.merged])
    return replace(plan, count=replace(count, notes=(*count.notes, *unused)))


def _unused_rules(method: Method, names: Sequence[str]) -> Iterator[str]:
    """A line for each rule of a parameter that is about no merged tensor."""
    for key in method.numeric(1):
        value = getattr(method, key)
        for rule in value.unused(names) if isinstance(value, Setting) else ():
            yield f"{method.name()}: {key}: {rule} is used for no merged tensor"


def _refuse_taken_names(plan: MergePlan) -> None:
    """PlanError where a weight file of the base has the name of a file that the output has for itself."""
    taken = {folder.RECORD, folder.CARD, INDEX} | {file.name for file in plan.side_files}
    for file in plan.outputs:
        if file.name in taken:
            raise PlanError(
                f"{plan.count.checkpoints[0].label}: its index puts weights into {file.name}, which the output "
                "needs for something else; use --shard-size to cut the output anew"
            )


def same_bytes(checkpoint: Checkpoint, one: TensorInfo, two: TensorInfo) -> bool:
    """Whether two tensors of a checkpoint hold the same bytes, read step by step."""
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    names = list(checkpoint.files)
    readers = [open_reader("pread", [Path(checkpoint.folder) / name for name in names]) for _ in range(2)]
    for begin in range(0, one.nbytes, _STEP):
        nbytes = min(_STEP, one.nbytes - begin)
        views = [
            reader.read(names.index(info.file), info.offset + begin, nbytes, 1)
            for reader, info in zip(readers, (one, two), strict=True)
        ]
        if not np.array_equal(views[0], views[1]):
            return False
    return True


def _tokenizer_notes(base: Checkpoint, agents: Sequence[Checkpoint]) -> Iterator[str]:
    """A line for each agent whose tokenizer or chat template is another than the base's."""
    for agent in agents:
        if base.single_file or agent.single_file:
            continue
        names = sorted({path.name for path in base.folder.iterdir() if path.is_file()})
        differing = [
            name
            for name in names
            if any(fnmatchcase(name, glob) for glob in _TOKENIZER) and (agent.folder / name).is_file()
            if _content(base.folder / name) != _content(agent.folder / name)
        ]
        if differing:
            yield f"{agent.label}: {listed(differing, 20)} differs from the base's; the output has the base's"
        (ours, _), (theirs, places) = _chat_templates(base.folder), _chat_templates(agent.folder)
        if theirs and theirs != ours:
            text = f"{agent.label}: the chat template ({listed(places)})"
            yield f"{text} differs from the base's; the output has the base's" + ("" if ours else ", none")


def _content(path: Path) -> Any:
    """What two files are compared by: their bytes' digest; a tokenizer's config without its chat template."""
    size = path.stat().st_size
    if size > folder.SIDE_FILE_LIMIT:
        return size
    data = folder.read(path)
    if path.name == "tokenizer_config.json":
        with suppress(ValueError, AttributeError, RecursionError):
            return {key: value for key, value in json.loads(data).items() if key != "chat_template"}
    return hashlib.sha256(data).hexdigest()


def _chat_templates(where: Path) -> tuple[dict[str, str], list[str]]:
    """Chat templates by name, and the files they are in; a later place takes precedence over an earlier one."""
    templates: dict[str, str] = {}
    places: list[str] = []
    for place in ("tokenizer_config.json", "chat_template.json"):
        value = None
        with suppress(CheckpointError, ValueError, AttributeError, RecursionError):
            value = json.loads(folder.read(where / place)).get("chat_template")
        for entry in value if isinstance(value, list) else [{"name": "default", "template": value}]:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name"))] = entry["template"].rstrip("\n")
                places.append(place)
    for path in sorted(
        (*where.glob("chat_template.jinja"), *where.glob("additional_chat_templates/*.jinja"))
    ):
        with suppress(CheckpointError, ValueError):
            name = "default" if path.parent == where else path.stem
            templates[name] = folder.read(path).decode().rstrip("\n")
            places.append(path.relative_to(where).as_posix())
    return templates, list(dict.fromkeys(places))
