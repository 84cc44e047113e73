"""Compiled loops made of programs: one straight pass over a block's rows, which vectorises.

A core's source is written to a file beside numba's cache, named by its content, so that it is compiled once. It
takes addresses, knows the number of rows and their length, and calls nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import Any

import numpy as np
from numba import config

from ramstream.kernels import jit
from ramstream.kernels.layout import BLOCK, SPARE
from ramstream.kernels.program import Program, Step

_HEAD = '''"""Made by ramstream.kernels.cores; removed and made again at will."""
import numpy as np
from numba import carray, cfunc, {width}, int64, types, void
'''

_LOOP = """
@cfunc(
    void(types.CPointer({width}), types.CPointer({width}), types.CPointer({width}), int64),
    cache={cached},
    error_model="numpy",
)
def core(address, numbers, output, n):
    rows, p, out = carray(address, ({rows}, {block})), carray(numbers, ({columns},)), carray(output, ({block},))
"""

_NAMED = {"inf": "np.inf", "-inf": "-np.inf", "nan": "np.nan"}
"""Constants that have no literal."""


def row_of(program: Program, k: int) -> int:
    """Which of a worker's rows a program's row is: draws lie behind the scratch."""
    return k if k <= program.agents else k + SPARE


def rows_of(program: Program) -> int:
    """How many rows a worker needs for a program.

    The last two are written to. They lie behind all that is read: a loop whose output lies among its inputs, if
    only by addresses, is not run as vectors.
    """
    return program.agents + 1 + SPARE + (program.agents + 2 if program.random else 0)


def source(program: Program, width: str, cached: bool) -> str:
    """The core's file: numbers first, then one loop of all other steps."""
    head = _HEAD.format(width=width)
    text = _LOOP.format(
        width=width, cached=cached, rows=rows_of(program), block=BLOCK, columns=max(len(program.columns), 1)
    )
    before: list[str] = []
    inside: list[str] = []
    for place, step in enumerate(program.steps):
        line = f"v{place} = {_expression(program, step, width)}"
        (before if step.one else inside).append(line)
    lines = [f"    {line}" for line in before]
    lines += ["    for i in range(n):", *(f"        {line}" for line in inside)]
    return head + text + "\n".join(lines) + f"\n        out[i] = v{len(program.steps) - 1}\n"


def _expression(program: Program, step: Step, width: str) -> str:
    if step.name == "row":
        return f"rows[{row_of(program, step.operands[0])}, i]"
    if step.name == "number":
        return f"p[{step.operands[0]}]"
    if step.name == "constant":
        return f"np.{width}({_NAMED.get(step.operands[0], step.operands[0])})"
    names = [f"v{place}" for place in step.operands]
    if step.name == "where":
        return f"{names[1]} if {names[0]} else {names[2]}"
    if step.name == "float":
        return f"np.{width}({names[0]})"
    if step.name in ("neg", "abs", "not"):
        return {"neg": "-{}", "abs": "abs({})", "not": "not {}"}[step.name].format(names[0])
    return f"{names[0]} {step.name} {names[1]}"


def core(program: Program, wide: bool) -> Callable[..., Any] | np.uint64:
    """What `merging.merge` calls: the address of a compiled loop, or without numba's compiler a function."""
    with _lock:  # or each worker would compile it
        return _made(program, wide)


@cache
def _made(program: Program, wide: bool) -> Callable[..., Any] | np.uint64:
    if config.DISABLE_JIT:
        return _interpreted(program, wide)
    width = "float64" if wide else "float32"
    folder = jit.core_folder()
    text = source(program, width, folder is not None)
    made = _imported(text, folder) if folder is not None else _executed(text)
    _alive.append(made)
    return np.uint64(made.address)


_lock = Lock()
_alive: list[Any] = []
"""Compiled code lives as long as what it was compiled from."""


def _executed(text: str) -> Any:
    space: dict[str, Any] = {}
    exec(compile(text, "<core>", "exec"), space)
    return space["core"]


def _imported(text: str, folder: Path) -> Any:
    name = f"ramstream_core_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != text:  # a crash may leave it empty
        with NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as new:
            new.write(text)
        os.replace(new.name, path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where numba looks for it when it takes the loop from its cache
    spec.loader.exec_module(module)
    return module.core


def _interpreted(program: Program, wide: bool) -> Callable[..., Any]:
    dtype = np.float64 if wide else np.float32

    def run(rows: Any, numbers: Any, out: Any, n: int) -> None:
        out[:n] = program.run(
            np, lambda k: rows[row_of(program, k), :n], lambda column: numbers[column], dtype
        )

    return run
