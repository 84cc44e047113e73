"""Damaged checkpoints by the thousand: each case is a kind and a number, the same every time.

A case is a good folder with something in it changed by rule (`hostile.mutated`). It is opened, planned beside a
good checkpoint and now and then merged. It must succeed, or fail with a RamstreamError whose message names the
folder and is fit for a terminal; and what is read must be what safetensors or torch read, where they read it. All
the while the process is watched: for what it opens, writes, runs and imports, and for time and memory.

    python tests/fuzz.py KIND NUMBER FOLDER     writes the checkpoints of one case there and says how it ends
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
import traceback
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import hostile
import numpy as np
import torch
from folders import Model, agents_of, folder, normal, raw, tensor, weights
from hostile import amplified, mutated
from safetensors import SafetensorError, deserialize

import ramstream
from ramstream import Checkpoint, Limits, MatchOptions, merge, plan_merge
from ramstream.checkpoint.safetensors import read_header
from ramstream.checkpoint.strided import gather
from ramstream.checkpoint.torchbin import read_archive
from ramstream.errors import RamstreamError
from ramstream.folder import with_dtype, without_quantization
from ramstream.methods import create
from ramstream.types import ITEMSIZE, Dtype, Strided, TensorInfo, config_name

SECONDS = 20
"""What a case may take; the usual one takes a thousandth of one."""
ADDRESSES = 1 << 30
"""Bytes of address space that all cases together may add."""
GROWN_SECONDS, GROWN_ADDRESSES = 30, 1 << 29
"""The same for a case whose files have some MB, and ask for much; of processor time."""
PEAK = 48 << 20
"""Bytes that Python may allocate at once in a case; its files have a few KB, at most some 100 KB."""
LONGEST = 20_000
"""Characters of a message."""

Files = dict[str, bytes]


class Finding(AssertionError):
    """A case that ended as none may."""


class Hang(BaseException):
    """A case that took too long; nothing that catches exceptions should catch it."""


# --- the good checkpoints ---

PLAIN: Model = {
    "model.embed_tokens.weight": normal(1, 6, 4),
    "model.layers.0.up_proj.weight": normal(2, 4, 3, dtype="F32"),
    "norm.bias": normal(3, 5, dtype="F16"),
    "steps": raw("I64", np.arange(2)),
    "empty": normal(4, 0, 3),
}
CONFIG = {
    "architectures": ["SomeCausalLM"],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 6,
    "text_config": {"vocab_size": 6, "dtype": "bfloat16", "tie_word_embeddings": True},
}
BLOCKS: Model = {
    "a.weight": normal(5, 4, 6, dtype="F8_E4M3", scale=1),
    "a.weight_scale_inv": tensor("F32", [[0.5, 2.0, 1.0], [1.0, 1.5, 4.0]]),
    "b.weight": normal(6, 2, 3, 4, dtype="F8_E5M2", scale=1),
    "b.weight_scale": raw("U8", np.full((2, 2, 2), 127, np.uint8)),
    "norm": normal(7, 4),
}
BLOCKS_CONFIG = {
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2], "scale_fmt": "ue8m0"},
}
ROWS: Model = {
    "a.weight": BLOCKS["a.weight"],
    "a.scale": tensor("BF16", [0.25, 0.5, 2.0, 1.0]),
    "b.weight": normal(6, 3, 4, dtype="F8_E5M2", scale=1),
    "b.qscale_weight": tensor("F16", 0.25),
    "b.input_scale": tensor("F32", 1.5),
    "k_scale": tensor("F32", [1.0]),
    "plain": normal(7, 4, dtype="F8_E4M3"),
}
ROWS_CONFIG = {"quantization_config": {"quant_method": "fp8"}, "text_config": {"quantization_config": {}}}
TOKENIZER = {"chat_template": [{"name": "default", "template": "{{ x }}"}], "model_max_length": 10**30}
ADAPTER: Model = {
    "base_model.model.model.layers.0.up_proj.lora_A.weight": normal(8, 2, 3, dtype="F32"),
    "base_model.model.model.layers.0.up_proj.lora_B.weight": normal(9, 4, 2, dtype="F32"),
    "base_model.model.model.embed_tokens.lora_embedding_A": normal(10, 2, 6),
    "base_model.model.model.embed_tokens.lora_embedding_B": normal(11, 4, 2),
    "base_model.model.norm.modules_to_save.bias": normal(12, 5, dtype="F16"),
}
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "use_rslora": True,
    "fan_in_fan_out": False,
    "rank_pattern": {"up_proj": 2, r"model\.layers\.[0-9]+\.(up|down)_proj": 2},
    "alpha_pattern": {".*embed.*": 1.5},
    "modules_to_save": ["norm"],
    "init_lora_weights": True,
}
SHARDS = {
    "model-1.safetensors": ["model.embed_tokens.weight", "steps"],
    "sub/model-2.safetensors": ["model.layers.0.up_proj.weight", "norm.bias", "empty"],
}


def _as_torch(model: Model) -> dict[str, torch.Tensor]:
    """The tensors as torch's: one is a transposed view, one a parameter."""
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
    result = {}
    for name, t in model.items():
        items = torch.frombuffer(bytearray(t.data + bytes(8)), dtype=dtypes[t.dtype])
        result[name] = items[: int(np.prod(t.shape))].clone().reshape(t.shape)
        if "up_proj" in name:
            result[name] = result[name].t().contiguous().t()
        elif "embed" in name:
            result[name] = torch.nn.Parameter(result[name], requires_grad=False)
    return result


def _members(state: object, **options: Any) -> dict[str, bytes]:
    """The members of the zip file that torch makes of a state dict."""
    stream = io.BytesIO()
    torch.save(state, stream, **options)
    with zipfile.ZipFile(stream) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def _bin(members: Mapping[str, bytes]) -> bytes:
    return b"".join(record.data for record in mutated.packed(list(members.items())))


# --- kinds of damage ---

Damage = Callable[[Random, Files], Files]
"""Files to change, of those that a folder has."""


def _header(rng: Random, files: Files, name: str = hostile.NAME) -> Files:
    """A safetensors file: its header's tree, its bytes, its length; or whole, with other tensors."""
    data = files[name]
    start = 8 + int.from_bytes(data[:8], "little")
    choice = rng.random()
    if choice < 0.3:
        return {name: mutated.other_tensors(rng, data)}
    if choice < 0.5:
        return {name: mutated.some_bytes(rng, data, slice(0, start))}
    text = mutated.json_text(rng, data[8:start], list(files))
    content = data[start:] if rng.random() < 0.9 else mutated.some_bytes(rng, data[start:])
    length = len(text).to_bytes(8, "little") if rng.random() < 0.97 else rng.choice(mutated.PACKED)
    return {name: length + text + content}


_PLACES = (
    *(
        "../secret.safetensors",
        "../secret.bin",
        "/dev/zero",
        "/dev/stdin",
        "/etc/passwd",
        "pipe",
        "loop",
        "null",
    ),
    *(
        "sub",
        "sub/",
        "sub/../../secret.safetensors",
        "away/secret.safetensors",
        "dangling",
        "/proc/self/environ",
    ),
    *("model-1.safetensors", "./model-1.safetensors", "sub//model-2.safetensors", "sub\\model-2.safetensors"),
)
"""What an index may name; some of them are there (`_trap`)."""


def _trap(path: Path) -> None:
    """What must not be opened, beside and in a folder."""
    weights(path.parent / "secret.safetensors", PLAIN)
    os.mkfifo(path / "pipe")
    for name, target in {"loop": "loop", "null": "/dev/null", "away": "..", "dangling": "gone"}.items():
        (path / name).symlink_to(target)


def _index(rng: Random, files: Files) -> Files:
    name = next(name for name in files if name.endswith(".index.json"))
    return {name: mutated.json_text(rng, files[name], (*_PLACES, *files))}


def _config(rng: Random, files: Files) -> Files:
    return {"config.json": mutated.json_text(rng, files["config.json"], ("SomeCausalLM", "LMHeadModel"))}


def _tokenizer(rng: Random, files: Files) -> Files:
    return {"tokenizer_config.json": mutated.json_text(rng, files["tokenizer_config.json"])}


def _float8(rng: Random, files: Files) -> Files:
    kinds = rng.choice(((_header,), (_config,), (_header, _config)))
    return {name: data for damage in kinds for name, data in damage(rng, files).items()}


_PATTERNS = (
    "up_proj",
    ".*",
    "(a|a)*$",
    "(.*)*x",
    "a{1,9999999}",
    "(?P<a>",
    "use_dora",
    "gaussian",
    r"\1",
    "^$",
)


def _adapter(rng: Random, files: Files) -> Files:
    if rng.random() < 0.4:
        return _header(rng, files, "adapter_model.safetensors")
    return {"adapter_config.json": mutated.json_text(rng, files["adapter_config.json"], _PATTERNS)}


def _archive(rng: Random, files: Files) -> Files:
    """A zip file: its bytes, most of all its directory; the numbers of its headers."""
    data = files["pytorch_model.bin"]
    if rng.random() < 0.4:
        places = slice(data.find(b"PK\x01\x02"), None) if rng.random() < 0.6 else slice(None)
        return {"pytorch_model.bin": mutated.some_bytes(rng, data, places)}
    return {"pytorch_model.bin": mutated.an_archive(rng, rng.choice(_RECORDS))}


def _pickle(rng: Random, files: Files) -> Files:
    members, program = rng.choice(_PROGRAMS)
    name = next(name for name in members if name.endswith("data.pkl"))
    changed = mutated.a_pickle(rng, program, rng.choice(_PROGRAMS)[1])
    return {"pytorch_model.bin": _bin({**members, name: changed})}


def _shared(rng: Random, files: Files) -> Files:
    members, _ = _PROGRAMS[0]
    name = next(name for name in members if name.endswith("data.pkl"))
    return {"pytorch_model.bin": _bin({**members, name: amplified.a_pickle(rng)})}


def _more_tensors(rng: Random, files: Files) -> Files:
    return {hostile.NAME: amplified.tensors(rng, files[hostile.NAME], _MORE_NAMES)}


def _longer(file: str) -> Damage:
    return lambda rng, files: {file: amplified.json_text(rng, files[file], _MORE_NAMES)}


def _longer_config(rng: Random, files: Files) -> Files:
    """A config, and at times the weights beside it."""
    return {**_longer("config.json")(rng, files), **(_more_tensors(rng, files) if rng.random() < 0.5 else {})}


def _longer_adapter(rng: Random, files: Files) -> Files:
    """A config and the weights it is about, which are looked for in one another."""
    changed = {}
    if rng.random() < 0.8:
        changed = _longer("adapter_config.json")(rng, files)
    if not changed or rng.random() < 0.6:
        name = "adapter_model.safetensors"
        changed[name] = amplified.tensors(rng, files[name], _MORE_NAMES)
    return changed


_MORE_NAMES = (
    "dtype",
    "quantization_config",
    "a{9000}",
    "(a|b){99}.*",
    ".lora_A.weight",
    "x.weight_scale",
    "é",
)


def _odd() -> dict[str, torch.Tensor]:
    """Tensors that pickle in other ways: one with an attribute, one of a dtype without a storage of its own."""
    named = torch.ones(2, 3)
    named.sequence_parallel = True
    return {"named": named, "u16": torch.arange(3, dtype=torch.int32).to(torch.uint16)}


_STATE = _as_torch(PLAIN)
_MEMBERS = [
    _members(_STATE),
    _members(_STATE, pickle_protocol=4),
    _members({**_STATE, **_odd()}),
]
_PROGRAMS = [
    (members, mutated.instructions(next(data for name, data in members.items() if name.endswith("data.pkl"))))
    for members in _MEMBERS
]
_RECORDS = [mutated.packed(list(_MEMBERS[0].items()), wide) for wide in (False, True)]


def _plain(path: Path, is_agent: bool, shards: Mapping[str, list[str]] | None = None) -> None:
    folder(path, agents_of(PLAIN, 1)[0] if is_agent else PLAIN, shards, CONFIG)


def _sharded(path: Path, is_agent: bool) -> None:
    _plain(path, is_agent, SHARDS)


def _blocks(path: Path, is_agent: bool) -> None:
    folder(path, BLOCKS, config=BLOCKS_CONFIG)


def _rows(path: Path, is_agent: bool) -> None:
    folder(path, ROWS, config=ROWS_CONFIG)


def _lora(path: Path, is_agent: bool) -> None:
    if not is_agent:
        return _plain(path, is_agent)
    weights(path / "adapter_model.safetensors", ADAPTER)
    (path / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
    return None


def _one_bin(path: Path, is_agent: bool) -> None:
    path.mkdir(parents=True)
    (path / "pytorch_model.bin").write_bytes(_bin(_MEMBERS[0]))
    (path / "config.json").write_text(json.dumps(CONFIG))


def _bins(path: Path, is_agent: bool) -> None:
    """Two `.bin` shards and their index."""
    path.mkdir(parents=True)
    names = list(_STATE)
    shards = {"pytorch_model-1.bin": names[:2], "pytorch_model-2.bin": names[2:]}
    for file, part in shards.items():
        (path / file).write_bytes(_bin(_members({name: _STATE[name] for name in part})))
    weight_map = {name: file for file, part in shards.items() for name in part}
    hostile.index(path, weight_map, "pytorch_model.bin.index.json")


def _tied(path: Path, is_agent: bool) -> None:
    """A base whose config alone tells whether its embedding is its head; an agent that trained it whole."""
    if not is_agent:
        folder(path, PLAIN, config={"architectures": ["SomeCausalLM"], "text_config": {"vocab_size": 6}})
        return
    name = "base_model.model.model.embed_tokens.modules_to_save.weight"
    weights(path / "adapter_model.safetensors", {name: normal(13, 6, 4)})
    (path / "adapter_config.json").write_text(
        json.dumps({**ADAPTER_CONFIG, "modules_to_save": ["embed_tokens"]})
    )


def _tokenized(path: Path, is_agent: bool) -> None:
    folder(path, PLAIN, config=CONFIG, files={"tokenizer_config.json": json.dumps(TOKENIZER)})


@dataclass(frozen=True)
class Kind:
    """What writes a good folder (whether it is an agent's), what damages it, and what may be damaged."""

    write: Callable[[Path, bool], None]
    damage: Damage
    roles: tuple[str, ...] = ("base", "agent", "agent")
    share: int = 2
    """Of all cases, as many times as others."""
    grown: bool = False
    """Whether a case is larger than a good folder, so that it may take longer."""


KINDS = {
    "header": Kind(_plain, _header),
    "index": Kind(_sharded, _index),
    "config": Kind(_plain, _config, share=1),
    "tied": Kind(_tied, _config, ("base",), share=1),
    "tokenizer": Kind(_tokenized, _tokenizer, share=1),
    "blocks": Kind(_blocks, _float8),
    "rows": Kind(_rows, _float8),
    "adapter": Kind(_lora, _adapter, ("agent",)),
    "archive": Kind(_one_bin, _archive),
    "pickle": Kind(_one_bin, _pickle),
    "bin index": Kind(_bins, _index),
}

GROWN = {
    "shared values": Kind(_one_bin, _shared, ("agent",), grown=True),
    "many tensors": Kind(_plain, _more_tensors, grown=True),
    "long index": Kind(_sharded, _longer(hostile.INDEX), grown=True),
    "long config": Kind(_blocks, _longer_config, ("base",), grown=True),
    "long tokenizer": Kind(_tokenized, _longer("tokenizer_config.json"), grown=True),
    "long adapter": Kind(_lora, _longer_adapter, ("agent",), grown=True),
}
"""Small files that make a careless reader work for long."""


# --- one case ---


class Bench:
    """Folders of one kind in `home`, where case after case is written, checked and undone."""

    def __init__(self, home: Path, name: str) -> None:
        self.home, self.name, self.kind = home / name.replace(" ", "-"), name, (KINDS | GROWN)[name]
        self.good, self.files = {}, {}
        for role in ("agent", "base"):
            for place in ("good", "bad"):
                self.kind.write(self.home / place / role, role == "agent")
            self.good[role] = Checkpoint.open(self.home / "good" / role)
            self.files[role] = _files(self.home / "bad" / role)
            _trap(self.home / "bad" / role)
        self.out = self.home / "out"
        self.method = create("ram", {})

    def write(self, number: int) -> tuple[str, Random]:
        """Write one case; the role of what is damaged, and the case's random generator."""
        rng = Random(f"{self.name} {number}")
        role = self.kind.roles[number % len(self.kind.roles)]
        self.changed = self.kind.damage(rng, self.files[role])
        for file, data in self.changed.items():
            (self.home / "bad" / role / file).write_bytes(data)
        return role, rng

    def undo(self, role: str) -> None:
        """Make the damaged folder good again."""
        for file in self.changed:
            (self.home / "bad" / role / file).write_bytes(self.files[role][file])

    def check(self, number: int, whole: bool = False) -> str:
        """How a case ends, in a word; a Finding where it ends as none may. `whole`: merge it, too."""
        role, rng = self.write(number)
        try:
            seconds = GROWN_SECONDS if self.kind.grown else SECONDS
            with within(seconds, f"{self.name} {number}", processor=self.kind.grown):
                return self._end(role, rng, whole)
        finally:
            self.undo(role)
            shutil.rmtree(self.out, ignore_errors=True)

    def _end(self, role: str, rng: Random, whole: bool) -> str:
        path = self.home / "bad" / role
        with watched(reads=path, text=role) as refused:
            opened = Checkpoint.open(path)
        if refused:
            return "refused"
        if rng.random() < 0.7 and not self.kind.grown:  # others take long for those
            compare(opened)
        if role == "base" and opened.config is not None:
            with watched(reads=path, text=role):
                follow(path / "config.json")
        base, agent = (opened, self.good["agent"]) if role == "base" else (self.good["base"], opened)
        options = MatchOptions(
            missing=rng.choice(("error", "base")),
            extra=rng.choice(("error", "ignore")),
            vocab=rng.choice(("error", "base-rows")),
        )
        dtype = rng.choice((None, None, Dtype.BF16, Dtype.F32))
        with watched(reads=self.home, text=role) as refused:
            plan = plan_merge(base, [agent], self.method, options, dtype)
            fit_for_a_terminal(str(plan))
        if refused or not whole:
            return "unplanned" if refused else "planned"
        with watched(writes=self.out, text=role) as refused:
            merge(plan, self.out / "merged", Limits(workers=1, device="cpu", memory="2GB"))
        return "unmerged" if refused else "merged"


def _files(path: Path) -> Files:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def fit_for_a_terminal(text: str) -> None:
    """A Finding where a text would be more than lines of letters, or floods the screen."""
    if len(text) > LONGEST:
        raise Finding(f"a text of {len(text):,} characters: {text[:200]}")
    for line in text.split("\n"):
        if not line.isprintable():
            raise Finding(f"a text with control characters: {line!r}")


def follow(path: Path) -> None:
    """What a merge writes into a config at its end must be a JSON object, too."""
    data = path.read_bytes()
    for changed in (with_dtype(data, "float32"), without_quantization(data)):
        if not isinstance(json.loads(changed), dict):
            raise Finding("a config that is no object")


# --- what others read ---


def compare(opened: Checkpoint) -> None:
    """A Finding where tensors are other ones than safetensors or torch read, if they read the file."""
    for file in opened.files:
        path = opened.folder / file
        content = path.read_bytes()
        read, theirs = (read_archive, _by_torch) if file.endswith(".bin") else (read_header, _by_safetensors)
        found = theirs(path, content)
        ours = {info.name: info for info in read(path, file, "again")[1]}
        if found is None:
            if file.endswith(".bin") or any(info.dtype not in ITEMSIZE for info in ours.values()):
                continue  # torch reads few pickles of other protocols, and safetensors no dtype it does not know
            raise Finding(f"only we read {file}")
        if found.keys() != ours.keys():
            raise Finding(f"{file} holds {list(ours)}, for others it holds {list(found)}")
        for name, info in ours.items():
            if (info.dtype, info.shape, bytes_of(content, info)) != found[name]:
                raise Finding(f"{name} of {file} is {info}, for others it is {found[name]}")


Read = dict[str, tuple[str, tuple[int, ...], bytes]]


def _by_safetensors(path: Path, content: bytes) -> Read | None:
    try:
        found = deserialize(content)
    except SafetensorError:
        return None
    return {name: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in found}


_NAMES = {
    getattr(torch, word): name
    for name, word in {
        **{d.name: config_name(d) for d in Dtype},
        **{
            f"{kind[0].upper()}{bits}": f"{kind}{bits}"
            for kind in ("int", "uint")
            for bits in (8, 16, 32, 64)
        },
        "BOOL": "bool",
    }.items()
}


def _by_torch(path: Path, content: bytes) -> Read | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # it has many
        return None
    return {
        name: (
            _NAMES[t.dtype],
            tuple(t.shape),
            t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in found.items()
    }


def bytes_of(content: bytes, info: TensorInfo) -> bytes:
    """A tensor's bytes, one after the other, out of its file's."""
    if not isinstance(info.recipe, Strided):
        return content[info.offset : info.offset + info.nbytes]
    out = np.zeros(info.elements, f"u{ITEMSIZE[info.dtype]}")
    items = (len(content) - info.offset) // out.itemsize
    gather(np.frombuffer(content, out.dtype, items, info.offset), info.shape, info.recipe.strides, 0, out)
    return out.tobytes()


# --- the watch ---


@contextmanager
def within(seconds: float, what: str, processor: bool = False) -> Iterator[None]:
    """Hang where the block takes longer; or more of the `processor`'s time, which other work does not stretch."""
    timer, alarm = (signal.ITIMER_PROF, signal.SIGPROF) if processor else (signal.ITIMER_REAL, signal.SIGALRM)

    def end(*_: object) -> None:
        raise Hang(f"{what}: after {seconds} s still going")

    before = signal.signal(alarm, end)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(alarm, before)


@contextmanager
def bounded_memory(more: int = ADDRESSES) -> Iterator[None]:
    """What would take more address space than `more` bytes beyond today's is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@dataclass
class _Watch:
    """What may be read and written, None for anything; and what was touched beside."""

    reads: str | None
    writes: str | None
    faults: list[str] = field(default_factory=list)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what may not be: whatever Python reports (PEP 578) that reads, changes, runs or loads something."""
        merges = self.writes is not None
        if event == "open":
            path, _, flags = arguments
            changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            bad = (
                not _inside(path, self.writes, *_CACHES)
                if changes
                else not (merges or _inside(path, self.reads, *_CODE))
            )
        elif event in _CHANGES:
            paths = arguments[: _CHANGES[event]]
            bad = not all(_inside(path, self.writes, *_CACHES) for path in paths)
        elif event == "import":
            top = arguments[0].partition(".")[0]
            bad = not merges and top != "ramstream" and top not in sys.stdlib_module_names
        else:
            bad = event in _RUNS or (
                event == "pickle.find_class" and not merges
            )  # numba's caches are pickles
        if bad:
            self.faults.append(f"{event} {arguments}")


_PACKAGE = os.path.dirname(ramstream.__file__)
_CODE = (_PACKAGE, *{os.path.dirname(os.__file__), os.path.dirname(sysconfig.get_path("purelib"))})
_CACHES = tuple(os.path.join(_PACKAGE, name, "__pycache__") for name in ("kernels", "methods", "."))
_CHANGES = {
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.utime"), 1
    ),
    **dict.fromkeys(("os.rename", "os.link"), 2),
    **dict.fromkeys(("os.symlink", "shutil.rmtree"), 1),
}
"""Events that change files, and how many of their arguments are paths."""
_RUNS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.spawn"),
    *("socket.connect", "socket.bind", "ctypes.dlopen", "urllib.Request"),
}
_watch: _Watch | None = None


def _inside(path: Any, *folders: str | None) -> bool:
    """Whether a path, as it is written, lies in one of the folders; what is open already does."""
    if isinstance(path, int):
        return True
    text = os.path.abspath(os.fsdecode(path))
    return any(folder is not None and (text == folder or text.startswith(f"{folder}/")) for folder in folders)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None:
        _watch.see(event, arguments)


_hooked = False


@contextmanager
def watched(*, text: str, reads: Path | None = None, writes: Path | None = None) -> Iterator[list[str]]:
    """A RamstreamError ends the block and is put into the list that it gets; what else may not be is a Finding.

    Files are read below `reads`, and changed below `writes`; with `writes` anything may be read. Messages name
    `text`.
    """
    global _watch, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # for good: there is no taking it off
        _hooked = True
    refused: list[str] = []
    watch = _watch = _Watch(*(None if path is None else str(path) for path in (reads, writes)))
    try:
        yield refused
    except RamstreamError as error:
        refused.append(str(error))
    except Hang as error:
        raise Finding(str(error)) from error
    except Finding:
        raise
    except BaseException as error:
        raise Finding(f"{type(error).__name__}: {error}") from error
    finally:
        _watch = None
    if watch.faults:
        raise Finding(f"it did what it may not: {'; '.join(watch.faults[:5])}")
    for message in refused:
        fit_for_a_terminal(message)
        if text not in message:
            raise Finding(f"a message that does not name {text}: {message}")


# --- many cases ---


@dataclass
class Report:
    """What became of many cases."""

    ends: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def dealt(kind: str, cases: int) -> int:
    """How many of all cases are of a kind."""
    return -(-cases * KINDS[kind].share // sum(other.share for other in KINDS.values()))


def run(home: Path, name: str, numbers: range, merge_every: int = 150) -> Report:
    """Check cases of a kind; of those that can be merged one in so many is, of small ones one in 20 is measured."""
    bench, report, planned = Bench(home, name), Report(), 0
    with suppress(Finding):
        bench.check(-1, whole=True)  # what is loaded on first use
    with bounded_memory(GROWN_ADDRESSES if bench.kind.grown else ADDRESSES):
        for number in numbers:
            try:
                end = (
                    _measured(bench, number)
                    if number % 20 == 0 and not bench.kind.grown
                    else bench.check(number, planned >= merge_every)
                )
                planned = planned + 1 if end == "planned" else 0 if end in ("merged", "unmerged") else planned
            except Finding as finding:
                end = "found"
                where = traceback.extract_tb((finding.__cause__ or finding).__traceback__)[-1]
                report.findings.append(f"{name} {number}: {finding} ({where.filename}:{where.lineno})")
            report.ends[end] += 1
    return report


def _measured(bench: Bench, number: int) -> str:
    """How a case ends; a Finding where Python allocates too much at once."""
    tracemalloc.start()
    try:
        end = bench.check(number)
        if tracemalloc.get_traced_memory()[1] > PEAK:
            raise Finding(f"{tracemalloc.get_traced_memory()[1]:,} bytes were allocated at once")
        return end
    finally:
        tracemalloc.stop()


def main(name: str, number: int, home: Path) -> None:
    """Write one case, and show how it ends."""
    bench = Bench(home, name)
    role, _ = bench.write(number)
    print(bench.home / "bad" / role)
    with suppress(Finding):
        print(bench.check(number, whole=True))
        return
    bench.write(number)
    traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
