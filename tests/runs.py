"""Small models, their folders, and runs of `ramstream merge` on them, for the tests of whole merges."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from numpy.typing import NDArray

from ramstream import Checkpoint, Limits, merge, plan_merge
from ramstream.engine import passes
from ramstream.engine.events import Advanced, Event, PassBegan
from ramstream.engine.merging import Outcome
from ramstream.methods import create
from ramstream.overlap import OverlapStore
from ramstream.plan import MatchOptions, MergePlan
from ramstream.types import Dtype

FIGURES = ("seconds", "workers", "device", "projected_memory", "peak_memory")
"""What of a record's summary says how it was made, and not what."""


@dataclass(frozen=True)
class Tensor:
    """Raw bits, flat, of a safetensors dtype."""

    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[Any]


Model = dict[str, Tensor]

_RAW = {"F64": "u8", "F32": "u4", "BF16": "u2", "F16": "u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "I64": "u8"}


def random_bits(rng: np.random.Generator, dtype: str, n: int) -> NDArray[Any]:
    """n weights of about N(0, 0.02) as raw bits."""
    if dtype.startswith("F8") or dtype == "I64":
        return rng.integers(0x10, 0x50, n, dtype=_RAW[dtype])
    values = rng.standard_normal(n, np.float32) * np.float32(0.02)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(f"f{np.dtype(_RAW[dtype]).itemsize}").view(_RAW[dtype])


def family(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]], agents: int = 3, seed: int = 0
) -> tuple[Model, list[Model]]:
    """A base of tensors `name: (dtype, shape)` and agents that moved some elements by a few steps."""
    rng = np.random.default_rng(seed)
    base = {
        name: Tensor(dtype, shape, random_bits(rng, dtype, int(np.prod(shape))))
        for name, (dtype, shape) in shapes.items()
    }
    shares = (0.05, 0.45, 0.3, 0.6)
    return base, [
        {name: _moved(rng, tensor, shares[t % 4]) for name, tensor in base.items()} for t in range(agents)
    ]


def _moved(rng: np.random.Generator, tensor: Tensor, share: float) -> Tensor:
    if tensor.dtype == "I64":
        return tensor
    draw = rng.integers(0, 256, tensor.bits.size, dtype=np.uint8)
    step = 1 << max(0, reference.FORMATS[tensor.dtype].mantissa - 7)
    steps = (draw % 4 + 1).astype(tensor.bits.dtype) * tensor.bits.dtype.type(step)
    return Tensor(tensor.dtype, tensor.shape, tensor.bits + np.where(draw < 256 * share, steps, 0))


def write_file(path: Path, model: Mapping[str, Tensor], pad: int = 0) -> None:
    """One safetensors file in the model's order; `pad` more bytes of header shift the data."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.items():
        begin, end = end, end + tensor.bits.nbytes
        table[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    header = header.ljust(-(-len(header) // 8) * 8 + pad)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in model.values():
            file.write(tensor.bits.tobytes())


def write_folder(
    folder: Path, model: Model, shards: int = 1, order: Sequence[str] | None = None, pad: int = 0
) -> Path:
    """A checkpoint folder with config and tokenizer, its tensors dealt in `order` to `shards` files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "test", "torch_dtype": "bfloat16"}\n')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n')
    names = list(order or model)
    if shards == 1:
        write_file(folder / "model.safetensors", {name: model[name] for name in names}, pad)
        return folder
    weight_map = {}
    for k, part in enumerate(np.array_split(np.arange(len(names)), shards), start=1):
        file = f"model-{k:05}-of-{shards:05}.safetensors"
        write_file(folder / file, {names[i]: model[names[i]] for i in part}, pad)
        weight_map.update({names[i]: file for i in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_family(root: Path, base: Model, agents: Sequence[Model], shards: int = 1) -> list[Path]:
    """Folders of base and agents, all alike."""
    folders = [write_folder(root / "base", base, shards)]
    return folders + [write_folder(root / f"agent-{t}", a, shards) for t, a in enumerate(agents, start=1)]


def plan_of(
    paths: Sequence[Path],
    method: str = "ram-plus",
    dtype: Dtype | None = None,
    options: MatchOptions | None = None,
    **parameters: object,
) -> MergePlan:
    """The plan of a merge, base first."""
    made = create(method, {key: str(value) for key, value in parameters.items()})
    checkpoints = [Checkpoint.open(path) for path in paths]
    return plan_merge(checkpoints[0], checkpoints[1:], made, options, dtype)


def sources(model: Model) -> dict[str, reference.Source]:
    """The tensors of a model that are merged, for the oracle."""
    return {n: reference.Source(t.dtype, t.bits) for n, t in model.items() if t.dtype != "I64"}


def read_weights(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes of an output, read without ramstream."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + length])
        table.pop("__metadata__")
        for name, entry in table.items():
            begin, end = entry["data_offsets"]
            found[name] = data[8 + length + begin : 8 + length + end]
    return found


def promised(folder: Path) -> dict[str, bytes]:
    """What "same bytes" is about: weights, index and config of an output, by file."""
    names = [*folder.glob("*.safetensors*"), folder / "config.json"]
    return {path.name: path.read_bytes() for path in names}


def record(folder: Path) -> dict[str, Any]:
    """`ramstream.json` without what says how fast and in how much memory it was made, and the inputs' times."""
    data: dict[str, Any] = json.loads((folder / "ramstream.json").read_bytes())
    data.pop("inputs")
    for figure in FIGURES:
        data["summary"].pop(figure)
    return data


def contents(folder: Path) -> dict[str, Any]:
    """Everything of an output by file, the record without its figures."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {**files, "ramstream.json": record(folder)}


def same_store(one: Path, two: Path) -> bool:
    """Whether two stores hold the same tallies and bits."""
    a, b = OverlapStore(one), OverlapStore(two)
    same_bits = np.array_equal(a.bits[...], b.bits[...])
    return same_bits and a.tallies().tobytes() == b.tallies().tobytes()


class Stop(BaseException):
    """Ends a run from outside, like a signal."""


def stop_after(title: str, finished: int) -> Callable[[Event], None]:
    """A listener that ends the pass `title` once that many units are vouched for."""
    state: dict[str, Any] = {"title": "", "left": finished}

    def listen(event: Event) -> None:
        if isinstance(event, PassBegan):
            state["title"] = event.title
        if isinstance(event, Advanced) and state["title"] == title:
            state["left"] -= 1
            if state["left"] == 0:
                raise Stop

    return listen


@contextmanager
def small_steps() -> Iterator[None]:
    """Every unit is its own task, and vouched for at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "BATCH_SECONDS", 0.0)
        patch.setattr(passes, "TASK_UNITS", 1)
        yield


def stopped(plan: MergePlan, out: Path, title: str, finished: int = 1, **options: Any) -> None:
    """A run of `plan` that was stopped in the pass `title` after `finished` units."""
    with small_steps(), pytest.raises(Stop):
        merge(plan, out, Limits(workers=1, device="cpu"), listener=stop_after(title, finished), **options)


def run(
    plan: MergePlan, out: Path, limits: Limits | None = None, **options: Any
) -> tuple[Outcome, list[str]]:
    """Merge on the CPU; the outcome and the titles of its passes."""
    titles: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, PassBegan):
            titles.append(event.title)

    return merge(plan, out, limits or Limits(workers=2, device="cpu"), listener=listen, **options), titles


def units(journal: Path) -> int:
    """Finished units that a journal's whole lines speak of."""
    if not journal.exists():
        return 0
    return sum(
        b' {"unit":' in line and line.endswith(b"\n") for line in journal.read_bytes().splitlines(True)
    )


def cli(*words: object) -> int:
    """Exit code of `ramstream WORDS…` run in this process."""
    import signal

    from ramstream.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ramstream", *map(str, words)])
        handler = signal.getsignal(signal.SIGTERM)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
