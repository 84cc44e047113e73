"""Faults of a header that aim at the reader: its memory, its time, its arithmetic, the user's terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.build import NAME, entry, index, weight_file

Make = Callable[[Path], object]


def _text(header: object, data: bytes = b"12345678") -> Make:
    return lambda folder: weight_file(folder / NAME, header, data)


def _shape(*shape: int, dtype: str = "U8", offsets: tuple[int, int] = (0, 8)) -> Make:
    return _text({"w": entry(dtype, list(shape), list(offsets))})


def _named(name: str) -> Make:
    return _text({name: entry("U8", [8], [0, 8])})


def _nested(opening: str, closing: str) -> Make:
    text = f'{{"w": {opening * 100_000}1{closing * 100_000}}}'
    return _text(text.encode())


def _block(size: int) -> Make:
    """A float8 weight with one scale, and a config that says how large its blocks are."""

    def make(folder: Path) -> None:
        config = {"quantization_config": {"weight_block_size": [size, size]}}
        (folder / "config.json").write_text(json.dumps(config))
        header = {
            "a.weight": entry("F8_E4M3", [2, 2], [0, 4]),
            "a.weight_scale": entry("F32", [1, 1], [4, 8]),
        }
        weight_file(folder / NAME, header, bytes(8))

    return make


HEADERS: dict[str, tuple[Make, str]] = {
    # scales
    "blocks of 999 digits": (_block(10**998), "weight_block_size is .1000.*, not two positive integers"),
    "blocks of 2^63": (_block(1 << 63), "weight_block_size is .*, not two positive integers"),
    # shapes and offsets
    "a million dimensions": (_shape(*[1] * 1_000_000), "w: shape has 1,000,000 dimensions, the limit is 64"),
    "65 dimensions": (_shape(*[1] * 64, 8), "w: shape has 65 dimensions"),
    "a million dimensions of 2^62": (_shape(*[1 << 62] * 1_000_000), "1,000,000 dimensions"),
    "product of 2^64": (_shape(1 << 32, 1 << 32, offsets=(0, 0)), r"more than 2\^63 elements"),
    "product of 2^63": (_shape(1 << 31, 1 << 32, offsets=(0, 0)), r"more than 2\^63 elements"),
    "bytes beyond 2^63": (_shape((1 << 62) + 1, dtype="F64"), "takes 36,893,488,147,419,103,240 bytes"),
    "bytes that wrap to 8": (_shape((1 << 61) + 1, dtype="F64"), "takes 18,446,744,073,709,551,624 bytes"),
    "offsets of 2^63": (_shape(8, offsets=(1 << 63, (1 << 63) + 8)), "data_offsets are"),
    "offsets of 2^64": (_shape(8, offsets=(1 << 64, (1 << 64) + 8)), "data_offsets are"),
    "offset of 999 digits": (_text({"w": entry("U8", [8], [0, 10**998])}), "data_offsets are"),
    "begin near 2^63": (_shape(8, offsets=((1 << 63) - 9, (1 << 63) - 1)), "truncated"),
    "minus zero": (_text(b'{"w":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b""), "header holds -0"),
    "minus zero as a fraction": (
        _text(b'{"w":{"dtype":"U8","shape":[-0.0],"data_offsets":[0,0]}}', b""),
        "shape is",
    ),
    # keys
    "a name twice, once as escapes": (_text(b'{"w": 1, "\\u0077": 2}'), "key w twice"),
    "a key twice deep down": (_text(b'{"__metadata__": {"a": "1", "a": "2"}}'), "key a twice"),
    "a key that nobody knows": (
        _text({"w": {**entry("U8", [8], [0, 8]), "strides": [1]}}),
        "w: the header says more of it than is known, strides",
    ),
    # names
    "name of 100,000 letters": (_named("x" * 100_000), "the name has 100,000 letters, the limit is 4,096"),
    "name with an escape sequence": (_named("w\x1b[2J"), r"'w\\x1b\[2J': the name holds control characters"),
    "name with a line break": (_named("w\nmodel.safetensors: all is well"), r"w\\nmodel.*control characters"),
    "name with a zero byte": (_named("w\0"), r"'w\\x00': the name holds control"),
    "name that reads backwards": (_named("w\u202ethgiew"), r"'w\\u202ethgiew': the name holds control"),
    "dtype with an escape sequence": (_text({"w": entry("F32\x1b[2J", [8], [0, 8])}), r"dtype is 'F32\\x1b"),
    "dtype of 100,000 letters": (_text({"w": entry("F" * 100_000, [8], [0, 8])}), "dtype is 'FFF.*…, not a"),
    # nesting
    "arrays 100,000 deep": (_nested("[", "]"), "nested too deeply"),
    "objects 100,000 deep": (_nested('{"a":', "}"), "nested too deeply"),
    "metadata 100,000 deep": (
        _text(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "nested too",
    ),
    # length
    "says 100,000,001 bytes": (
        lambda folder: (folder / NAME).write_bytes(
            (100_000_001).to_bytes(8, "little") + b'{"w":' + b" " * 99
        ),
        "header has 100,000,001 bytes, the limit is 100,000,000",
    ),
    "says 2^64 - 1 bytes": (
        lambda folder: (folder / NAME).write_bytes(b"\xff" * 8 + b'{"w":' + b" " * 99),
        "header has 18,446,744,073,709,551,615 bytes",
    ),
    "says 100,000,000 bytes and has 99": (
        lambda folder: (folder / NAME).write_bytes(
            (100_000_000).to_bytes(8, "little") + b'{"w":' + b" " * 94
        ),
        "header says it has 100,000,000 bytes, the file has 99",
    ),
    "a thousand faulty tensors": (
        _text({f"w{i}": entry("U8", [8], [8, 0]) for i in range(5000)}),
        "has 980 more problems",
    ),
}


# --- large ones: a header may have 100 MB, a description four million values ---


def _full(begin: str, piece: str, end: str, values: int = 0) -> Make:
    """A header of nearly 100 MB, or of so many values, made of one piece."""

    def make(folder: Path) -> None:
        times = values or (99_999_000 - len(begin) - len(end)) // len(piece.encode())
        weight_file(folder / NAME, (begin + piece * times + end).encode())

    return make


def honest(folder: Path, tensors: int = 500_000) -> None:
    """A whole file of that many tensors of one byte; its header has 50 MB."""
    parts = (
        f'"model.layers.{i % 60}.experts.{i}.w":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}'
        for i in range(tensors)
    )
    weight_file(folder / NAME, ("{" + ",".join(parts) + "}").encode(), bytes(tensors))


HUGE: dict[str, tuple[Make, str]] = {
    "100 MB of empty arrays": (
        _full('{"w":[', "[],", "0]}"),
        "JSON of 66,66.,... values, the limit is 4,000,000",
    ),
    "100 MB of empty objects": (_full('{"w":[', "{},", "0]}"), "JSON of 66,66.,... values"),
    "four million values": (_full('{"w":[', '{"":0.5},', "0]}", 1_999_990), "w: described by"),
    "four million names": (
        lambda folder: weight_file(
            folder / NAME, json.dumps(dict.fromkeys(map(str, range(3_999_990)), 0)).encode()
        ),
        "described by 0.*(.|\n)*has 980 more",
    ),
    "a text of 100 MB in wide letters": (
        _full('{"w":"\U0001f600', "a", '"}'),
        "w: described by '.U0001f600aaa",
    ),
    "a number of 100 MB": (_full('{"w":1', "0", "}"), "an integer of 99,99.,... digits"),
    "a fraction of 100 MB": (_full('{"w":0.', "1", "}"), r"w: described by 0\.111"),
    "100 MB of spaces": (_full('{"w":1', " ", "}"), "w: described by 1"),
    "four million numbers of metadata": (
        lambda folder: weight_file(
            folder / NAME, json.dumps({"__metadata__": dict.fromkeys(map(str, range(3_999_990)), 0)}).encode()
        ),
        "__metadata__: 0 is 0, not a string(.|\n)*has 980 more",
    ),
    "a thousand links to half a million tensors": (
        lambda folder: [honest(folder), links(folder)],
        "agent: holds more than 500,000 tensors; save it in fewer",
    ),
    "a thousand links to 90 MB of metadata": (
        lambda folder: [
            weight_file(
                folder / NAME, {"__metadata__": {"a": "b" * 90_000_000}, "w": entry("U8", [0], [0, 0])}
            ),
            links(folder),
        ],
        "agent/10.safetensors: is one file too many: headers of 200,000,000 bytes are read for one checkpoint",
    ),
    "a thousand links to 90 MB that are no description": (
        lambda folder: [weight_file(folder / NAME, b"{" + b" " * 90_000_000), links(folder)],
        "agent/10.safetensors: is one file too many",
    ),
}
"""Faults of a header of nearly 100 MB."""


def links(folder: Path, shards: int = 1000) -> None:
    """An index of so many shards, all of them the one file that is there."""
    names = [f"{i}.safetensors" for i in range(shards)]
    for name in names:
        (folder / name).symlink_to(NAME)
    index(folder, {f"w{name}": name for name in names})


def million_names(folder: Path, file: Callable[[int], str] = lambda i: "a.safetensors") -> None:
    """An index of a million names, and where each lies."""
    weight_map: dict[str, Any] = {f"model.layers.{i}.weight": file(i) for i in range(1_000_000)}
    (folder / f"{NAME}.index.json").write_text(json.dumps({"weight_map": weight_map}))
