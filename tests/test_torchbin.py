"""`.bin` checkpoints: every tensor is where torch's own loading finds it; nothing in a pickle is ever run."""

from __future__ import annotations

import argparse
import copyreg
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import folders
import hostile
import numpy as np
import pytest
import torch
from folders import Model, agents_of, merged, normal, raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ramstream import Checkpoint, Limits, RamPlus, merge, plan_merge
from ramstream.checkpoint import pickled
from ramstream.checkpoint.strided import gather
from ramstream.checkpoint.torchbin import read_archive, reader_of
from ramstream.errors import CheckpointError
from ramstream.types import ITEMSIZE, Strided, TensorInfo
from ramstream.verify import verify_output

NAME = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (
    *FLOATS,
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
)

quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors_in(path: Path) -> dict[str, TensorInfo]:
    return {info.name: info for info in read_archive(path, path.name, "label")[1]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_archive(path, path.name, "evil.bin")
    message = str(caught.value)
    assert all(line.startswith("evil.bin: ") for line in message.splitlines())
    assert len(message) < 3000
    return message


def span(info: TensorInfo) -> int:
    """Items from the first element to the last."""
    strides = info.recipe.strides if isinstance(info.recipe, Strided) else ()
    if 0 in info.shape or not strides:
        return info.elements
    return 1 + sum((n - 1) * stride for n, stride in zip(info.shape, strides, strict=True))


def bytes_at(content: bytes, info: TensorInfo) -> bytes:
    """A tensor's bytes, one after the other, out of its file's."""
    itemsize = ITEMSIZE[info.dtype]
    data = content[info.offset : info.offset + span(info) * itemsize]
    assert len(data) == span(info) * itemsize
    if info.recipe is None:
        assert info.nbytes == len(data)
        return data
    assert isinstance(info.recipe, Strided)
    out = np.zeros(info.elements, f"u{itemsize}")
    gather(np.frombuffer(data, out.dtype), info.shape, info.recipe.strides, 0, out)
    return out.tobytes()


# --- what torch saves ---


def storage_of(dtype: torch.dtype, elements: int, seed: int) -> torch.Tensor:
    data = np.random.default_rng(seed).integers(0, 256, elements * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype)


@st.composite
def views(draw: st.DrawFn, whole: torch.Tensor) -> torch.Tensor:
    """A view of a one-dimensional tensor: any shape, offset and strides that lie in it, or a usual one."""
    usual = [whole, whole[:0], whole.reshape(1, -1, 1), whole[1:], whole[None].expand(3, -1).t()]
    if draw(st.booleans()):
        return draw(st.sampled_from(usual))
    shape, strides, last = [], [], whole.numel() - 1
    for _ in range(draw(st.integers(0, 4))):
        strides.append(draw(st.integers(0, 4) | st.integers(0, 40)))
        shape.append(draw(st.integers(0, min(5, 1 + last // strides[-1]) if strides[-1] else 5)))
        last -= max(shape[-1] - 1, 0) * strides[-1]
    return whole.as_strided(shape, strides, draw(st.integers(0, last)))


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors that are views of a few storages; plain, parameters, with attributes."""
    entries: dict[str, torch.Tensor] = OrderedDict() if draw(st.booleans()) else {}
    for number in range(draw(st.integers(0, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        whole = storage_of(dtype, draw(st.integers(1, 60)), number)
        for view in draw(st.lists(views(whole), min_size=1, max_size=3)):
            kind = draw(st.sampled_from(["plain", "parameter", "attribute"]))
            if kind == "parameter":
                view = torch.nn.Parameter(view, requires_grad=False)
            if kind == "attribute":
                view.sequence_parallel = True
            words = st.text(st.characters(codec="utf-8"), max_size=6).filter(str.isprintable)
            entries[draw(words) + str(len(entries))] = view
    return entries


@quick
@given(entries=state_dicts(), protocol=st.sampled_from([2, 3, 4, 5]))
def test_tensors_are_what_torch_and_safetensors_say(entries, protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    torch.save(entries, path, pickle_protocol=protocol)
    loaded = torch.load(path, weights_only=protocol == 2, mmap=True)  # it knows this one only
    save_file(
        {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in loaded.items()},
        tmp_path / "w.safetensors",
    )
    expected = folders.read(tmp_path / "w.safetensors")
    found = tensors_in(path)
    content = path.read_bytes()
    assert {n: (i.dtype, i.shape) for n, i in found.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    for name, info in found.items():
        assert bytes_at(content, info) == expected[name].data
        assert (info.recipe is None) == loaded[name].is_contiguous()
    assert [i.offset for i in found.values()] == sorted(i.offset for i in found.values())


def test_expected_fields_written_out(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    entries = {"whole": whole, "row": whole[1], "turned": whole.t(), "one": whole[2:, 1:2]}
    torch.save(entries, tmp_path / "w.bin")
    file, tensors = read_archive(tmp_path / "w.bin", "sub/w.bin", "label")
    start = (tmp_path / "w.bin").read_bytes().index(whole.numpy().tobytes())
    assert tensors == [
        TensorInfo("whole", "I16", (3, 4), "sub/w.bin", start, 24),
        TensorInfo("turned", "I16", (4, 3), "sub/w.bin", start, 24, Strided((1, 4))),
        TensorInfo("row", "I16", (4,), "sub/w.bin", start + 8, 8),
        TensorInfo("one", "I16", (1, 1), "sub/w.bin", start + 18, 2),
    ]
    assert file.data_start == start
    assert file.size == (tmp_path / "w.bin").stat().st_size


def test_state_dict_of_a_module_opens(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    torch.save(layer.state_dict(), tmp_path / "w.bin")
    found = tensors_in(tmp_path / "w.bin")
    content = (tmp_path / "w.bin").read_bytes()
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "weight": ("BF16", (2, 3)),
        "bias": ("BF16", (2,)),
    }
    assert bytes_at(content, found["bias"]) == layer.bias.detach().view(torch.uint8).numpy().tobytes()


def test_header_is_of_the_pickle_and_the_places_not_of_the_data(tmp_path: Path) -> None:
    def header(entries: Mapping[str, torch.Tensor]) -> str:
        torch.save(entries, tmp_path / "w.bin")
        return read_archive(tmp_path / "w.bin", "w.bin", "label")[0].header

    ones = header({"w": torch.ones(4)})
    assert ones == header({"w": torch.zeros(4)})
    assert ones != header({"v": torch.ones(4)})
    assert ones != header({"w": torch.ones(5)})


def test_archives_packed_anew_open(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(4.0), "b": torch.arange(3)}, tmp_path / "w.bin")
    packed = zip_file(tmp_path / "packed.bin", unzipped(tmp_path / "w.bin"))
    expected = torch.load(packed, weights_only=True)
    for name, info in tensors_in(packed).items():
        assert bytes_at(packed.read_bytes(), info) == expected[name].numpy().tobytes()


def test_ten_thousand_tensors_open(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.full((2,), i) for i in range(10_000)}, tmp_path / "w.bin")
    content = (tmp_path / "w.bin").read_bytes()
    found = tensors_in(tmp_path / "w.bin")
    assert len(found) == 10_000
    assert bytes_at(content, found["w9999"]) == torch.full((2,), 9999).numpy().tobytes()


def test_reader_is_chosen_by_ending() -> None:
    assert [reader_of(name).__name__ for name in ("a.bin", "a.safetensors", "bin", "x")] == [
        "read_archive",
        *["read_header"] * 3,
    ]


def test_opening_does_not_load_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.bin")
    code = (
        "import sys, pathlib; from ramstream.checkpoint.torchbin import read_archive;"
        "read_archive(pathlib.Path(sys.argv[1]), 'w.bin', 'w.bin');"
        "print([m for m in ('torch', 'numba', 'safetensors') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "w.bin")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_file_larger_than_memory_opens(tmp_path: Path) -> None:
    """torch's own mmap=True fails: the system wants memory for what is mapped privately and writable."""
    elements = 1 << 36
    pickle_ = pickled_tensor(numel=elements, size=(elements,))
    path = write_zip(tmp_path / "w.bin", [Entry("w/data/0", 4 * elements), Entry("w/data.pkl", pickle_)])
    info = tensors_in(path)["w"]
    assert (info.offset, info.nbytes) == (30 + len("w/data/0"), 4 * elements)
    assert path.stat().st_size > 4 * elements


# --- archives made by hand ---


def unzipped(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zip_file(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@dataclass
class Entry:
    """A member of a zip file, and what its directory says where that is not so."""

    name: str
    data: bytes | int
    """An integer is a hole of that many bytes."""
    said: dict[str, int] = field(default_factory=dict)
    """Of `offset`, `size`, `flags`, `method`; with an offset there is nothing but the directory's entry."""


def local_header(name: str, size: int) -> bytes:
    size = min(size, 0xFFFFFFFF)
    return struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, size, size, len(name), 0) + name.encode()


def write_zip(path: Path, entries: Sequence[Entry]) -> Path:
    """A zip64 file whose directory may lie (PKWARE's APPNOTE, 4.3)."""
    directory = b""
    with open(path, "wb") as stream:
        for entry in entries:
            name, size = entry.name.encode(), entry.data if isinstance(entry.data, int) else len(entry.data)
            said = {"offset": stream.tell(), "size": size, "flags": 0, "method": 0} | entry.said
            if "offset" not in entry.said:
                stream.write(local_header(entry.name, size))
                stream.write(b"" if isinstance(entry.data, int) else entry.data)
                stream.seek(said["offset"] + 30 + len(name) + size)
            numbers = (
                45,
                45,
                said["flags"],
                said["method"],
                0,
                0,
                0,
                *[0xFFFFFFFF] * 2,
                len(name),
                28,
                0,
                0,
                0,
            )
            directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", *numbers, 0, 0xFFFFFFFF) + name
            directory += struct.pack("<2H3Q", 1, 24, said["size"], said["size"], said["offset"])
        begin, count = stream.tell(), len(entries)
        stream.write(directory)
        end = stream.tell()
        stream.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, end - begin, begin))
        stream.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        stream.write(struct.pack("<4s4H2IH", b"PK\5\6", *[0xFFFF] * 4, *[0xFFFFFFFF] * 2, 0))
    return path


class Rebuilt:
    """Pickles as a call with these arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.function, self.arguments


class Storage:
    """Pickles as a storage that lies outside."""

    def __init__(self, *identity: object) -> None:
        self.identity = identity


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.identity if isinstance(value, Storage) else None


def dumps(value: object, protocol: int = 2) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def rebuilt(
    kind: object = torch.FloatStorage,
    key: object = "0",
    numel: object = 4,
    offset: object = 0,
    size: object = (4,),
    stride: object = (1,),
    hooks: object = None,
) -> Rebuilt:
    """A tensor's call, by default of four float32 in storage 0."""
    storage = Storage("storage", kind, key, "cpu", numel)
    return Rebuilt(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, hooks)


def pickled_tensor(**changes: object) -> bytes:
    return dumps({"w": rebuilt(**changes)})


def archive(path: Path, data: bytes, storage: bytes = bytes(16)) -> Path:
    """An archive of one storage of 16 bytes, and this pickle."""
    return zip_file(
        path, {"a/data.pkl": data, "a/byteorder": b"little", "a/data/0": storage, "a/version": b"3\n"}
    )


def test_archive_by_hand_opens(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(archive(tmp_path / "a.bin", pickled_tensor()).read_bytes())
    assert tensors_in(tmp_path / "w.bin")["w"].nbytes == 16
    entries = [Entry("a/data.pkl", pickled_tensor()), Entry("a/data/0", bytes(16))]
    assert tensors_in(write_zip(tmp_path / "v.bin", entries))["w"].nbytes == 16


# --- faults of a file ---


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def _saved(make: Callable[[], object], **options: Any) -> Callable[[Path], object]:
    def save(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(make(), path, **options)

    return save


def _of(**entries: Callable[[], object]) -> Callable[[Path], object]:
    return _saved(lambda: {"good": torch.ones(2), **{name: make() for name, make in entries.items()}})


def _archive(change: Callable[[dict[str, bytes]], object], **options: Any) -> Callable[[Path], object]:
    """A good archive whose members are changed."""

    def make(path: Path) -> None:
        torch.save({"a": torch.ones(4), "b": torch.zeros(3)}, path)
        members = unzipped(path)
        change(members)
        zip_file(path, members, **options)

    return make


def _entries(*entries: Entry) -> Callable[[Path], object]:
    good = (Entry("a/data.pkl", pickled_tensor()), Entry("a/data/0", bytes(16)))
    return lambda path: write_zip(path, [*good, *entries])


def _pickle(data: bytes) -> Callable[[Path], object]:
    return lambda path: archive(path, data)


def _view(**changes: object) -> Callable[[Path], object]:
    return _pickle(pickled_tensor(**changes))


def _tar(path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))


def _script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def _twice(path: Path) -> None:
    torch.save({"a": torch.ones(4)}, path)
    with zipfile.ZipFile(path, "a") as more, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        more.writestr(next(name for name in more.namelist() if name.endswith("data/0")), bytes(16))


def _link(path: Path) -> None:
    path.symlink_to("nowhere")


def _inside(path: Path) -> None:
    """A member whose own header is among another's data."""
    hidden = local_header("a/data/1", 4) + b"1234"
    entries = [Entry("a/data.pkl", pickled_tensor()), Entry("a/data/0", hidden), Entry("a/data/1", b"")]
    at = write_zip(path, entries).read_bytes().index(hidden)
    write_zip(path, [*entries[:2], Entry("a/data/1", b"", {"offset": at, "size": 4})])


class _Subclass(torch.Tensor):
    pass


class _Twice:
    """Pickles as an OrderedDict with one key twice."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter([("w", rebuilt()), ("v", rebuilt()), ("w", rebuilt())])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    # the first bytes
    "empty": (_bytes(b""), "is empty; download it again"),
    "git lfs pointer": (_bytes(hostile.LFS), "Git LFS pointer.*git lfs pull"),
    "html page": (_bytes(b"<!DOCTYPE html>"), "web page"),
    "gguf": (_bytes(b"GGUF\x03\x00\x00\x00" + bytes(32)), "GGUF.*cannot be averaged"),
    "noise": (_bytes(b"\xfe" * 600), "no zip archive as torch.save writes it"),
    "zeros": (_bytes(bytes(600)), "begins with zeros"),
    "old format": (
        _saved(lambda: {"w": torch.ones(2)}, _use_new_zipfile_serialization=False),
        "is a pickle, perhaps PyTorch weights in the old format; load and save it with torch 1.6 or newer, or conv",
    ),
    "oldest format": (_tar, "is a tar archive, .*torch 1.6 or newer, or convert it to safetensors"),
    "safetensors": (lambda path: hostile.good(path), "name that ends in .safetensors"),
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (os.mkdir, "not a regular file"),
    "dangling link": (_link, "link to nowhere, which does not exist"),
    # the archive
    "zip of something else": (
        lambda path: zip_file(path, {"a.txt": b"x"}),
        r"0 of its members are data.pkl.*a.txt",
    ),
    "two pickles": (_archive(lambda m: m.update({"b/data.pkl": b""})), "2 of its members are data.pkl"),
    "torchscript": (_script, "TorchScript program"),
    "no directory": (_bytes(b"PK\x03\x04" + bytes(600)), "no whole zip archive.*truncated"),
    "compressed": (
        _archive(lambda m: None, compression=zipfile.ZIP_DEFLATED),
        "data.pkl is compressed, .*with torch",
    ),
    "big-endian": (
        _archive(lambda m: m.update({next(iter(m))[:1] + "/byteorder": b"big"})),
        "byte order big, not",
    ),
    "member of the same name": (_twice, "members of the same name: .*data/0"),
    "encrypted": (_entries(Entry("a/x", b"x", {"flags": 1})), "member a/x is encrypted"),
    "unknown method": (_entries(Entry("a/x", b"x", {"method": 99})), "member a/x is compressed"),
    "member outside": (
        _entries(Entry("a/data/1", b"x", {"size": 5000})),
        r"a/data/1 ends at byte 5,\d+, the file",
    ),
    "member far outside": (
        _entries(Entry("a/x", b"", {"offset": 1 << 31})),
        "a/x begins at byte 2,147,483,648 of",
    ),
    "member elsewhere": (_entries(Entry("a/x", b"", {"offset": 0})), "a/x is not where the directory says"),
    "member of another name": (
        _entries(Entry("a/data.pkx", b"", {"offset": 0})),
        "not where the directory says",
    ),
    "member in another": (_inside, "members a/data/0 and a/data/1 overlap"),
    "storage missing": (
        _archive(lambda m: m.pop(next(n for n in m if n.endswith("data/1")))),
        "b: .*data/1 is not in",
    ),
    # the pickle
    "pickle cut off": (_pickle(pickled_tensor()[:-9]), "pickle cannot be read"),
    "no pickle": (_pickle(b""), "pickle cannot be read"),
    "stack is empty": (_pickle(b"\x80\x02."), "pickle cannot be read .its stack is damaged"),
    "mark is missing": (_pickle(b"\x80\x02}u."), "its stack is damaged"),
    "memo is empty": (_pickle(b"\x80\x02h\x07."), "its stack is damaged"),
    "string of 4 GB": (_pickle(b"\x80\x02X\xff\xff\xff\xffabc."), "pickle cannot be read"),
    "a set": (_pickle(b"\x80\x04\x8f."), "it uses EMPTY_SET, which no weights need"),
    "items of a tensor": (_pickle(pickled_tensor()[:-2] + b"K\x00K\x01ss."), "takes none"),
    "state of a tensor": (
        _pickle(pickled_tensor()[:-2] + b"}bs."),
        "sets attributes of something else than a dict",
    ),
    "name of numbers": (_pickle(b"\x80\x04K\x00K\x01\x93."), "imports something that is no name"),
    "dtype of no kind": (
        _pickle(dumps({"w": Rebuilt(torch._utils._rebuild_tensor_v3, *rebuilt().arguments, "float8")})),
        "w: its dtype is a value of type str; the file is damaged",
    ),
    "storage of many items": (_view(numel=10**5000), "names no storage"),
    "odd items": (_pickle(b"\x80\x02}(K\x00u."), "adds items to something"),
    "call of a string": (_pickle(b"\x80\x02X\x01\x00\x00\x00a)R."), "calls something that is no name"),
    # what it holds
    "a list": (
        _saved(lambda: [torch.ones(2)]),
        "holds a value of type list, not a dict of tensors; save the weights",
    ),
    "a tensor": (_saved(lambda: torch.ones(2)), "holds a single tensor, not a dict"),
    "a number": (_saved(lambda: 3), "holds a value of type int"),
    "nested": (
        _saved(lambda: {"state_dict": {"w": torch.ones(2)}, "epoch": 3, "config": {"a": 1}}),
        r"dicts of tensors, not tensors: state_dict; save the one .*torch.load\(…\)\['state_dict'\]",
    ),
    "optimizer": (
        _saved(lambda: torch.optim.SGD([torch.ones(2, requires_grad=True)]).state_dict()),
        "state: is a dict, not a tensor(.|\n)*param_groups: is a value of type list, not a tensor",
    ),
    "a module": (_saved(lambda: torch.nn.Linear(2, 2)), "asks for torch.nn.modules.linear.Linear"),
    "numbers among tensors": (
        _of(step=lambda: 3, none=lambda: None),
        "step: is a value of type int(.|\n)*none: is None",
    ),
    "names that are numbers": (
        _saved(lambda: {3: torch.ones(2)}),
        "3: its name is a value of type int, not text",
    ),
    "names that are tuples": (
        _saved(lambda: {(1, 2): torch.ones(2)}),
        "an entry: its name is a value of type tuple",
    ),
    "name of safetensors' own": (_of(__metadata__=lambda: torch.ones(1)), "__metadata__: is no name"),
    "half a surrogate": (
        _saved(lambda: {"\ud800": torch.ones(2)}),
        "the name is no valid Unicode; rename it",
    ),
    "name twice": (_pickle(dumps(_Twice())), "w: occurs 2 times"),
    # its tensors
    "complex": (
        _of(w=lambda: torch.ones(2, dtype=torch.complex64)),
        "w: is of torch.ComplexFloatStorage, which",
    ),
    "float8 of another kind": (
        _of(w=lambda: torch.ones(2).to(torch.float8_e5m2fnuz)),
        "w: is of torch.float8_e5m2fnuz",
    ),
    "quantised": (
        _of(
            a=lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            b=lambda: torch.quantize_per_channel(
                torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint8
            ),
        ),
        "a: is quantised, and(.|\n)*b: is quantised, and",
    ),
    "sparse": (
        _of(a=lambda: torch.eye(2).to_sparse(), b=lambda: torch.eye(2).to_sparse_csr()),
        "a: is sparse; save it as `.to_dense(.|\n)*b: is sparse",
    ),
    "nested tensor": (
        _of(w=lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "w: is nested",
    ),
    "meta": (_of(w=lambda: torch.ones(2, device="meta")), "w: is on the meta device and has no data"),
    "negated": (_of(w=lambda: torch._neg_view(torch.ones(2))), "w: is a lazily negated"),
    "conjugated": (_of(w=lambda: torch.ones(2, dtype=torch.complex64).conj()), "w: is a lazily negated"),
    "subclass": (_of(w=lambda: _Subclass(torch.ones(2))), r"asks for .*_Subclass, which"),
    # its views
    "longer than its storage": (_view(size=(5,)), "w: ends at byte 20 of its storage, which has 16"),
    "beyond its storage": (_view(offset=1), "w: ends at byte 20 of its storage"),
    "strides beyond its storage": (_view(size=(2, 2), stride=(3, 1)), "w: ends at byte 20 of its storage"),
    "storage shorter than said": (_view(numel=5), "should have 5 items of F32, data/0 has 16 bytes"),
    "storage of -1": (_view(numel=-1), "names no storage"),
    "negative offset": (_view(offset=-1), "no sizes"),
    "negative shape": (_view(size=(-4,)), "no sizes"),
    "negative stride": (_view(offset=3, stride=(-1,)), "no sizes"),
    "a boolean in the shape": (_view(size=(True,)), "no sizes"),
    "a fraction in the shape": (_view(size=(4.0,)), "no sizes"),
    "shape is a list": (_view(size=[4]), "no sizes"),
    "one stride too many": (_view(stride=(1, 1)), "no sizes"),
    "expanded beyond 2^63": (_view(size=(1 << 40, 1 << 40), stride=(0, 0)), r"more than 2\^63 bytes"),
    "extent above 64 bits": (_view(size=(1 << 70,), stride=(0,)), "no sizes"),
    "storage by number": (_view(key=0), "w: names no storage"),
    "storage of another name": (_view(key="../x"), "its storage data/../x is not in the archive"),
    "storage of an unknown kind": (_view(kind=torch.ComplexFloatStorage), "torch.ComplexFloatStorage, which"),
    "storage of no kind": (_view(kind="FloatStorage"), "names no storage"),
    "no arguments": (
        _pickle(dumps({"w": Rebuilt(torch._utils._rebuild_tensor_v2)})),
        "from 0 arguments, not 6",
    ),
    "parameter of nothing": (
        _pickle(dumps({"w": Rebuilt(torch._utils._rebuild_parameter)})),
        "rebuilt from nothing",
    ),
    "parameter of a number": (
        _pickle(dumps({"w": Rebuilt(torch._utils._rebuild_parameter, 3)})),
        "w: is a value of type int, not a tensor",
    ),
}
"""Faults of one `.bin` file, and what the message must say."""


@pytest.mark.parametrize(("make", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_faulty_file_is_refused(make, message: str, tmp_path: Path) -> None:
    make(tmp_path / "w.bin")
    assert re.search(message, refusal(tmp_path / "w.bin"))


def test_every_faulty_tensor_is_listed_up_to_twenty(tmp_path: Path) -> None:
    torch.save({f"w{i}": i for i in range(100)}, tmp_path / "w.bin")
    lines = refusal(tmp_path / "w.bin").splitlines()
    assert len(lines) == 21
    assert lines[-1] == "evil.bin: has 80 more problems"


def test_cut_off_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(40), "b": torch.zeros(3)}, tmp_path / "w.bin")
    whole = (tmp_path / "w.bin").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.bin").write_bytes(whole[:length])
        assert "download it again" in refusal(tmp_path / "cut.bin")


def test_huge_pickle_is_refused(tmp_path: Path) -> None:
    entries = [Entry("a/data.pkl", 3 << 30), Entry("a/data/0", bytes(16))]
    assert "3,221,225,472 bytes, the limit is 100,000,000" in refusal(write_zip(tmp_path / "w.bin", entries))


def test_a_memo_far_away_takes_no_memory(tmp_path: Path) -> None:
    """The standard library's unpickler would allocate 64 GB."""
    assert tensors_in(archive(tmp_path / "w.bin", b"\x80\x02}r\xff\xff\xff\xff.")) == {}


def _doubling(times: int) -> bytes:
    """A tuple of two tuples of two tuples …: a few bytes each, 2^times values when printed."""
    return b")q\x00" + b"h\x00h\x00\x86q\x00" * times


DEEP = 200_000
BOMBS = {
    "imported": b"\x80\x04" + _doubling(60) + b"h\x00\x93.",
    "called": b"\x80\x04" + _doubling(60) + b")R.",
    "a name": b"\x80\x04}" + _doubling(60) + b"K\x00s.",
    "a value": b"\x80\x04}K\x00" + _doubling(60) + b"s.",
    "a key": pickled_tensor().replace(b"X\x01\x00\x00\x000", _doubling(60)),
    "nested tuples": b"\x80\x04}K\x00)" + b"\x85" * DEEP + b"s.",
    "nested calls": b"\x80\x04" + b"ctorch\nSize\n" * DEEP + b")" + b"\x85R" * DEEP + b".",
    "nested parameters": (
        b"\x80\x04}X\1\0\0\0w"
        + b"ctorch._utils\n_rebuild_parameter\n" * DEEP
        + b")"
        + b"\x85R" * DEEP
        + b"s."
    ),
    "marks": b"\x80\x04" + b"(" * DEEP + b".",
    "itself": b"\x80\x04]q\x00h\x00a}K\x00h\x00s.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_small_pickles_that_unfold_are_refused_at_once(data: bytes, tmp_path: Path) -> None:
    begun = time.perf_counter()
    refusal(archive(tmp_path / "w.bin", data))
    assert time.perf_counter() - begun < 30


# --- fuzz ---


def opens_or_is_refused(path: Path) -> None:
    infos: dict[str, TensorInfo] = {}
    problem = "label: "
    try:
        infos = tensors_in(path)
    except CheckpointError as error:
        problem = str(error)
    assert problem.startswith("label: ")
    content = path.read_bytes()
    for info in infos.values():
        bytes_at(content, info)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "w.bin"
    entries = {"a": torch.ones(2, 3).t(), "b": torch.ones(3), "c": torch.ones(2).to(torch.float8_e4m3fn)}
    torch.save(OrderedDict(entries), path)
    return path.read_bytes()


@settings(quick, max_examples=1000)
@given(position=st.integers(0, 1 << 20), byte=st.integers(0, 255), move=st.sampled_from([0, 0, 0, 1, -1]))
def test_changed_bytes_open_or_are_refused(position, byte, move, small: bytes, tmp_path: Path) -> None:
    at = position % len(small)
    changed = small[:at] + bytes([byte] * (1 + move)) + small[at + 1 :]
    (tmp_path / "w.bin").write_bytes(changed)
    opens_or_is_refused(tmp_path / "w.bin")


@settings(quick, max_examples=500)
@given(position=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_changed_pickles_open_or_are_refused(position, byte, tmp_path: Path) -> None:
    data = bytearray(dumps(OrderedDict(w=rebuilt(), v=rebuilt(size=(2, 2), stride=(1, 2)))))
    data[position % len(data)] = byte
    opens_or_is_refused(archive(tmp_path / "w.bin", bytes(data)))


@quick
@given(data=st.lists(st.sampled_from(list(b"()].}]N\x88\x85\x86\x87tRbusaeqhQc0K\x93\x94")), max_size=30))
def test_any_instructions_are_data(data: list[int]) -> None:
    text = (
        b"\x80\x04"
        + b"".join(b"ccollections\nOrderedDict\n" if c == 0x63 else bytes([c]) for c in data)
        + b"."
    )
    with suppress(ValueError):
        pickled.read(text, lambda name: name == "collections.OrderedDict")


# --- pickles that attack ---


class Deed:
    """Pickles as a call that leaves a mark."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        return self.call


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def attacks(mark: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that create `mark` when they are unpickled, and the name that gives each away."""
    command, program = f"touch {mark}", f"open({str(mark)!r}, 'w').close()"
    system, line = Deed(os.system, command), command.encode()
    hidden = OrderedDict(w=rebuilt(hooks=system))
    attributes: Any = OrderedDict(w=rebuilt())
    attributes._metadata = system
    return {
        "os.system": (dumps({"w": system}), "system"),
        "newest protocol": (dumps({"w": system}, 5), "system"),
        "eval": (dumps(Deed(eval, program)), "eval"),
        "exec": (dumps([Deed(exec, program)]), "exec"),
        "subprocess": (dumps({"w": Deed(subprocess.call, ["touch", str(mark)])}), "call"),
        "text protocol": (b"cos\nsystem\n(S'" + line + b"'\ntR.", "os.system"),
        "INST": (b"(S'" + line + b"'\nios\nsystem\n.", "INST"),
        "OBJ": (b"(cos\nsystem\nS'" + line + b"'\no.", "os.system"),
        "popped": (b"\x80\x04cos\nsystem\n" + _text(command) + b"\x85R0}.", "os.system"),
        "a key": (dumps({Rebuilt(os.system, command): 1}), "system"),
        "hooks of a tensor": (dumps(hidden), "system"),
        "place of a storage": (dumps({"w": rebuilt(key=system)}), "system"),
        "attributes of the dict": (dumps(attributes), "system"),
        "a parameter's state": (
            dumps({"w": Rebuilt(torch._utils._rebuild_parameter_with_state, rebuilt(), False, {}, system)}),
            "system",
        ),
        "torch's modules": (
            b"\x80\x04"
            + _text("torch.serialization")
            + _text("os.system")
            + b"\x93"
            + _text(command)
            + b"\x85R.",
            "torch.serialization.os.system",
        ),
        "a name like a storage's": (
            b"\x80\x04"
            + _text("torch.storage")
            + _text("threading._os.system")
            + b"\x93"
            + _text(command)
            + b"\x85R.",
            "torch.storage.threading._os.system",
        ),
        "torch's own functions": (
            dumps({"w": Deed(torch.save, [1], str(mark))}),
            "torch.serialization.save",
        ),
        "an extension": (b"\x80\x04\x82\xf0" + _text(command) + b"\x85R.", "EXT1"),
    }


ATTACKS = list(attacks(Path("mark")))


class Trusting(pickle.Unpickler):
    """What must never read such a file."""

    def persistent_load(self, identity: object) -> object:
        return torch.zeros(4)._typed_storage()


@contextmanager
def _extension() -> Iterator[None]:
    copyreg.add_extension("os", "system", 0xF0)
    try:
        yield
    finally:
        copyreg.remove_extension("os", "system", 0xF0)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("kind", ATTACKS)
def test_nothing_in_a_pickle_is_run(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data, name = attacks(mark)[kind]
    with _extension():
        with suppress(Exception):
            Trusting(io.BytesIO(data)).load()
        assert _appears(mark), "the attack would work"
        mark.unlink()
        message = refusal(archive(tmp_path / "evil.bin", data))
        (tmp_path / "folder").mkdir()
        archive(tmp_path / "folder" / NAME, data)
        with pytest.raises(CheckpointError, match=f"folder/{NAME}: its pickle"):
            Checkpoint.open(tmp_path / "folder")
    assert name in message
    assert "its pickle asks for" in message or f"{name}, which no weights need" in message
    assert not mark.exists()


def _appears(mark: Path) -> bool:
    """A child process takes a moment."""
    for _ in range(200):
        if mark.exists():
            return True
        time.sleep(0.02)
    return False


def test_all_names_a_pickle_asks_for_are_listed(tmp_path: Path) -> None:
    with_arguments = {"w": torch.ones(2), "args": argparse.Namespace(x=Path("y")), "array": np.ones(2)}
    torch.save(with_arguments, tmp_path / "w.bin")
    message = refusal(tmp_path / "w.bin")
    assert "asks for argparse.Namespace, pathlib.PosixPath, numpy." in message
    assert "torch.save(model.state_dict(), …)" in message
    assert message.count("\n") == 0


# --- strided tensors ---


@st.composite
def strided(draw: st.DrawFn) -> tuple[np.ndarray, list[int], list[int]]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    strides = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    strides = [
        s if n != 1 else draw(st.sampled_from([s, 1 << 62])) for n, s in zip(shape, strides, strict=True)
    ]
    needed = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    dtype = draw(st.sampled_from(["u1", "u2", "u4", "u8"]))
    return np.arange(needed + draw(st.integers(0, 3)), dtype=dtype), shape, strides


@quick
@given(tensor=strided(), cuts=st.tuples(st.integers(0, 700), st.integers(0, 700)))
def test_gather_copies_any_cut(tensor, cuts: tuple[int, int]) -> None:
    data, shape, strides = tensor
    whole = [data[sum(i * s for i, s in zip(place, strides, strict=True))] for place in np.ndindex(*shape)]
    begin, end = sorted(min(cut, len(whole)) for cut in cuts)
    out = np.full(end - begin + 2, 77, data.dtype)
    gather(data, shape, strides, begin, out[1:-1])
    assert out.tolist() == [77, *(int(item) for item in whole[begin:end]), 77]


def test_gather_of_less_than_the_tensor_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes 7 items, and 6"):
        gather(np.zeros(6, np.uint8), (2, 2), (5, 1), 0, np.zeros(4, np.uint8))


def test_gather_allocates_nothing_of_the_tensors_size() -> None:
    data, out = np.zeros(1 << 20, np.uint32), np.zeros(1 << 18, np.uint32)
    tracemalloc.start()
    gather(data, (1 << 10, 1 << 10), (1, 1 << 10), 12345, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


# --- which files of a folder ---


def saved(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: torch.ones(2) for name in names}, path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model_fsdp.bin", "weights.bin"])
def test_the_only_weight_file_is_opened(name: str, tmp_path: Path) -> None:
    for other in ("training_args", "optimizer", "scheduler", "rng_state_0"):
        (tmp_path / f"{other}.bin").write_bytes(b"..")
    saved(tmp_path / name, "w")
    assert list(Checkpoint.open(tmp_path).files) == [name]
    assert list(Checkpoint.open(tmp_path / name).files) == [name]


def test_usual_name_wins_over_others(tmp_path: Path) -> None:
    saved(tmp_path / NAME, "w")
    (tmp_path / "openvino_model.bin").write_bytes(b"..")
    assert list(Checkpoint.open(tmp_path).files) == [NAME]


def test_safetensors_win(tmp_path: Path) -> None:
    saved(tmp_path / NAME, "w")
    hostile.index(tmp_path, {"w": NAME}, INDEX)
    hostile.good(tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path).files) == ["model.safetensors"]


def test_shards_open_by_their_index(tmp_path: Path) -> None:
    saved(tmp_path / "pytorch_model-00001-of-00002.bin", "b", "a")
    saved(tmp_path / "pytorch_model-00002-of-00002.bin", "c")
    shard_of = dict.fromkeys("ab", "pytorch_model-00001-of-00002.bin") | {
        "c": "pytorch_model-00002-of-00002.bin"
    }
    hostile.index(tmp_path, shard_of, INDEX)
    opened = Checkpoint.open(tmp_path)
    assert {name: info.file for name, info in opened.tensors.items()} == shard_of
    assert len(opened.fingerprint()) == 64
    hostile.index(tmp_path, shard_of | {"a": "pytorch_model-00002-of-00002.bin", "d": "gone.bin"}, INDEX)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    for text in (
        "gone.bin: is missing",
        "places in another shard: a",
        "lacks tensors the index says it holds: a",
    ):
        assert text in str(caught.value)


def test_problems_of_all_shards_are_listed_together(tmp_path: Path) -> None:
    saved(tmp_path / "a.bin", "a")
    (tmp_path / "b.bin").write_bytes(hostile.LFS)
    archive(tmp_path / "c.bin", dumps({"c": Rebuilt(os.system, "false")}))
    torch.save({"d": 3, "e": "text"}, tmp_path / "d.bin")
    hostile.index(tmp_path, {name: f"{name}.bin" for name in "abcd"}, INDEX)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    found = [line.split(": ")[0].rpartition("/")[2] for line in str(caught.value).splitlines()]
    assert found == ["b.bin", "c.bin", "d.bin", "d.bin"]


# --- merges ---

TORCH = dict(
    zip(
        ("F32", "F64", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I64", "BOOL"),
        (*FLOATS, torch.int64, torch.bool),
        strict=True,
    )
)
BASE: Model = {
    "embed.weight": normal(1, 40, 8),
    "turned.weight": normal(2, 16, 8, dtype="F32"),
    "conv.weight": normal(3, 4, 3, 2, 5, dtype="F16"),
    "part.weight": normal(4, 6, 7, dtype="F64"),
    "small.weight": normal(5, 9, dtype="F8_E5M2", scale=1),
    "scale": normal(6, dtype="F32", scale=1),
    "empty": normal(7, 0, 3),
    "steps": raw("I64", np.arange(6).reshape(2, 3)),
    "mask": raw("BOOL", np.array([True, False, True])),
}
BASE["shared.weight"] = BASE["embed.weight"]
AGENTS = [{**agent, "shared.weight": agent["embed.weight"]} for agent in agents_of(BASE, 3)]


def stored(model: Model) -> dict[str, torch.Tensor]:
    """The model as torch tensors: some share storage, are parts of others, or lie transposed."""
    entries = {
        name: torch.frombuffer(bytearray(t.data or b"12"), dtype=TORCH[t.dtype])[: np.prod(t.shape, dtype=int)]
        .reshape(t.shape)
        for name, t in model.items()
    }  # fmt: skip
    if "shared.weight" in entries and "embed.weight" in entries:
        entries["shared.weight"] = entries["embed.weight"]
    for name, t in entries.items():
        if name == "turned.weight":
            entries[name] = t.t().contiguous().t()
        if name == "conv.weight":
            entries[name] = torch.nn.Parameter(t.contiguous(memory_format=torch.channels_last))
        if name == "part.weight":
            whole = torch.full((9, 20), 77.0, dtype=t.dtype)
            whole[2:8, 3:17:2] = t
            entries[name] = whole[2:8, 3:17:2]
        if name == "steps":
            entries[name] = t.t().contiguous().t()
    return entries


def bin_folder(
    path: Path,
    model: Model,
    shards: Mapping[str, Sequence[str]] | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint of one `.bin`, or of shards with their index."""
    path.mkdir()
    for file, names in (shards or {NAME: list(model)}).items():
        torch.save(stored({name: model[name] for name in names}), path / file)
    if shards:
        hostile.index(path, {name: file for file, names in shards.items() for name in names}, INDEX)
    for name, content in (files or {}).items():
        (path / name).write_text(content)
    return path


def halves(model: Model) -> dict[str, list[str]]:
    names = list(model)
    return {
        "pytorch_model-00001-of-00002.bin": names[1::2],
        "pytorch_model-00002-of-00002.bin": names[::2],
    }


def merge_into(out: Path, sources: Sequence[Path], **limits: Any) -> Path:
    base, *agents = (Checkpoint.open(source) for source in sources)
    merge(plan_merge(base, agents, RamPlus()), out, Limits(workers=2, device="cpu", **limits))
    assert not verify_output(out, read_data=True).problems
    return out


def test_a_few_bytes_expanded_to_terabytes_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 30, 1 << 20)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match="a: is expanded from 1 items to 1,125,899,906,842,624; save it"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_merge_of_bin_is_that_of_safetensors(io: str, tmp_path: Path) -> None:
    base = bin_folder(tmp_path / "base", BASE)
    agents = [
        bin_folder(tmp_path / "one", AGENTS[0], halves(AGENTS[0])),
        folders.folder(tmp_path / "two", AGENTS[1]),
        bin_folder(tmp_path / "three", AGENTS[2]) / NAME,
    ]
    zip_file(agents[2], {"archive/odd": b"x", **unzipped(agents[2])})  # nothing is aligned any more
    assert any(info.offset % 2 for info in Checkpoint.open(agents[2]).tensors.values())
    kinds = {name for name, info in Checkpoint.open(base).tensors.items() if info.recipe is not None}
    assert kinds == {"turned.weight", "conv.weight", "part.weight", "steps"}
    found = folders.read(merge_into(tmp_path / "out", [base, *agents], io=io))
    plain = [folders.folder(tmp_path / f"plain-{i}", model) for i, model in enumerate([BASE, *AGENTS])]
    assert found == folders.read(merge_into(tmp_path / "plain-out", plain)) == merged(BASE, AGENTS)
    again = merge_into(tmp_path / "again", [plain[0], *agents], io=io)
    assert folders.read(again) == found


def test_merge_into_a_sharded_bin_names_safetensors(tmp_path: Path) -> None:
    files = {"config.json": "{}", "tokenizer.json": "{}", "training_args.bin": ".."}
    base = bin_folder(tmp_path / "base", BASE, halves(BASE), files)
    agent = bin_folder(tmp_path / "agent", AGENTS[0])
    out = merge_into(tmp_path / "out", [base, agent])
    names = {path.name for path in out.iterdir()}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names == {*shards, hostile.INDEX, "config.json", "tokenizer.json", "README.md", "ramstream.json"}
    index = json.loads((out / hostile.INDEX).read_text())["weight_map"]
    assert index == {
        name: shard for shard, names in zip(shards, halves(BASE).values(), strict=True) for name in names
    }
    for shard in shards:
        assert set(load_file(out / shard)) == {name for name, file in index.items() if file == shard}
    assert folders.read(out) == merged(BASE, AGENTS[:1])
    left = json.loads((out / "ramstream.json").read_text())["summary"]["left_behind"]
    assert [line.partition(" ")[0] for line in left] == ["training_args.bin"]


def test_merge_into_a_single_bin_file(tmp_path: Path) -> None:
    base = bin_folder(tmp_path / "base", BASE) / NAME
    out = merge_into(tmp_path / "out", [base, folders.folder(tmp_path / "agent", AGENTS[0])])
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "README.md", "ramstream.json"}
    assert folders.read(out) == merged(BASE, AGENTS[:1])


@pytest.mark.parametrize("tied", [True, False])
def test_merge_of_transformers_bins_loads(tied: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": tied}
    config = transformers.Qwen2Config(**sizes, **heads, dtype="bfloat16")
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    sources = [tmp_path / name for name in ("base", "agent-1", "agent-2")]
    for t, path in enumerate(sources):
        if t:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.where(torch.rand(weight.shape) < 0.2, 0.01, 0.0).to(weight.dtype))
        if t < 2:
            path.mkdir()
            torch.save(model.state_dict(), path / NAME)
            config.save_pretrained(path)
        else:
            model.save_pretrained(path)
    out = merge_into(tmp_path / "out", sources)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype="auto", output_loading_info=True
        )
    assert not any(info.values()), info
    assert loaded.dtype == torch.bfloat16
    weights = loaded.state_dict()
    for name, t in folders.read(out).items():
        assert np.array_equal(weights[name].double().numpy(), t.values), name
    bases, *agents = (
        {n: bits_of(t) for n, t in transformers.AutoModelForCausalLM.from_pretrained(p).state_dict().items()}
        for p in sources
    )
    assert folders.read(out) == merged(bases, agents)


def bits_of(t: torch.Tensor) -> folders.Tensor:
    assert t.dtype == torch.bfloat16
    return folders.Tensor("BF16", tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes())
