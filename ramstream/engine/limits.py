"""Limits: what may change how fast a run is, and never its bytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ramstream import memory
from ramstream.errors import UsageError
from ramstream.plan import CountPlan, MergePlan
from ramstream.tallies import tally_dtype
from ramstream.types import ITEMSIZE

if TYPE_CHECKING:
    from ramstream.engine.cluster import Cluster

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}I": 1 << (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_CGROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Limits:
    """Resources of a run. `memory` is text as on the command line (`2GB`, `512MiB`) or bytes, None for a
    quarter of the machine's or cgroup's memory, at most 4 GB; `workers` None for one a core. `scheduler` is the
    address of a dask scheduler, whose workers then do the work: each of their processes may take `memory`, and
    of all their threads `workers` are used.
    """

    memory: str | int | None = None
    workers: int | None = None
    device: str = "auto"
    io: Literal["mmap", "pread"] = "pread"
    scheduler: str | None = None

    def budget(self) -> int:
        """Bytes the resident set may take."""
        if self.memory is None:
            return min(machine_memory() // 4, 4 * 10**9)
        return parse_size(self.memory) if isinstance(self.memory, str) else self.memory

    def wanted_workers(self) -> int:
        """Workers that are wanted; UsageError below one."""
        if self.workers is None:
            return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.workers < 1:
            raise UsageError(f"--workers is {self.workers}; it must be 1 or more")
        return self.workers


@dataclass(frozen=True)
class Capacity:
    """Limits made concrete for one plan."""

    workers: int
    budget: int
    projected: int
    devices: tuple[str, ...]
    """What workers merge on: worker k on number k of these, over and over."""
    io: Literal["mmap", "pread"]
    cluster: Cluster | None = None
    """Whose workers they are; None for threads of this process. `budget` and `projected` are about each of its
    processes then."""

    @property
    def device(self) -> str:
        """The devices as text, each once."""
        return ", ".join(dict.fromkeys(self.devices))


@dataclass(frozen=True)
class Demand:
    """What the workers of a process take for one plan: bytes, and the devices that have room for them."""

    fixed: int
    each: int
    devices: tuple[str, ...]
    """Of as many workers as were wanted, or of those that fit their devices where these are fewer."""

    def of(self, workers: int) -> int:
        """Bytes of the process with so many workers."""
        return self.fixed + workers * self.each


def capacity(limits: Limits, count: CountPlan, merge: MergePlan | None = None) -> Capacity:
    """How many workers fit; BudgetError where not even one does, naming both numbers and the option."""
    found, budget = demand(limits, limits.wanted_workers(), count, merge), limits.budget()
    workers = memory.workers_that_fit(budget, found.fixed, found.each, len(found.devices))
    return Capacity(workers, budget, found.of(workers), found.devices[:workers], limits.io)


def demand(limits: Limits, wanted: int, count: CountPlan, merge: MergePlan | None = None) -> Demand:
    """What `wanted` workers take. BudgetError where no device has room for one."""
    from ramstream.engine.computed import held_bytes
    from ramstream.kernels import host
    from ramstream.kernels.cores import rows_of
    from ramstream.kernels.program import COPY

    devices = resolve_devices(limits.device) if merge else ["cpu"]
    torch = merge is not None and devices != ["cpu"]
    tensors = (*count.merged, *count.copied)
    sources = [source.dtype for tensor in count.merged for source in tensor.sources if source]
    itemsize = max((ITEMSIZE[dtype] for dtype in sources), default=1)
    staging, dealt = 0, (devices * wanted)[:wanted]
    if merge is not None and torch:
        from ramstream.kernels.torch import TorchMerger

        staging = TorchMerger.host_bytes(count.agents)
        if devices != ["cpu:torch"]:
            free = [(device, _free_on(device)) for device in devices]
            dealt = deal(free, TorchMerger.device_bytes(merge.program), wanted)
    record = tally_dtype(count.agents).itemsize
    fixed = memory.reserved(len(tensors), count.agents, record, "F64" in sources, torch)
    fixed += memory.core(len(merge.program.steps)) if merge else 0
    kernels = host.counter_bytes(count.agents) + held_bytes(count)
    for program in (merge.program, COPY) if merge else ():
        kernels += host.merger_bytes(program.agents, rows_of(program))
    each = memory.worker(
        count.agents, itemsize, merge.itemsize if merge else 0, kernels, staging, limits.io == "mmap"
    )
    if merge is not None:
        more, more_each = _survey(merge)
        fixed, each = fixed + more, each + more_each
    return Demand(fixed, each, tuple(dealt))


def deal(free: Sequence[tuple[str, int]], each: int, wanted: int) -> list[str]:
    """The devices of workers 0, 1, …, at most `wanted`: in turn, and each as often as fits what is `free` on it.

    BudgetError where none has room for one.
    """
    memory.device_workers(max(size for _, size in free), each, wanted)
    places = [(turn, device) for device, size in free for turn in range(min(size // each, wanted))]
    return [device for _, device in sorted(places, key=lambda place: place[0])][:wanted]


def _survey(merge: MergePlan) -> tuple[int, int]:
    """What the driver of the survey before a merge holds, and what each worker adds."""
    from ramstream.engine.survey import asked
    from ramstream.kernels.sifting import sifter_bytes
    from ramstream.quantiles import KEYS

    agents, queries = merge.count.agents, asked(merge)
    if not queries.any:
        return 0, 0
    histograms = agents * queries.slots * KEYS * 8
    driver = memory.survey(len(merge.count.merged), agents, histograms)
    return driver, memory.surveyed(histograms, queries.by_tensor) + sifter_bytes(agents, queries.slots)


def resolve_devices(device: str) -> list[str]:
    """The devices that workers are dealt to: those of `cuda:0,1` or `cuda:all`, otherwise `resolve_device`'s."""
    name, _, numbers = device.partition(":")
    if name == "cuda" and numbers == "all":
        if not (found := _gpus()):
            raise UsageError(f"--device {device}: torch sees no GPU here; use auto or cpu")
        return [f"cuda:{number}" for number in range(found)]
    if name == "cuda" and "," in numbers:
        chosen = [resolve_device(f"cuda:{number}") for number in numbers.split(",")]
        if len(set(chosen)) < len(chosen):
            raise UsageError(f"--device {device} names a device twice")
        return chosen
    return [resolve_device(device)]


def resolve_device(device: str) -> str:
    """`cpu`, `cpu:torch` or `cuda:N`; `auto` is a GPU where the machine shows one. UsageError for another.

    torch is not imported where the machine shows no GPU.
    """
    if device in ("cpu", "cpu:torch"):
        return device
    if device == "auto":
        return "cuda:0" if _shows_gpu() and _gpus() else "cpu"
    name, colon, number = device.partition(":")
    if name != "cuda" or not (number if colon else "0").isdecimal():
        raise UsageError(f"--device {device!r}: use auto, cpu, cuda:N, cuda:N,M, cuda:all or cpu:torch")
    if int(number or 0) >= (found := _gpus()):
        raise UsageError(f"--device {device}: torch sees {found} GPUs here; use auto or cpu")
    return f"cuda:{int(number or 0)}"


def _shows_gpu() -> bool:
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd"))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _free_on(device: str) -> int:
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


def parse_size(text: str) -> int:
    """Bytes of `512MB` (powers of ten), `2GiB` (powers of two) or a plain number. UsageError otherwise."""
    word = text.strip().upper().removesuffix("B")
    number = word.rstrip("KMGTI")
    unit = word[len(number) :]
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{text!r} is not a size; write 512MB, 2GiB or a number of bytes") from None
    if size <= 0:
        raise UsageError(f"{text!r} is not a size above 0")
    return size


def machine_memory() -> int:
    """Bytes of RAM, or of the cgroup's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP:
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return total


def available_memory() -> int:
    """Bytes that the page cache can grow to, about; all memory where the system does not say."""
    return min(machine_memory(), _proc("meminfo", "MemAvailable:") or machine_memory())


def peak_memory() -> int | None:
    """Largest resident set of this process so far, in bytes; None where the system does not say.

    Read from inside: what a parent sees of its child includes the moment before exec.
    """
    return _proc("self/status", "VmHWM:")


def resident_memory() -> int | None:
    """Resident set of this process now, in bytes; None where the system does not say."""
    return _proc("self/status", "VmRSS:")


def _proc(file: str, key: str) -> int | None:
    """Bytes of a line `key n kB` in a file of /proc; None where the system does not say."""
    try:
        text = Path("/proc", file).read_text()
    except OSError:
        return None
    lines = (line for line in text.splitlines() if line.startswith(key))
    return next((int(line.split()[1]) << 10 for line in lines), None)
