"""Both sides of a parity test: a YAML document run by mergekit and by `ramstream merge`, and their distance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import folders
import numpy as np
import runs
import yaml
from llamas import Family, Weights
from numpy.typing import NDArray

RUNNER = Path(__file__).with_name("theirs.py")


class MergekitError(Exception):
    """mergekit refused a merge; the text is its own."""


@dataclass
class Sides:
    """Runs documents; each merge gets a folder of its own below `root`."""

    root: Path
    process: subprocess.Popen[str]
    count: int = field(default=0)

    def theirs(self, document: str, draws: Mapping[str, NDArray[np.float32]] | None = None) -> folders.Model:
        """What mergekit makes of a document. MergekitError where it refuses."""
        out = self._folder()
        file = None
        if draws is not None:
            file = str(out.with_suffix(".npz"))
            np.savez(file, **draws)
        job = {"document": document, "out": str(out), "draws": file}
        requests, replies = self._pipes()
        requests.write(json.dumps(job) + "\n")
        requests.flush()
        reply = replies.readline()
        if not reply:
            log = (self.root / "mergekit.log").read_text()
            raise RuntimeError(f"the mergekit process ended with {self.process.wait()}: {log[-2000:]}")
        if (error := json.loads(reply)["error"]) is not None:
            raise MergekitError(error)
        return folders.read(out)

    def ours(self, document: str, *options: str, code: int = 0) -> folders.Model:
        """What `ramstream merge` makes of a document; nothing where it should end with another exit code."""
        path = (self.root / f"{self.count}.yaml").absolute()
        path.write_text(document)
        return self.merged(path, *options, code=code)

    def merged(self, *words: object, code: int = 0) -> folders.Model:
        """What `ramstream merge WORDS… -o OUT` makes; nothing where it should end with another exit code."""
        out = self._folder()
        assert runs.cli("merge", *words, "-o", out, "--device", "cpu", "-q") == code
        return folders.read(out) if code == 0 else {}

    def both(self, document: str) -> tuple[Weights, Weights]:
        """The float32 weights that we make of a document, and those that mergekit makes of it."""
        return floats(self.ours(document)), floats(self.theirs(document))

    def _folder(self) -> Path:
        self.count += 1
        return self.root / f"{self.count:03}"

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout


@contextmanager
def sides(root: Path, hash_seed: int = 0) -> Iterator[Sides]:
    """mergekit, started and ended."""
    settings = {"PYTHONHASHSEED": str(hash_seed), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with (
        open(root / "mergekit.log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-P", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | settings,
            text=True,
        ) as process,
    ):
        yield Sides(root, process)


def document(
    method: str,
    models: Mapping[Path, Mapping[str, Any]],
    base: Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    **keys: Any,
) -> str:
    """A YAML document: models with their parameters, global parameters, and other keys as they are."""
    content: dict[str, Any] = {"merge_method": method}
    if base is not None:
        content["base_model"] = str(base)
    content["models"] = [
        {"model": str(path)} | ({"parameters": dict(own)} if own else {}) for path, own in models.items()
    ]
    if parameters:
        content["parameters"] = dict(parameters)
    return yaml.safe_dump(content | keys, sort_keys=False)


def floats(model: folders.Model) -> Weights:
    """The values of a model in float32 files, by name."""
    assert {tensor.dtype for tensor in model.values()} == {"F32"}
    return {name: np.frombuffer(tensor.data, np.float32) for name, tensor in model.items()}


def ulps(one: Weights, two: Weights) -> int:
    """How many float32 numbers lie between the two, at most, over all weights."""
    assert one.keys() == two.keys()
    return max(int(np.abs(_places(one[name]) - _places(two[name])).max()) for name in one)


def _places(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """The numbers' places among all float32 numbers in order; both zeros have place 0."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def errors(values: Weights, exact: Mapping[str, NDArray[np.float64]], family: Family) -> float:
    """How far float32 weights are from the exact ones, at most, in ulps of the largest of result, base and agents.

    Where these cancel, what is left is the rounding of each, many ulps of the result.
    """
    assert values.keys() == exact.keys()
    worst = 0.0
    for name, result in exact.items():
        models = [model[name] for model in (family.base, *family.agents)]
        largest = np.max(np.abs([result.astype(np.float32), *models]), axis=0)
        worst = max(
            worst, float(np.max(np.abs(values[name] - result) / np.spacing(largest).astype(np.float64)))
        )
    return worst
