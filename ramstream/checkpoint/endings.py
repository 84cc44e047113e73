"""What the names of a checkpoint's files say: which hold its weights, and which is the index of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

SAFETENSORS = ".safetensors"
TORCH = ".bin"
"""A PyTorch zip archive."""

_USUAL = {SAFETENSORS: "model", TORCH: "pytorch_model"}
"""How the weights of each format are called, the format that wins first."""

OTHER_WEIGHTS = (
    TORCH,
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".npz",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".mlmodel",
    ".distcp",
)
"""Weights and pickles that are not copied, nor downloaded where there are safetensors."""

NO_WEIGHTS = (
    *("adapter_model", "training_args", "optimizer", "scheduler", "scaler"),
    *("sampler", "dl_state_dict", "rng_state", "random_states"),
)
"""How the names of PyTorch files begin that lie beside a model's weights and are none."""


@dataclass(frozen=True)
class Candidates:
    """What a folder may mean by its weights, of one format."""

    ending: str
    indexes: list[str]
    weights: list[str]

    @property
    def usual_index(self) -> str:
        """The index that wins over others."""
        return f"{_USUAL[self.ending]}{self.ending}.index.json"


def candidates(names: Sequence[str]) -> Candidates:
    """The indexes and weight files among the names in a folder: of safetensors where it has any, else `.bin`."""
    for ending, usual in _USUAL.items():
        weights = [name for name in names if name.endswith(ending)]
        if ending == TORCH:
            weights = [name for name in weights if not name.startswith(NO_WEIGHTS)]
            weights = [name for name in weights if name.startswith(usual)] or weights
        indexes = [name for name in names if name.endswith(f"{ending}.index.json")]
        found = Candidates(ending, indexes, weights)
        if weights or indexes:
            break
    return found


def deciding_index(names: Sequence[str]) -> str | None:
    """The index that says which files are merged, of the names in a folder; None where none does."""
    found = candidates(names)
    if found.usual_index in found.indexes:
        return found.usual_index
    return found.indexes[0] if len(found.indexes) == 1 else None
