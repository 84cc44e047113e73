"""Checkpoints by Hub id: the local Hub cache first, then a download with huggingface_hub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ramstream.checkpoint.endings import NO_WEIGHTS, OTHER_WEIGHTS, TORCH, candidates
from ramstream.errors import CheckpointError

_ID = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[^\s@]+))?", re.ASCII)

_IGNORED = [*(f"*{ending}" for ending in OTHER_WEIGHTS), "*.mlpackage/*", "*.tar", "*.zip", "*.gz"]
"""Everything else is fetched: safetensors, JSON, tokenizer files, templates, custom code."""

_IGNORED_WITH_TORCH = [
    *(pattern for pattern in _IGNORED if pattern != f"*{TORCH}"),
    *(f"{name}*{TORCH}" for name in NO_WEIGHTS),
]
"""What is not fetched of a repository that has no safetensors."""


def is_id(text: str) -> bool:
    """`org/name` or `name`, optionally `@revision`; a file name with a weight's ending is a path."""
    return _ID.fullmatch(text) is not None and not text.endswith((".safetensors", ".bin", ".gguf", ".json"))


def fetch(text: str, faults: Callable[[Path], str]) -> Path:
    """The folder of the snapshot that `text` names, downloaded unless the local cache has it whole.

    `.bin` weights are downloaded where there are no others. `faults` says what a folder lacks as a checkpoint,
    empty when nothing. CheckpointError says what was tried.
    """
    match = _ID.fullmatch(text)
    assert match is not None
    repo, revision = match["repo"], match["revision"]
    folder, cached = _snapshot(repo, revision, local_files_only=True)
    if folder is not None:
        cached = faults(folder)
        if not cached:
            return folder
    folder, reason = _snapshot(repo, revision, local_files_only=False)
    if folder is not None and candidates(os.listdir(folder)).ending == TORCH:
        folder, reason = _snapshot(repo, revision, local_files_only=False, ignored=_IGNORED_WITH_TORCH)
    if folder is not None:
        found = candidates(os.listdir(folder))
        if not (found.weights or found.indexes):
            raise CheckpointError(
                f"{text}: {faults(folder)}; the download is incomplete, or the repository has no weights "
                "in its root"
            )
        return folder
    raise CheckpointError(
        f"{text}: no such file or folder; as a Hub id: not complete in the local cache ({cached}), "
        f"and the download failed: {reason}"
    )


def _snapshot(
    repo: str, revision: str | None, local_files_only: bool, ignored: Sequence[str] = _IGNORED
) -> tuple[Path | None, str]:
    """The snapshot's folder, or why there is none."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, ignore_patterns=list(ignored), local_files_only=local_files_only
        )
    except Exception as error:  # network, HTTP, disk, its own: all mean that the snapshot is not there
        return None, _reason(error)
    return Path(folder), ""


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    text = text if len(text) <= 300 else text[:300] + "…"
    return text if text.isprintable() else ascii(text)
