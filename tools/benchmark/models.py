"""Synthetic checkpoints, made when a group first wants them, each once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import make_checkpoint
import numpy as np
from make_checkpoint import Recipe, Tensor

from benchmark.processes import Say, remove

SPARE = 10**9
"""Bytes of disk left alone."""
TINY = (64, 4096)
"""Least and most elements of a tensor in the model of many tensors."""

Write = Callable[[Path, Recipe], tuple[Path, list[Path]]]


@dataclass(frozen=True)
class Model:
    """Folders of base and agents, base first."""

    folders: list[Path]

    @property
    def base(self) -> list[Path]:
        return weights(self.folders[0])

    @property
    def inputs(self) -> list[Path]:
        """Every weight file."""
        return [path for folder in self.folders for path in weights(folder)]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.inputs)

    @property
    def output(self) -> int:
        """Bytes a merge writes: the base's."""
        return sum(path.stat().st_size for path in self.base)

    @property
    def arguments(self) -> list[str]:
        return [str(folder) for folder in self.folders]


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


class Models:
    """Models below one folder. With `keep` they stay, and a later bench with the same folder finds them."""

    def __init__(self, place: Path, keep: bool, say: Say) -> None:
        self._place, self._keep, self._say = place, keep, say
        self._made: list[Path] = []

    def get(self, recipe: Recipe, write: Write = make_checkpoint.write) -> Model:
        """The model of a recipe, made if there is none; it stays until the end."""
        folder = self._folder(recipe)
        if not folder.exists():
            self._make(folder, recipe, write)
        agents = [folder / f"agent-{t}" for t in range(1, recipe.agents + 1)]
        return Model([folder / "base", *agents])

    @contextmanager
    def briefly(self, recipe: Recipe, write: Write = make_checkpoint.write) -> Iterator[Model]:
        """The same, gone afterwards."""
        try:
            yield self.get(recipe, write)
        finally:
            self._drop([folder for folder in self._made if folder == self._folder(recipe)])

    def close(self) -> None:
        """Remove what was made here."""
        self._drop(list(self._made))

    def need(self, nbytes: int) -> None:
        """End the bench where so many bytes do not fit the disk."""
        if (free := shutil.disk_usage(self._place).free) < nbytes + SPARE:
            raise SystemExit(
                f"{self._place}: {(nbytes + SPARE) / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; "
                "use --data for another folder"
            )

    def _folder(self, recipe: Recipe) -> Path:
        words = [f"{recipe.parameters}", f"x{recipe.agents + 1}", recipe.dtype]
        words += [f"largest{recipe.largest}"] if recipe.largest else []
        words += [f"tiny{recipe.tiny}"] if recipe.tiny else []
        words += ["clustered"] if recipe.clustered else []
        return self._place / "-".join(["ramstream-bench", *words])

    def _make(self, folder: Path, recipe: Recipe, write: Write) -> None:
        each = recipe.parameters * recipe.format.bits.itemsize
        self.need(each * (recipe.agents + 3))  # base, agents, an output, a store and what is around it
        start, partial = time.perf_counter(), folder.with_name(folder.name + ".partial")
        remove([partial])
        try:
            write(partial, recipe)
            partial.rename(folder)
        finally:
            remove([partial])
        self._made.append(folder)
        self._say(f"made {folder.name} in {time.perf_counter() - start:.1f} s")

    def _drop(self, folders: list[Path]) -> None:
        if not self._keep:
            remove(folders)
            self._made = [folder for folder in self._made if folder not in folders]


def write_many(out: Path, recipe: Recipe) -> tuple[Path, list[Path]]:
    """`recipe.tiny` matrices of 64 to 4096 elements each, in one file a checkpoint."""
    sizes = np.random.default_rng(recipe.seed).integers(*TINY, recipe.tiny, endpoint=True).tolist()
    shapes = [(size // 8, 8) for size in sizes]
    file = [Tensor(f"layers.{n // 100}.adapters.{n % 100}.weight", shape) for n, shape in enumerate(shapes)]
    folders = [out / "base", *(out / f"agent-{t}" for t in range(1, recipe.agents + 1))]
    for folder in folders:
        folder.mkdir(parents=True)
        make_checkpoint.write_side_files(folder, recipe)
    paths = [folder / "model.safetensors" for folder in folders]
    make_checkpoint.write_shard(paths, file, 0, make_checkpoint.Generator(recipe))
    return folders[0], folders[1:]
