"""The three forms of a method's program, on whole arrays: a compiled loop, numpy, torch."""

from __future__ import annotations

import ctypes
import typing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ramstream.kernels import cores
from ramstream.kernels.layout import BLOCK
from ramstream.kernels.program import Program
from ramstream.methods import Method, PerAgent, PerTensor

_CORE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


def by_core(program: Program, rows: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
    """rows (1 + 2T, n) in the width: base, deltas, draws; n <= BLOCK. What lies behind n is not touched."""
    n = rows.shape[1]
    room = np.zeros((cores.rows_of(program), BLOCK), rows.dtype)
    for k in range(len(rows) if program.random else program.agents + 1):
        room[cores.row_of(program, k), :n] = rows[k]
    out = np.full(BLOCK, 7, rows.dtype)
    call(cores.core(program, rows.dtype == np.float64), room, numbers, out, n)
    assert (out[n:] == 7).all()
    return out[:n]


def call(core: Any, room: NDArray[Any], numbers: NDArray[Any], out: NDArray[Any], n: int) -> None:
    """Call what `cores.core` gives."""
    if callable(core):
        with np.errstate(all="ignore"):
            core(room, numbers, out, n)
    else:
        _CORE(int(core))(room.ctypes.data, numbers.ctypes.data, out.ctypes.data, n)


def by_numpy(program: Program, rows: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return program.run(np, lambda k: rows[k], lambda column: numbers[column], rows.dtype.type)


def by_torch(program: Program, rows: NDArray[Any], numbers: NDArray[Any]) -> NDArray[Any]:
    tensors, held = torch.from_numpy(rows), torch.from_numpy(numbers)
    one = lambda value: torch.full((), value, dtype=tensors.dtype)  # noqa: E731
    return program.run(torch, lambda k: tensors[k], lambda column: held[column], one).numpy()


FORMS = {"core": by_core, "numpy": by_numpy, "torch": by_torch}


def rows_of(base: NDArray[Any], deltas: NDArray[Any], draws: NDArray[Any]) -> NDArray[Any]:
    """What the forms take, in the base's width."""
    return np.ascontiguousarray(np.concatenate((base[None], deltas, draws)).astype(base.dtype))


def odd_rows(agents: int, dtype: Any, random: np.random.Generator, n: int = 1003) -> NDArray[Any]:
    """Rows with everything a float can be: zeros of both signs, subnormals, huge values, infinities, NaN."""
    info = np.finfo(dtype)
    ends = [info.tiny / 3, -info.tiny / 5, info.max, -info.max / 2, np.inf, -np.inf, np.nan]
    odd = np.array([0.0, -0.0, *ends], dtype)
    values = random.standard_normal((agents + 1, n)) * 2.0 ** random.integers(-40, 20, (agents + 1, n))
    values[1:] *= random.random((agents, n)) < 0.5
    values = np.where(random.random((agents + 1, n)) < 0.1, random.choice(odd, (agents + 1, n)), values)
    draws = random.integers(0, 2**24, (agents, n)) * 2.0**-24
    return rows_of(values[0].astype(dtype), values[1:], draws)


def mark_of(hint: Any) -> PerAgent | PerTensor | None:
    """What a parameter's type says about how it may differ."""
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, PerAgent | PerTensor)), None)


def some_numbers(method: Method, agents: int, random: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Values (1, any) for all that `Block.p` holds, in their ranges and not round, and λ and thresholds."""
    hints = typing.get_type_hints(type(method), include_extras=True)
    values = {}
    for name, count in method.numeric(agents).items():
        mark = mark_of(hints[name])
        least, most = (max(mark.least, -1.0), min(mark.most, 2.0)) if mark else (0.1, 2.0)
        values[name] = random.uniform(least, most, (1, count or 1))
    return values | {
        "lambdas": random.uniform(1, 2, (1, agents)),
        "thresholds": random.uniform(0, 2, (1, agents)),
    }


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether they are the same to the bit; NaN is one value, as narrowing writes only one."""
    form = f"u{one.itemsize}"
    nan = np.isnan(one)
    return one.dtype == other.dtype and bool(
        (nan == np.isnan(other)).all() and (one.view(form) == other.view(form))[~nan].all()
    )
