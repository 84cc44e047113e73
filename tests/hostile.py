"""Faulty checkpoints: each generator writes one into a folder; the table says what the error must name."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"

Entry = tuple[str, list[int], list[int]]


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


def _header(header: object, data: bytes = b"12345678") -> Callable[[Path], None]:
    return lambda folder: weight_file(folder / NAME, header, data) and None


def _one(dtype: Any, shape: Any, offsets: Any) -> Callable[[Path], None]:
    return _header({"w": entry(dtype, shape, offsets)})


def _content(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / NAME).write_bytes(data) and None


def _two(first: list[int], second: list[int], data: bytes = b"12345678") -> Callable[[Path], None]:
    sizes = [first[1] - first[0], second[1] - second[0]]
    return _header({"a": entry("U8", [sizes[0]], first), "b": entry("U8", [sizes[1]], second)}, data)


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return stream.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    # the first bytes
    "empty": (_content(b""), "is empty; download it again"),
    "five bytes": (_content(b"abcde"), "has 5 bytes.*truncated"),
    "only a length": (_content((100).to_bytes(8, "little")), "has 8 bytes.*truncated"),
    "zeros": (_content(bytes(4096)), "begins with zeros"),
    "noise": (_content(b"\xfe" * 64), r"no safetensors file.*18,374,403,900,871,474,942 bytes"),
    "header of 2 GB": (_content((2 << 30).to_bytes(8, "little") + b"{}"), "limit is 100,000,000"),
    "header longer than the file": (
        _content((500).to_bytes(8, "little") + b"{    "),
        "500 bytes, the file has 5",
    ),
    "truncated header that begins like a pickle": (
        _content(b"\x80\x02" + bytes(6) + b"{}"),
        "640 bytes.*truncated",
    ),
    "git lfs pointer": (_content(LFS), "Git LFS pointer.*git lfs pull"),
    "html page": (_content(b"\n<!DOCTYPE html><html>..."), "web page.*download it again"),
    "xml reply": (_content(b'<?xml version="1.0"?><Error><Code>AccessDenied'), "error reply"),
    "json reply": (_content(b'{"error": "Invalid credentials"}'), "JSON text"),
    "zip": (_content(_zip()), "zip archive.*name it .bin, or convert"),
    "pickle": (_content(pickle.dumps({"a": [1.5] * 9}, protocol=2)), "pickle.*torch 1.6 or newer.*convert"),
    "newer pickle": (_content(pickle.dumps({"a": [1.5] * 9}, protocol=5)), "pickle.*convert"),
    "gguf": (_content(b"GGUF\x03\x00\x00\x00" + bytes(32)), "GGUF.*cannot be averaged"),
    "tar": (_content(b"pickle".ljust(257, b"\0") + b"ustar\0" + bytes(300)), "tar archive"),
    "hdf5": (_content(b"\x89HDF\r\n\x1a\n" + bytes(32)), "HDF5"),
    # the header's text
    "header is no JSON": (_header(b'{"w": oops}'), "not valid JSON"),
    "header is not UTF-8": (_header(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "header is an array": (_header(b"[1, 2, 3]  "), "no JSON object"),
    "header ends in zeros": (_header(b"{}\0\0"), "not valid JSON"),
    "deep nesting": (_header(b'{"w":' * 100_000), "nested too deeply"),
    "deep array": (_header(b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "name twice": (_header(b'{"w": 1, "w": 2}'), "key w twice"),
    "key twice": (_header(b'{"w": {"dtype": "U8", "dtype": "I8"}}'), "key dtype twice"),
    "NaN size": (_header(b'{"w": {"dtype":"U8","shape":[NaN],"data_offsets":[0,8]}}'), "holds NaN"),
    "integer of 5000 digits": (
        _header(b'{"w": {"dtype":"U8","shape":[' + b"9" * 5000 + b"]}}"),
        "5,000 digits",
    ),
    "metadata is a list": (_header({"__metadata__": [1], "w": entry("U8", [8], [0, 8])}), "__metadata__ is"),
    "metadata holds a number": (
        _header({"__metadata__": {"a": 1}, "w": entry("U8", [8], [0, 8])}),
        "a is 1, not a",
    ),
    # an entry
    "entry is a number": (_header({"w": 3}), "w: described by 3"),
    "entry is null": (_header({"w": None}), "w: described by None"),
    "entry is empty": (_header({"w": {}}), "lacks its dtype, shape, data_offsets"),
    "dtype is a number": (_one(16, [8], [0, 8]), "dtype is 16"),
    "dtype is empty": (_one("", [8], [0, 8]), "dtype is ''"),
    "shape is a number": (_one("U8", 8, [0, 8]), "shape is 8"),
    "shape is negative": (_one("U8", [-8], [0, 8]), r"shape is \[-8\]"),
    "shape is a fraction": (_one("U8", [8.0], [0, 8]), r"shape is \[8.0\]"),
    "shape is a boolean": (_one("U8", [8, True], [0, 8]), r"shape is \[8, True\]"),
    "shape is text": (_one("U8", ["8"], [0, 8]), "shape is"),
    "shape overflows 64 bits": (_one("U8", [1 << 40, 1 << 40], [0, 8]), r"more than 2\^63 elements"),
    "extent above 64 bits": (_one("U8", [1 << 70], [0, 8]), "shape is"),
    "one offset": (_one("U8", [8], [8]), "data_offsets are"),
    "three offsets": (_one("U8", [8], [0, 4, 8]), "data_offsets are"),
    "offsets backwards": (_one("U8", [8], [8, 0]), "data_offsets are"),
    "offset negative": (_one("U8", [8], [-1, 7]), "data_offsets are"),
    "offset a boolean": (_one("U8", [8], [False, 8]), "data_offsets are"),
    "shape disagrees with bytes": (_one("F32", [3], [0, 8]), "takes 12 bytes, its data_offsets span 8"),
    "half a surrogate in the name": (
        _header(b'{"\\ud800": {"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'),
        "Unicode",
    ),
    # the layout
    "overlap": (_two([0, 5], [4, 8]), "b overlaps a by 1 bytes"),
    "inside one another": (_two([0, 8], [2, 4]), "b overlaps a by 6 bytes"),
    "hole": (_two([0, 4], [5, 8]), "hole of 1 bytes lies between a and b"),
    "hole at the start": (_two([1, 4], [4, 8]), "hole of 1 bytes lies between the header and a"),
    "truncated data": (
        _two([0, 4], [4, 12]),
        "header says 12 bytes of data, the file has 8; it is truncated",
    ),
    "longer than it says": (
        _two([0, 4], [4, 6]),
        "header says 6 bytes of data, the file has 8; something was appended",
    ),
    "no tensors but data": (_header({}), "header says 0 bytes of data, the file has 8"),
    "offsets near 2^63": (_one("U8", [(1 << 63) - 1], [0, (1 << 63) - 1]), "truncated"),
}
"""Faults of the one weight file `model.safetensors`."""


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
"""Faults of a whole folder."""
