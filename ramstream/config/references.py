"""What a configuration file calls a model: a path, a Hub id, or a mapping as mergekit allows it."""

from __future__ import annotations

import os
from typing import Any

from ramstream.checkpoint.wording import shown
from ramstream.config.document import Place
from ramstream.config.problems import Problems

_LORA = "list the adapter's folder as a model itself; it is merged as its delta to the base"


def reference(problems: Problems, notes: list[str], place: Place, value: Any) -> str | None:
    """The model as the command line names it; None with a problem.

    `path@revision` is a revision on the Hub; as in mergekit it counts for nothing where the path is there.
    """
    if isinstance(value, dict):
        return _from_mapping(problems, notes, place, value)
    text = problems.word(place, value)
    if text is not None and "+" in text:
        hint = ", and where + is part of the name write {model: {path: …}}"
        problems.add(place, f"is {shown(text)}, which mergekit reads as a model + LoRA: {_LORA}{hint}")
        return None
    return text and _at_revision(notes, *_split(text))


def _from_mapping(problems: Problems, notes: list[str], place: Place, value: dict[str, Any]) -> str | None:
    refused = {
        "lora": _LORA,
        "override_architecture": "architectures are not looked at here; leave it out",
    }
    model = problems.mapping(place, value, ("model",), refused).get("model")
    if not isinstance(model, dict):
        text = problems.word((*place, "model"), model)
        return text and _at_revision(notes, *_split(text))
    parts = problems.mapping((*place, "model"), model, ("path", "revision"))
    path = problems.word((*place, "model", "path"), parts.get("path"))
    revision = parts.get("revision")
    if revision is not None:
        revision = problems.word((*place, "model", "revision"), revision)
    return path and _at_revision(notes, path, revision)


def _split(text: str) -> tuple[str, str | None]:
    """Path and revision; what is there under its whole name is a path."""
    if text.count("@") != 1 or os.path.lexists(text):
        return text, None
    path, _, revision = text.partition("@")
    return path, revision


def _at_revision(notes: list[str], path: str, revision: str | None) -> str:
    if not revision:
        return path
    if os.path.exists(path):
        notes.append(f"{path} is a path, so its revision {shown(revision)} counts for nothing")
        return path
    return f"{path}@{revision}"
