"""Damage by rule: from a good JSON text, pickle, zip archive or any bytes, and a random generator, a bad one.

A few changes at a time, so that most of a file stays as it was and the reader gets far.
"""

from __future__ import annotations

import json
import math
import pickletools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


class Pairs(list[list[Any]]):
    """A JSON object as [key, value] lists, so that a key may occur twice."""


@dataclass(frozen=True)
class Raw:
    """A JSON text as it stands, which Python's values cannot spell."""

    text: str


_DEEP = Raw("[" * 10_000 + "]" * 10_000)
_DEEP_OBJECT = Raw('{"a":' * 10_000 + "1" + "}" * 10_000)

NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 24, 64, 128, 255, 256, 65536, -1, -2, -(1 << 63)),
    *((1 << k) + d for k in (15, 31, 32, 40, 53, 62, 63, 64, 70) for d in (-1, 0, 1)),
    *(10**999, 10**308, 10**309, 0.0, 0.5, 1.0, 2.0, -0.0, 1e300, 1e-300, 1e16),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 1001, "9" * 5000, "1.0e5", "00", "+1")),
)
NAMES: tuple[Any, ...] = (
    *("", ".", "..", "a", "w", "a.weight", "__metadata__", "weight", "x" * 300, "x" * 100_000, "a\0b"),
    *(
        "\x1b[2J",
        "a\nb",
        "\u202eabc",
        "é",
        "\U0001f600",
        "\ud800",
        "a b",
        "a=b",
        "0",
        "1.5",
        "*",
        "[",
        "(a+)+$",
    ),
    *(
        "dtype",
        "shape",
        "data_offsets",
        "weight_map",
        "text_config",
        "quantization_config",
        "use_x",
        "x_config",
    ),
    *("model.safetensors", "config.json", "tokenizer.json", "F32", "BF16", "F8_E4M3", "I64", "F99", "true"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [0], [0, 0], [1, 2], [4, 3], {"a": 1}, [None], [-1], [True], [1.5]),
    *(_DEEP, _DEEP_OBJECT, Raw('{"a":1,"a":2}'), Raw('"\\ud800"'), Raw('"\\u0000"'), Raw("'a'"), Raw("")),
    *([1] * 100, [1] * 10_000, [2] * 100, [1 << 40, 1 << 40], [0, 1 << 62, 1 << 62], [1 << 63]),
)


def parsed(text: bytes) -> Any:
    """A JSON text as lists, `Pairs` and leaves, to be changed in place."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([key, value] for key, value in pairs))


def dumped(tree: Any) -> bytes:
    """The text of a tree, lone surrogates as escapes."""
    parts: list[str] = []
    _dump(tree, parts)
    return "".join(parts).encode()


def _dump(tree: Any, parts: list[str]) -> None:
    if isinstance(tree, Raw):
        parts.append(tree.text)
    elif isinstance(tree, (Pairs, dict)):
        parts.append("{")
        for i, (key, value) in enumerate(tree if isinstance(tree, Pairs) else tree.items()):
            parts.append("," if i else "")
            _dump(key, parts)
            parts.append(":")
            _dump(value, parts)
        parts.append("}")
    elif isinstance(tree, list):
        parts.append("[")
        for i, value in enumerate(tree):
            parts.append("," if i else "")
            _dump(value, parts)
        parts.append("]")
    elif isinstance(tree, int) and not isinstance(tree, bool):
        parts.append(str(tree))
    else:
        parts.append(json.dumps(tree))


def json_text(rng: Random, text: bytes, names: Sequence[Any] = ()) -> bytes:
    """A JSON text with up to four places of its tree changed, at times its bytes too. `names` are more strings."""
    holder = [parsed(text)]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        slots: list[tuple[list[Any], int]] = []
        _slots(holder, slots)
        _change(rng, *rng.choice(slots[1:] or slots), slots, (*NAMES, *names, *names, *names))
    data = dumped(holder[0] if holder else None)
    return some_bytes(rng, data) if rng.random() < 0.1 else data


def _slots(node: Any, found: list[tuple[list[Any], int]]) -> None:
    """Every place of the tree: a list, or a [key, value] of an object, and an index in it."""
    if isinstance(node, Pairs):
        for pair in node:
            found.append((pair, 0))
            found.append((pair, 1))
            _slots(pair[1], found)
    elif isinstance(node, list):
        for i, value in enumerate(node):
            found.append((node, i))
            _slots(value, found)


def _change(
    rng: Random, node: list[Any], i: int, slots: list[tuple[list[Any], int]], names: Sequence[Any]
) -> None:
    """Change one place: a key, or a value by its kind, one of another kind, or one from elsewhere."""
    value = node[i]
    other_node, j = rng.choice(slots)
    if isinstance(value, str) and rng.random() < 0.7:
        node[i] = rng.choice(names)
        return
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        node[i] = value + rng.choice((-1, 1, -value, value, 7)) if rng.random() < 0.6 else rng.choice(NUMBERS)
        return
    if isinstance(value, list) and rng.random() < 0.6:
        _reshape(rng, value, names)
        return
    new = (rng.choice(NUMBERS), rng.choice(VALUES), rng.choice(VALUES), rng.choice(names), other_node[j])
    node[i] = _fresh(rng.choice(new))
    if _holds(node[i], node):
        node[i] = None


def _reshape(rng: Random, value: list[Any], names: Sequence[Any]) -> None:
    """Take something out of a list or object, put something in, repeat or turn it around."""
    act = rng.randrange(5)
    if act == 0 and value:
        del value[rng.randrange(len(value))]
    elif act == 1 and value:
        value.append(value[rng.randrange(len(value))])
    elif act == 2:
        value.reverse()
    elif act == 3 and isinstance(value, Pairs) and value:
        value.append([rng.choice(value)[0], _fresh(rng.choice(VALUES))])
    else:
        new = _fresh(rng.choice((*NUMBERS, *VALUES)))
        value.insert(
            rng.randint(0, len(value)), [rng.choice(names), new] if isinstance(value, Pairs) else new
        )


def _fresh(value: Any) -> Any:
    """A value that may be changed in place without changing the tables here."""
    return type(value)(map(_fresh, value)) if isinstance(value, list) else value


def _holds(tree: Any, node: list[Any]) -> bool:
    """Whether a tree holds a node, which must not hold it in turn."""
    return tree is node or (isinstance(tree, list) and any(_holds(part, node) for part in tree))


def some_bytes(rng: Random, data: bytes, among: slice = slice(None)) -> bytes:
    """Bytes with a few flipped, cut off, put in, repeated or moved; those of the slice `among` the most."""
    result = bytearray(data)
    places = range(len(data))[among] or range(len(data))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.choice(places) if places and rng.random() < 0.8 else rng.randint(0, len(result))
        to = min(at + rng.choice((1, 2, 4, 8, 30)), len(result))
        act = rng.randrange(8)
        if act <= 2 and at < len(result):
            result[at] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256), result[at] ^ 1 << rng.randrange(8))
            )
        elif act == 3:
            del result[at:to]
        elif act == 4:
            result[at:at] = rng.choice((b"\0", b"\xff" * 8, b"PK\x01\x02", b"{", b'"', rng.randbytes(4)))
        elif act == 5:
            result[at:at] = result[at:to]
        elif act == 6:
            result[at:to] = rng.choice(PACKED)[: to - at]
        elif rng.random() < 0.5:
            del result[at:]
        else:
            result += rng.choice((b"\0", b" ", rng.randbytes(9), bytes(result[:at])))
    return bytes(result)


PACKED = tuple((n & (1 << 64) - 1).to_bytes(8, "little") for n in NUMBERS if type(n) is int and n < 1 << 64)


# --- safetensors ---

_DTYPES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "C64": 8,
    "F99": 3,
}
_DTYPES |= dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"), 1)


def other_tensors(rng: Random, data: bytes) -> bytes:
    """A whole safetensors file, a few tensors renamed, of another dtype or shape, added or reordered."""
    start = 8 + int.from_bytes(data[:8], "little")
    entries = [[name, e["dtype"], e["shape"]] for name, e in json.loads(data[8:start]).items()]
    for _ in range(rng.choice((1, 1, 2, 3))):
        entry = rng.choice(entries)
        act = rng.randrange(7)
        if act <= 1:
            entry[1] = rng.choice(list(_DTYPES))
        elif act == 2:
            entry[2] = rng.choice(
                (entry[2][::-1], entry[2][1:], [*entry[2], 1], [1] * 20, [2, 3, 2], [0, 1 << 62])
            )
        elif act == 3:
            entry[2] = [n + rng.choice((-1, 0, 1, 2)) if n else n for n in entry[2]]
        elif act == 4:
            entry[0] = rng.choice((*_ENDINGS, rng.choice(NAMES), entry[0] + rng.choice(_ENDINGS)))
        elif act == 5:
            entries.append([entry[0] + rng.choice(_ENDINGS), entry[1], list(entry[2])])
        else:
            rng.shuffle(entries)
    header, end = Pairs(), 0
    for name, dtype, shape in entries:
        begin, end = end, end + math.prod(shape) * _DTYPES.get(dtype, 1)
        header.append([name, {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}])
    text, size = dumped(header), min(end, 100_000)
    content = (data[start:] * (1 + size // max(len(data) - start, 1)))[:size]
    return len(text).to_bytes(8, "little") + text + content


_ENDINGS = (
    *(
        ".weight",
        ".weight_scale",
        ".weight_scale_inv",
        ".scale",
        "_scale",
        ".lora_A.weight",
        ".lora_B.weight",
    ),
    *(
        ".lora_A.default.weight",
        ".modules_to_save.x.weight",
        ".base_layer.weight",
        ".qweight",
        "_blocks",
        "_scales",
    ),
    *(
        "lm_head.weight",
        "model.embed_tokens.weight",
        "base_model.model.x",
        ".lora_embedding_A",
        ".input_scale",
    ),
)


# --- pickles ---

_OPCODES = (
    *(
        b"(",
        b")",
        b"}",
        b"]",
        b"N",
        b"\x88",
        b"t",
        b"l",
        b"d",
        b"u",
        b"s",
        b"a",
        b"e",
        b"b",
        b"R",
        b"Q",
        b"0",
    ),
    *(
        b"1",
        b"2",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x81",
        b"\x92",
        b"\x93",
        b"\x94",
        b"\x8f",
        b"\x90",
        b"o",
        b".",
    ),
    *(b"h\x00", b"h\x03", b"q\x00", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"g9\n", b"p9\n", b"P0\n"),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nSize\n", b"ctorch\nFloatStorage\n", b"\x82\x01"),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nfloat32\n",
        b"ios\nx\n",
    ),
    *(b"K\x00", b"K\xff", b"J\xff\xff\xff\xff", b"M\xff\xff", b"I-1\n", b"I" + b"9" * 5000 + b"\n", b"I01\n"),
    *(b"\x8a\x08" + n for n in PACKED),
    *(
        b"\x8a\xff" + b"\x7f" * 255,
        b"\x8b\xff\xff\xff\x7f",
        b"L" + b"9" * 400 + b"L\n",
        b"Fnan\n",
        b"G" + b"\x7f" * 8,
    ),
    *(
        b"X\x01\x00\x00\x000",
        b"X\xff\xff\xff\xff",
        b"X\x03\x00\x00\x00\xed\xa0\x80",
        b"V\\ud800\n",
        b"S'a\\x1b'\n",
    ),
    *(
        b"\x8c\x04\x1b[2J",
        b"C\x02\xff\xff",
        b"\x95" + b"\xff" * 8,
        b"\x80\x05",
        b"\x80\xff",
        b"\x96" + bytes(8),
    ),
)


def instructions(data: bytes) -> list[bytes]:
    """A pickle cut into its instructions."""
    at = [position for _, _, position in pickletools.genops(data)]
    return [data[begin:end] for begin, end in zip(at, [*at[1:], len(data)], strict=True)]


def a_pickle(rng: Random, program: Sequence[bytes], other: Sequence[bytes]) -> bytes:
    """A pickle with a few instructions changed, put in, left out, repeated, or taken from another."""
    result = list(program)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        at = rng.randrange(len(result)) if result else 0
        act = rng.randrange(12)
        if act <= 4:
            _replace(rng, result)
        elif act == 5:
            result[at : at + 1] = [rng.choice(_OPCODES)]
        elif act == 6:
            result.insert(at, rng.choice(_OPCODES))
        elif act == 7:
            del result[at : at + rng.choice((1, 1, 2, 5))]
        elif act == 8:
            result[at:at] = result[at : at + rng.choice((1, 2, 8))] * rng.choice((1, 1, 2, 50))
        elif act == 9:
            begin = rng.randrange(len(other))
            result[at:at] = other[begin : begin + rng.choice((1, 4, 20))]
        elif act == 10 and result:
            result[at] = some_bytes(rng, result[at])
        else:
            _replace(rng, result, among=result)
    return b"".join(result)


_KINDS = (b"KMJ\x8a", b"X\x8c", b"hj", b"c", b"\x85\x86\x87t)", b"\x88\x89N")
"""Instructions that may stand for one another: numbers, texts, memories, names, tuples, constants."""


def _replace(rng: Random, result: list[bytes], among: Sequence[bytes] = ()) -> None:
    """Another instruction of the same kind, so that the pickle stays whole: of the tables here, or of `among`."""
    kind = rng.choice(_KINDS)
    places = [i for i, instruction in enumerate(result) if instruction[:1] in kind]
    usual = [b"K" + bytes([rng.randrange(8)]), *_OPCODES, b"X\x05\x00\x00\x00w\x1b[2J", b"X\x01\x00\x00\x001"]
    others = [instruction for instruction in among or usual if instruction[:1] in kind]
    if places and others:
        result[rng.choice(places)] = rng.choice(others)


# --- zip archives: PKWARE's APPNOTE, 4.3 ---


@dataclass
class Record:
    """A header of a zip file: its numbers, and the bytes that follow it."""

    layout: str
    numbers: list[int]
    tail: bytes

    @property
    def data(self) -> bytes:
        """The record as a file holds it, numbers cut to what fits."""
        sizes = [struct.calcsize(f"<{kind}") for kind in self.layout]
        heads = (n & (1 << 8 * size) - 1 for n, size in zip(self.numbers, sizes, strict=True))
        return struct.pack("<" + self.layout, *heads) + self.tail


_LOCAL, _CENTRAL, _END = "LHHHHHLLLHH", "LHHHHHHLLLHHHHHLL", "LHHHHLLH"
_END64, _LOCATOR = "LQHHLLQQQQ", "LLQL"


def packed(members: Sequence[tuple[str, bytes]], wide: bool = False) -> list[Record]:
    """The records of a zip file of stored members; `wide` with the 64-bit end that torch writes for large ones."""
    records, directory, at = [], [], 0
    for name, content in members:
        coded, sizes = name.encode(), [0, len(content), len(content)]
        local = Record(_LOCAL, [0x04034B50, 20, 0, 0, 0, 0x21, *sizes, len(coded), 0], coded + content)
        central = [0x02014B50, 20, 20, 0, 0, 0, 0x21, *sizes, len(coded), 0, 0, 0, 0, 0, at]
        records.append(local)
        directory.append(Record(_CENTRAL, central, coded))
        at += len(local.data)
    size, count = sum(len(record.data) for record in directory), len(members)
    ends = [Record(_END, [0x06054B50, 0, 0, count, count, size, at, 0], b"")]
    if wide:
        end64 = Record(_END64, [0x06064B50, 44, 45, 45, 0, 0, count, count, size, at], b"")
        ends = [end64, Record(_LOCATOR, [0x07064B50, 0, at + size, 1], b""), *ends]
    return [*records, *directory, *ends]


def an_archive(rng: Random, records: Sequence[Record]) -> bytes:
    """A zip file with a few numbers of its headers changed, headers left out, repeated or swapped."""
    result = [Record(r.layout, list(r.numbers), r.tail) for r in records]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        at = rng.randrange(len(result)) if result and rng.random() < 0.7 else max(len(result) - 1, 0)
        act = rng.randrange(10)
        if not result:
            break
        if act <= 5:
            numbers = result[at].numbers
            k = rng.randrange(len(numbers))
            numbers[k] = numbers[k] + rng.choice((-1, 1, 8)) if rng.random() < 0.4 else _whole(rng)
        elif act == 6:
            result[at].tail = some_bytes(rng, result[at].tail or b"ab")
        elif act == 7:
            del result[at]
        elif act == 8:
            result.insert(
                rng.randrange(len(result)),
                Record(result[at].layout, list(result[at].numbers), result[at].tail),
            )
        else:
            other = rng.randrange(len(result))
            result[at], result[other] = result[other], result[at]
    data = b"".join(record.data for record in result)
    return some_bytes(rng, data) if rng.random() < 0.2 else data


def _whole(rng: Random) -> int:
    number: int = rng.choice(_WHOLE)
    return number


_WHOLE = tuple(n for n in NUMBERS if type(n) is int and abs(n) < 1 << 65)

Mutator = Callable[[Random], bytes]
