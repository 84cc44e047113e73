"""Projected memory: integer functions of sizes, nothing measured here. All values are bytes.

projected = reserved + workers × worker. `reserved` is what the process holds whatever it merges (interpreter,
numpy, numba's compiled kernels, zarr) and what grows with the number of tensors; `worker` is what one worker
allocates once and reuses, and the mapped pages it keeps resident.
"""

from __future__ import annotations

from ramstream.errors import BudgetError
from ramstream.types import GRAIN, STRIP

PROCESS = 300 << 20
"""Interpreter, libraries and kernels, measured on Linux x86-64 with room to spare: some 190 MiB with compiled
kernels, 275 MiB where this run is the first and compiles them.
"""

WIDE = 60 << 20
"""What compiling the kernels for float64 adds."""

TORCH = 320 << 20
"""torch imported, its allocator and thread pools."""

FOLIO = 2 << 20
"""Linux maps the whole folio of the page cache around a page that was touched, at most this long."""

MAPPED_SLACK = 2 * FOLIO
"""Bytes by which the resident pages of a mapped range can exceed the range, until its release."""

HISTOGRAMS = 4 << 20
"""Histograms that wait to be written down, but for one unit's; their sum and their line take as much again."""

SIFTING = 16 << 20
"""What compiling the survey's loops adds."""

USUAL_STEPS, STEP = 100, 320 << 10
"""Steps of a program whose compilation `PROCESS` has room for, and what each further one takes."""

PER_TENSOR = 2048
"""Plan, names and slots of one tensor and one of its sources."""


def reserved(tensors: int, agents: int, record: int, wide: bool, torch: bool) -> int:
    """What the process holds apart from its workers; `record` is the size of one tensor's tallies, `wide`
    says that a tensor is computed in float64, `torch` that the torch form runs.
    """
    plan = tensors * ((agents + 1) * PER_TENSOR + 2 * record)
    return PROCESS + (WIDE if wide else 0) + (TORCH if torch else 0) + plan


def core(steps: int) -> int:
    """What compiling a method's loop takes beyond `PROCESS`: it grows with the number of agents."""
    return max(steps - USUAL_STEPS, 0) * STEP


def survey(tensors: int, agents: int, histograms: int) -> int:
    """What the driver of a survey holds: the `histograms` of a tensor or model, what waits to be written down, and
    questions and answers about every tensor.
    """
    return SIFTING + histograms + 3 * HISTOGRAMS + tensors * agents * 128


def surveyed(histograms: int, by_tensor: bool) -> int:
    """What each worker adds to that: a result, and two tensors that begin or end in the unit it works on."""
    return (3 if by_tensor else 1) * histograms


def strips(agents: int, itemsize: int, mapped: bool) -> int:
    """One strip of base and agents in a reader's buffers; with `mapped` also as resident pages."""
    buffers = STRIP * itemsize + FOLIO // 8
    return (agents + 1) * (buffers + (STRIP * itemsize + MAPPED_SLACK if mapped else 0))


def bits(agents: int) -> int:
    """The bits of one grain, and the copies that writing them makes."""
    return 3 * agents * GRAIN // 8


def output(itemsize: int) -> int:
    """What one worker writes at a time: a strip of output elements."""
    return STRIP * itemsize


def worker(
    agents: int, itemsize: int, out_itemsize: int, kernels: int, staging: int = 0, mapped: bool = True
) -> int:
    """One worker; itemsizes are the largest in use, `kernels` the kernels' own buffers, `staging` what a
    device needs on the host.
    """
    return strips(agents, itemsize, mapped) + bits(agents) + output(out_itemsize) + kernels + staging


def workers_that_fit(budget: int, fixed: int, each: int, wanted: int) -> int:
    """How many workers, at most `wanted`, fit `budget`; BudgetError where not even one does."""
    if fixed + each > budget:
        raise BudgetError(
            f"one worker needs {mebibytes(fixed + each)} and --memory allows {mebibytes(budget)}; "
            f"use --memory {-(-(fixed + each) >> 20)}MiB or more"
        )
    return min(wanted, (budget - fixed) // each)


def device_workers(free: int, each: int, wanted: int) -> int:
    """How many workers, at most `wanted`, fit what is free on a GPU; BudgetError where not even one does."""
    if each > free:
        raise BudgetError(
            f"one worker needs {mebibytes(each)} on the GPU and {mebibytes(free)} are free; use --device cpu"
        )
    return min(wanted, free // each)


def mebibytes(size: int) -> str:
    """`512 MiB`, rounded up so that a stated need is enough."""
    return f"{-(-size >> 20)} MiB"
