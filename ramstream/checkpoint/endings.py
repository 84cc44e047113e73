"""What the names of a checkpoint's files say: which is the index, and which hold weights we do not merge."""

INDEX = "model.safetensors.index.json"
INDEX_SUFFIX = ".safetensors.index.json"

OTHER_WEIGHTS = (
    ".bin",
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
"""Weights and pickles of other formats: neither downloaded nor copied."""


def deciding_index(names: list[str]) -> str | None:
    """The index that says which files are merged, of the names in a folder; None where none does."""
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if INDEX in indexes:
        return INDEX
    return indexes[0] if len(indexes) == 1 else None
