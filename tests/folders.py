"""Small checkpoint folders written and read by hand: tensors as raw bits, any dtype, any shards, any side files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hostile
import numpy as np
import reference
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Tensor:
    """A tensor as a file holds it: dtype as safetensors spells it, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def source(self) -> reference.Source:
        """The tensor for the oracle; float dtypes only."""
        return reference.Source(self.dtype, np.frombuffer(self.data, reference.FORMATS[self.dtype].raw))

    @property
    def values(self) -> np.ndarray:
        """float64, in the tensor's shape; float dtypes only."""
        return reference.widen(self.source.bits, self.dtype, "F64").reshape(self.shape)


Model = dict[str, Tensor]


def tensor(dtype: str, values: ArrayLike) -> Tensor:
    """Values rounded to a float dtype."""
    array = np.asarray(values, np.float64)
    wide = array if dtype == "F64" else array.astype(np.float32)
    return Tensor(dtype, array.shape, reference.narrow(wide.ravel(), dtype).tobytes())


def raw(dtype: str, array: np.ndarray) -> Tensor:
    """The bytes of an array under any dtype's name: integers, booleans, dtypes nobody knows."""
    return Tensor(dtype, array.shape, array.tobytes())


def normal(seed: int, *shape: int, dtype: str = "BF16", scale: float = 0.02) -> Tensor:
    """Weights as a model has them."""
    return tensor(dtype, np.random.default_rng(seed).normal(0, scale, shape))


def trained(base: Tensor, seed: int, share: float = 0.3, dtype: str | None = None) -> Tensor:
    """A fine-tune of a float tensor: a share of its elements moved by a few percent, the others bit-equal."""
    rng = np.random.default_rng(seed)
    values = base.values
    moved = rng.random(base.shape) < share
    new = tensor(base.dtype, np.where(moved, values * rng.choice([0.9, 1.1], base.shape), values))
    return new if dtype in (None, base.dtype) else tensor(dtype or "", new.values)


def agents_of(base: Model, count: int, seed: int = 100) -> list[Model]:
    """Fine-tunes of a model; tensors of other dtypes than floats stay."""
    return [
        {
            name: trained(tensor, seed + 1000 * t + i) if tensor.dtype in reference.FORMATS else tensor
            for i, (name, tensor) in enumerate(base.items())
        }
        for t in range(count)
    ]


def weights(path: Path, model: Model) -> Path:
    """One safetensors file."""
    header, end = {}, 0
    for name, t in model.items():
        begin, end = end, end + len(t.data)
        header[name] = hostile.entry(t.dtype, list(t.shape), [begin, end])
    path.parent.mkdir(parents=True, exist_ok=True)
    return hostile.weight_file(path, header, b"".join(t.data for t in model.values()))


def folder(
    path: Path,
    model: Model,
    shards: Mapping[str, Sequence[str]] | None = None,
    config: object = None,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """A checkpoint: one `model.safetensors`, or shards (file: names) with their index; side files by name."""
    path.mkdir(parents=True, exist_ok=True)
    if shards is None:
        weights(path / hostile.NAME, model)
    else:
        for file, names in shards.items():
            weights(path / file, {name: model[name] for name in names})
        hostile.index(path, {name: file for file, names in shards.items() for name in names})
    texts = dict(files or {})
    if config is not None:
        texts["config.json"] = config if isinstance(config, (str, bytes)) else json.dumps(config)
    for name, content in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path) -> Model:
    """The tensors of a safetensors file, or of all of a folder's, in their order."""
    if path.is_dir():
        return {name: t for file in sorted(path.rglob("*.safetensors")) for name, t in read(file).items()}
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: Tensor(e["dtype"], tuple(e["shape"]), content[slice(*(start + o for o in e["data_offsets"]))])
        for name, e in header.items()
    }


def merged(base: Model, agents: Sequence[Model], dtype: str | None = None, **options: object) -> Model:
    """What the oracle makes of them, in `dtype` or each tensor's; tensors that are no floats are the base's.

    Agents may hold more or fewer rows. Options are those of `reference.merge`.
    """
    floats = {name: t for name, t in base.items() if t.dtype in reference.FORMATS}
    sources = [
        {
            name: agent[name].source.head(0, int(np.prod(t.shape, dtype=int)))
            for name, t in floats.items()
            if name in agent
        }
        for agent in agents
    ]
    done = reference.merge({name: t.source for name, t in floats.items()}, sources, out=dtype, **options)
    return {
        name: Tensor(dtype or t.dtype, t.shape, done.bits[name].tobytes()) if name in floats else t
        for name, t in base.items()
    }
