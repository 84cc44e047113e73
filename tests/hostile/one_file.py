"""Faults of the one weight file `model.safetensors`, each with what the error must say."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.build import LFS, NAME, entry, weight_file


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
