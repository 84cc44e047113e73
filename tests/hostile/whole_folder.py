"""Faults of a whole folder: its index, what lies in it, what it says it is; each with what the error must say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hostile.build import INDEX, LFS, NAME, entry, good, index, shards, weight_file


def _write(**files: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name, data in files.items():
            (folder / name.replace("__", ".")).write_bytes(data)

    return make


def _adapter_by_index(folder: Path) -> None:
    good(folder / "adapter_model.safetensors")
    index(folder, {"w": "adapter_model.safetensors"})


def _missing_shards(folder: Path) -> None:
    good(folder / "a.safetensors")
    index(folder, {"w": "a.safetensors", "x": "b.safetensors", "y": "c.safetensors"})


def _unfinished_shard(folder: Path) -> None:
    (folder / "b.safetensors.incomplete").write_bytes(b"..")
    index(folder, {"x": "b.safetensors"})


def _dangling_shard(folder: Path) -> None:
    os.symlink("../blobs/0123", folder / "b.safetensors")
    index(folder, {"x": "b.safetensors"})


def _changed_map(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        files = {"a.safetensors": {"x": b"12", "y": b"3"}, "b.safetensors": {"z": b"4"}}
        weight_map = shards(folder, files)
        change(weight_map)
        index(folder, weight_map)

    return make


def _shard_name(name: object) -> Callable[[Path], None]:
    return lambda folder: index(folder, {"w": name})


def _several(folder: Path) -> None:
    good(folder / "one.safetensors")
    good(folder / "two.safetensors")


def _two_indexes(folder: Path) -> None:
    good(folder / "one.safetensors")
    for name in ("one", "two"):
        index(folder, {"w": "one.safetensors"}, f"{name}.safetensors.index.json")


def _twice(folder: Path) -> None:
    shards(folder, {"a.safetensors": {"x": b"1", "w": b"2"}, "b.safetensors": {"w": b"3"}})


def _names(**names: str) -> Callable[[Path], None]:
    """Tensors of eight bytes; `name=dtype`, with `__` for a dot."""

    def make(folder: Path) -> None:
        header = {
            name.replace("__", "."): entry(dtype, [8], [8 * i, 8 * i + 8])
            for i, (name, dtype) in enumerate(names.items())
        }
        weight_file(folder / NAME, header, bytes(8 * len(header)))

    return make


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / NAME)


def _folder_of_that_name(folder: Path) -> None:
    (folder / NAME).mkdir()


def _weights_below(folder: Path) -> None:
    (folder / "checkpoint-100").mkdir()
    good(folder / "checkpoint-100" / NAME)


def _pytorch_below(folder: Path) -> None:
    (folder / "step-5").mkdir()
    (folder / "step-5" / "pytorch_model.bin").write_bytes(b"PK")


def _with_config(data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        good(folder / NAME)
        (folder / "config.json").write_bytes(data)

    return make


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    # no weights to read
    "empty folder": (_write(), "no safetensors weights: holds nothing"),
    "only a config": (_write(config__json=b"{}"), "holds config.json; give the folder"),
    "two pytorch files": (
        _write(pytorch_model__bin=b"", **{"pytorch_model.fp16.bin": b""}),
        r"2 bin files and no pytorch_model.bin.index.json .*pytorch_model.bin, pytorch_model.fp16.bin; add the",
    ),
    "two pytorch files of other names": (_write(a__bin=b"", b__bin=b""), "2 bin files and no .*a.bin, b.bin"),
    "two pytorch indexes": (
        _write(**{"a.bin.index.json": b"", "b.bin.index.json": b""}),
        "several indexes, none named pytorch_model.bin.index.json",
    ),
    "only a trainer's state": (
        _write(training_args__bin=b"", optimizer__bin=b"", rng_state_0__bin=b""),
        r"no safetensors weights: holds what PyTorch keeps .*optimizer.bin, rng_state_0.bin, training_args.bin",
    ),
    "pickles": (_write(model__pt=b"", consolidated__00__pth=b""), "state dict as pytorch_model.bin"),
    "pytorch weights below": (_pytorch_below, "holds no weights itself, but its subfolders do: step-5"),
    "pytorch shard missing": (
        lambda folder: index(folder, {"w": "pytorch_model-1.bin"}, "pytorch_model.bin.index.json"),
        "pytorch_model-1.bin: is missing, pytorch_model.bin.index.json lists it",
    ),
    "gguf folder": (_write(model__gguf=b"GGUF"), "GGUF"),
    "adapter": (
        _write(adapter_config__json=b"{}", adapter_model__safetensors=b""),
        "adapter_model.safetensors: is empty",
    ),
    "one shard of two": (
        _write(**{"model-00001-of-00002__safetensors": b""}),
        "one shard of 2, and no model.safetensors.index.json",
    ),
    "index of an adapter without its config": (
        _adapter_by_index,
        "holds adapter_model.safetensors without its adapter_config.json",
    ),
    "adapter without its config": (
        _write(adapter_model__safetensors=b""),
        "holds adapter_model.safetensors without its adapter_config.json",
    ),
    "adapter of pytorch": (
        _write(adapter_config__json=b"{}", adapter_model__bin=b"PK"),
        r"LoRA adapter without adapter_model.safetensors;.*\(adapter_config.json, adapter_model.bin\)$",
    ),
    "unfinished download": (_write(**{"model.safetensors.incomplete": b""}), "unfinished download"),
    "weights in a subfolder": (_weights_below, "subfolders do: checkpoint-100"),
    "several files and no index": (
        _several,
        r"2 safetensors files and no .*one.safetensors, two.safetensors",
    ),
    "two indexes": (_two_indexes, "several indexes"),
    "weights are a pipe": (_pipe, "not a regular file"),
    "weights are a folder": (_folder_of_that_name, "not a regular file"),
    "no tensors": (lambda folder: weight_file(folder / NAME, {}) and None, "holds no tensors"),
    # the index
    "missing shards": (_missing_shards, r"b.safetensors: is missing(.|\n)*c.safetensors: is missing"),
    "unfinished shard": (_unfinished_shard, "b.safetensors.incomplete is there"),
    "dangling shard": (
        _dangling_shard,
        "link to ../blobs/0123, which does not exist; the download is incomplete",
    ),
    "index is an LFS pointer": (_write(**{INDEX: LFS}), "git lfs pull"),
    "index is no JSON": (_write(**{INDEX: b"{..."}), "not valid JSON"),
    "index is a list": (_write(**{INDEX: b"[]"}), "array, not an object"),
    "index without a map": (_write(**{INDEX: b"{}"}), "weight_map is None"),
    "index maps to a number": (_shard_name(3), "weight_map names no file for w"),
    "index is empty": (lambda folder: index(folder, {}), "weight_map is {}"),
    "index names a tensor the shard lacks": (
        _changed_map(lambda m: m.update(q="a.safetensors")),
        "lacks.*: q;",
    ),
    "shard holds a tensor the index does not name": (_changed_map(lambda m: m.pop("y")), "does not name: y;"),
    "tensor lies in another shard": (
        _changed_map(lambda m: m.update(y="b.safetensors")),
        "in another shard: y;",
    ),
    "tensor in two shards": (_twice, "another shard holds too: w;"),
    "shard outside": (_shard_name("../x.safetensors"), "not a plain name"),
    "shard outside, hidden": (_shard_name("a/../../x.safetensors"), "not a plain name"),
    "shard absolute": (_shard_name("/etc/passwd"), "not a plain name"),
    "shard with backslashes": (_shard_name("..\\x.safetensors"), "not a plain name"),
    "shard name empty": (_shard_name(""), "not a plain name"),
    "shard name is the folder": (_shard_name("."), "not a plain name"),
    "shard name ends in a slash": (_shard_name("a/"), "not a plain name"),
    "shard name holds a zero byte": (_shard_name("a\0b"), "not a plain name"),
    "shard name of 300 letters": (_shard_name("a" * 300), "missing"),
    "shard name is half a surrogate": (_shard_name("\ud800"), "not a plain name"),
    # what must not be averaged
    "gptq": (_names(a__qweight="U8", a__qzeros="U8"), "GPTQ or AWQ.*cannot be averaged"),
    "compressed-tensors": (_names(a__weight_packed="U8"), "compressed-tensors"),
    "bitsandbytes": (_names(a__weight="U8", **{"a.weight.absmax": "U8"}), "bitsandbytes 4-bit"),
    "mxfp4": (_names(down_blocks="U8", down_scales="U8"), "MXFP4"),
    "float8 with scales of bytes": (
        _names(a__weight="F8_E4M3", a__weight_scale_inv="U8"),
        "scale of dtype U8",
    ),
    "float8 with a scale": (_names(a__weight="F8_E4M3", a__scale="U8"), "scale of dtype U8"),
    "adapter by its names": (_names(**{"base_model.model.a.lora_A.weight": "U8"}), "LoRA adapter"),
    # config.json
    "config is no JSON": (_with_config(b"{,}"), "config.json: is not valid JSON"),
    "config is a list": (_with_config(b"[]"), "config.json: is a JSON array"),
    "config is an LFS pointer": (_with_config(LFS), "config.json: is a Git LFS pointer"),
}
