"""Checkpoints by hand, whole or not: what the generators of faults are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def entry(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def weight_file(path: Path, header: object, data: bytes = b"", pad: int = 0) -> Path:
    """A safetensors file by hand: `header` is bytes, or an object that becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def good(path: Path, names: Mapping[str, bytes] | None = None, dtype: str = "U8") -> Path:
    """A valid file of one-dimensional tensors, their bytes end to end."""
    header, data = {}, b""
    for name, content in (names or {"w": b"12345678"}).items():
        header[name] = entry(dtype, [len(content)], [len(data), len(data) + len(content)])
        data += content
    return weight_file(path, header, data)


def index(folder: Path, weight_map: object, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shards(folder: Path, files: Mapping[str, Mapping[str, bytes]]) -> dict[str, str]:
    """Valid shards and their index; gives the weight_map back."""
    for file, tensors in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        good(folder / file, tensors)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index(folder, weight_map)
    return weight_map
