"""The programs that are timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark.models import Model
from benchmark.processes import Program
from benchmark.setting import Bench

RAMSTREAM = [sys.executable, "-m", "ramstream"]
CHILDREN = Path(__file__).parent / "children"


def child(name: str, *arguments: object) -> list[str]:
    """The command of a script in `children`."""
    return [sys.executable, str(CHILDREN / f"{name}.py"), *map(str, arguments)]


def merge_options(bench: Bench, method: str, model: Model, out: Path, *more: str) -> list[str]:
    """The words after `ramstream`."""
    options = ["-o", str(out), "-m", method, "--json", *bench.options.extra, *more]
    return ["merge", *model.arguments, *options]


def merge(
    bench: Bench, method: str, model: Model, *more: str, name: str | None = None, **how: Any
) -> Program:
    """`ramstream merge` of a model; `how` is the program's cache state, cgroup, environment."""
    name = name or f"ramstream {method}"
    out = bench.work / name.replace(" ", "-").replace(",", "")
    command = [*RAMSTREAM, *merge_options(bench, method, model, out, *more)]
    return Program(name, command, [out, out.with_name(out.name + ".ramstream")], **how)


def forwards(bench: Bench, model: Model, **how: Any) -> Program:
    """ram-plus with pass 2 in the order of pass 1."""
    out = bench.work / "forwards"
    command = child("forwards", *merge_options(bench, "ram-plus", model, out))
    return Program("ramstream ram-plus forwards", command, [out, out.with_name("forwards.ramstream")], **how)


def plain(bench: Bench, model: Model) -> Program:
    """The plain numpy program that sums all inputs twice and writes as many bytes as the output has."""
    out = bench.work / "plain"
    inputs = [*model.inputs, "--", *model.base]
    return Program("plain numpy", child("plain", out, *inputs), [out])


def mergekit(bench: Bench, method: str, model: Model) -> Program:
    """The same merge by mergekit; its RAM+ has ratios per tensor, so it does less and gives other bytes."""
    models = "".join(f"  - model: {folder}\n" for folder in model.folders[1:])
    recipe, out = bench.work / f"{method}.yml", bench.work / f"mergekit-{method}"
    recipe.write_text(
        f"merge_method: {method}\nbase_model: {model.folders[0]}\nmodels:\n{models}"
        "dtype: float32\nout_dtype: bfloat16\n"
    )
    command = [bench.options.mergekit, str(recipe), str(out), "--no-copy-tokenizer", "--quiet"]
    return Program(f"mergekit {method}", command, [out], rounds=bench.options.peer_rounds)


def count(bench: Bench, model: Model, store: bool, name: str, before: Callable[[], None]) -> Program:
    """`count` from Python, which prints the seconds of the call; with a store it writes one."""
    place = bench.work / "counted.zarr"
    command = child("library", "count", place if store else "-", *model.arguments)
    return Program(name, command, [place], before)
