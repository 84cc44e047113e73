"""Zip files and pickles that unfold, overlap, lie about places and sizes, or name what they should not."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hostile.build import index
from hostile.mutated import Record, packed

Make = Callable[[Path], object]
BIN = "pytorch_model.bin"
EMPTY = b"\x80\x02}."
"""A pickle of an empty dict."""

_LOCAL, _CENTRAL, _END = 0x04034B50, 0x02014B50, 0x06054B50
_SIZES, _NAME, _EXTERNAL, _OFFSET = slice(8, 10), 10, 15, 16
"""Places of numbers in an entry of the directory."""


def write(folder: Path, records: Sequence[Record], hole: int = 0) -> None:
    """A zip file; `hole` zeros that take no room stand after its first record."""
    with (folder / BIN).open("wb") as stream:
        stream.write(records[0].data)
        stream.seek(hole, 1)
        stream.write(b"".join(record.data for record in records[1:]))


def _of(*members: tuple[str, bytes]) -> list[Record]:
    return packed([("a/data.pkl", EMPTY), *members])


def _members(*members: tuple[str, bytes]) -> Make:
    return lambda folder: write(folder, _of(*members))


def _entry(records: list[Record], which: int) -> Record:
    """An entry of the directory."""
    return [record for record in records if record.numbers[0] == _CENTRAL][which]


def _bomb(folder: Path) -> None:
    """A thousand times as many zeros as it has bytes."""
    with zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", EMPTY)
        with archive.open("a/data/0", "w", force_zip64=True) as stream:
            for _ in range(8):
                stream.write(bytes(1 << 24))


def _overlapping(folder: Path) -> None:
    """One kernel that a thousand entries of the directory share (D. Fifield, *A better zip bomb*, 2019)."""
    records = _of(*((f"a/data/{i:04}", bytes(1000)) for i in range(1000)))
    kept = [record for record in records if record.numbers[0] != _LOCAL]
    first = next(record for record in records if record.tail.startswith(b"a/data/0000"))
    for record in kept[1:-1]:
        record.numbers[_OFFSET] = len(records[0].data)
    kept[-1].numbers[6] = len(records[0].data) + len(first.data)
    write(folder, [records[0], first, *kept])


def _quoted(folder: Path) -> None:
    """A member whose data is the header and the data of the next one."""
    records = _of(("a/data/0", bytes(10)), ("a/data/1", bytes(10)))
    _entry(records, 1).numbers[_SIZES] = [50, 50]
    write(folder, records)


def _directory_of(size: int, wide: bool) -> Make:
    """The end of the file says that its directory takes so many bytes; there are as many, and they take no room."""

    def make(folder: Path) -> None:
        records = packed([("a/data.pkl", EMPTY)], wide)
        end = records[-3 if wide else -1]
        end.numbers[8 if wide else 5] = size
        end.numbers[9 if wide else 6] = len(records[0].data)
        write(folder, records, hole=size)

    return make


def _lying(change: Callable[[Record], object], name: str = "a/data/0") -> Make:
    """An entry of the directory that says something else than there is."""

    def make(folder: Path) -> None:
        records = _of((name, bytes(16)))
        change(_entry(records, 1))
        records[-1].numbers[5] = sum(len(r.data) for r in records if r.numbers[0] == _CENTRAL)
        write(folder, records)

    return make


def _lying_names(folder: Path) -> None:
    """Three thousand entries that lead to the same header, whose name is as long as one may be."""
    records = packed([("a/data.pkl", EMPTY), *((f"a/data/{i}", b"") for i in range(3_000))])
    local, directory = records[:2], [record for record in records if record.numbers[0] != _LOCAL]
    local[1].numbers[9] = 0xFFFF
    local[1].tail += bytes(0xFFFF)
    for record in directory[1:-1]:
        record.numbers[_OFFSET] = len(local[0].data)
    directory[-1].numbers[6] = sum(len(record.data) for record in local)
    write(folder, [*local, *directory])


def _marked(entry: Record) -> None:
    entry.numbers[_EXTERNAL] = 0x10


def _far(entry: Record) -> None:
    """An offset and sizes in an extra field for 64-bit numbers, beyond 2^63."""
    entry.numbers[_SIZES] = [0xFFFFFFFF, 0xFFFFFFFF]
    entry.numbers[_OFFSET] = 0xFFFFFFFF
    extra = b"\x01\x00\x18\x00" + b"\xff" * 7 + b"\x7f" + b"\xff" * 7 + b"\x7f" + b"\xff" * 8
    entry.numbers[11] = len(extra)
    entry.tail += extra


ARCHIVES: dict[str, tuple[Make, str]] = {
    "zip bomb": (_bomb, "member a/data/0 is compressed"),
    "overlapping members": (_overlapping, "is not where the directory says"),
    "a member that holds the next one": (_quoted, "members a/data/0 and a/data/1 overlap"),
    "directory of 3 GB": (
        _directory_of(3 << 30, False),
        "its directory takes 3,221,225,472 bytes, the limit is",
    ),
    "directory of 1 TB": (
        _directory_of(1 << 40, True),
        "its directory takes 1,099,511,627,776 bytes, the limit",
    ),
    "a member beyond 2^63": (_lying(_far), "member a/data/0 begins at byte 18,446,744,073,709,551,615 of"),
    "names of 65,535 letters that the directory does not have": (
        _lying_names,
        r"member a/data/0 is not where the directory says; .*(.|\n)*has 2,980 more problems",
    ),
    "a member that is marked as a folder": (_lying(_marked), "member a/data/0 is marked as a folder"),
    "member with an escape sequence": (
        _members(("\x1b[2J/data.pkl", EMPTY)),
        "2 of its members are data.pkl",
    ),
    "members in other folders": (
        _members(("../data.pkl", EMPTY)),
        r"2 of its members are data.pkl, not one \(a/data.pkl, ../data.pkl\)",
    ),
    "a thousand compressed members": (
        lambda folder: _deflated(folder, 1000),
        "has 980 more problems",
    ),
}
"""Faults of the zip file `pytorch_model.bin`."""


def _deflated(folder: Path, members: int) -> None:
    with zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(members):
            archive.writestr(f"a/{i}/data.pkl"[: -4 if i else None], bytes(100))


# --- pickles ---


def pickle_of(data: bytes) -> Make:
    """An archive of this pickle and a storage of 16 bytes."""
    return lambda folder: write(folder, packed([("a/data.pkl", data), ("a/data/0", bytes(16))]))


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(n: int) -> bytes:
    size = n.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + n.to_bytes(size, "little", signed=True)


def tensor(
    shape: bytes = b"K\x04\x85",
    strides: bytes = b"K\x01\x85",
    kind: str = "FloatStorage",
    items: bytes = b"K\x04",
    key: bytes = text("0"),
) -> bytes:
    """Instructions that make a tensor of four float32; a part may be other instructions."""
    storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + key + text("cpu") + items + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + strides + b"\x89Nt" + b"R"


def state(**tensors: bytes) -> bytes:
    """A pickle of a dict of these."""
    return b"\x80\x04}(" + b"".join(text(name) + made for name, made in tensors.items()) + b"u."


_MILLION_ONES = b"(" + b"K\x01" * 1_000_000 + b"t"
_BIG = b"(" + number((1 << 63) - 1) * 100_000 + b"t"

PICKLES: dict[str, tuple[Make, str]] = {
    "a million dimensions": (
        pickle_of(state(w=tensor(_MILLION_ONES, _MILLION_ONES))),
        "w: has 1,000,000 dimensions, the limit is 64",
    ),
    "a product that takes hours": (pickle_of(state(w=tensor(_BIG, _BIG))), "w: has 100,000 dimensions"),
    "a name that grows": (
        pickle_of(b"\x80\x04" + text("a" * 2_000_000) + b"q\x00" + b"h\x00h\x00\x93" * 20_000 + b"."),
        "it imports a name of 4,000,000 letters",
    ),
    "an imported name of 100,000 letters": (
        pickle_of(b"c" + b"a" * 100_000 + b"\nb\n."),
        "it imports a name of 100,001 letters",
    ),
    "a foreign name with an escape sequence": (
        pickle_of(b"\x80\x04" + text("os\x1b[2J") + text("system") + b"\x93."),
        r"its pickle asks for 'os\\x1b\[2J.system'",
    ),
    "a tensor with an escape sequence": (
        pickle_of(state(**{"w\x1b[2J": tensor()})),
        r"'w\\x1b\[2J': the name holds control characters; rename it",
    ),
    "a tensor of 100,000 letters": (
        pickle_of(state(**{"w" * 100_000: tensor()})),
        "www…: the name has 100,000 letters, the limit is 4,096; rename it",
    ),
    "a function as a name": (
        pickle_of(b"\x80\x04}(ctorch._utils\n_rebuild_tensor_v2\n" + tensor() + b"u."),
        "its name is a class or function, not text",
    ),
    "a storage of two kinds": (
        pickle_of(state(w=tensor(), x=tensor(b"K\x08\x85", kind="HalfStorage", items=b"K\x08"))),
        "x: its storage data/0 is of another kind for another tensor",
    ),
    "a storage of two sizes": (
        pickle_of(state(w=tensor(), x=tensor(b"K\x02\x85", items=b"K\x02"))),
        "x: its storage data/0 is of another kind",
    ),
    "a class as a storage's key": (
        pickle_of(state(w=tensor(key=b"ctorch\nFloatStorage\n"))),
        "w: names no storage",
    ),
}
"""Faults of a pickle."""


def _links(folder: Path) -> None:
    """An index of a thousand shards, all of them the one file that is there."""
    names = [f"{i}.bin" for i in range(1000)]
    for name in names:
        (folder / name).symlink_to(BIN)
    index(folder, {f"w{name}": name for name in names}, f"{BIN}.index.json")


def _large(make: Callable[[], bytes]) -> Make:
    """An archive of a pickle that is made only when it is needed."""
    return lambda folder: pickle_of(make())(folder)


HUGE: dict[str, tuple[Make, str]] = {
    "100 MB of dicts": (_large(lambda: b"}" * 99_000_000 + b"."), "it has more than 4,000,000 instructions"),
    "four million dicts": (_large(lambda: b"}" * 3_999_000 + b"."), "holds no tensors"),
    "a million calls": (
        _large(lambda: b"ccollections\nOrderedDict\nq\x00" + b"h\x00)R" * 1_300_000 + b"."),
        "holds no tensors",
    ),
    "tuples four million deep": (
        _large(lambda: b")" + b"\x85" * 3_999_000 + b"."),
        "holds a value of type tuple, not a dict",
    ),
    "four million names": (
        _large(lambda: b"ctorch\nfloat32\n" * 3_999_000 + b"."),
        "it imports names of more than 20,000,000 letters",
    ),
    "a million names of wide letters": (
        _large(
            lambda: (
                b"\x80\x04" + text("\U0001f600" + "a" * 498) + b"q\x00" + b"h\x00h\x00\x93" * 1_300_000 + b"."
            )
        ),
        r"its pickle asks for .*U0001f600aaa",
    ),
    "a text of 99 MB in wide letters": (
        _large(lambda: b"\x80\x04}" + text("\U0001f600" + "a" * 98_900_000) + b"Ns."),
        r".U0001f600aaa.*…: the name has 98,900,001 letters, the limit is 4,096",
    ),
    "two million tensors that are one": (
        _large(
            lambda: (
                b"\x80\x04"
                + tensor()
                + b"q\x00}("
                + b"".join(b"\x8c\x07%07dh\x00" % i for i in range(1_300_000))
                + b"u."
            )
        ),
        "agent: holds more than 500,000 tensors",
    ),
    "a thousand links to a million instructions": (
        lambda folder: [pickle_of(b"}" * 999_000 + b".")(folder), _links(folder)],
        "is one file too many: headers of 200,000,000 bytes are read for one checkpoint, or pickles of a twentieth",
    ),
    "a million foreign names": (
        _large(lambda: b"".join(b"ca%d\nb\n" % i for i in range(1_000_000)) + b"."),
        "asks for a0.b, .* and 999,995 more, which no weights need",
    ),
    "two million entries that are no tensors": (
        _large(lambda: b"}(" + b"".join(b"\x8c\x08%08dN" % i for i in range(1_900_000)) + b"u."),
        "00000000: is None, not a tensor(.|\n)*has 980 more problems",
    ),
    "a number of 100 MB": (
        _large(lambda: b"\x8b" + (99_000_000).to_bytes(4, "little") + b"\x7f" * 99_000_000 + b"."),
        "holds a value of type int",
    ),
    "300,000 members": (
        lambda folder: write(
            folder, packed([("a/data.pkl", EMPTY), *((f"{i:x}", b"") for i in range(300_000))], True)
        ),
        "holds no tensors",
    ),
}
"""Faults of a `.bin` that are large."""
