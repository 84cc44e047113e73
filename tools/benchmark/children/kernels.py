"""The kernels alone, on two threads over resident buffers, beside a plain sum of the same words.

python kernels.py DTYPE ELEMENTS ROUNDS     prints one JSON object; PYTHONPATH has `make_checkpoint`,
                                            NUMBA_NRT_STATS=1 lets numba count its allocations
"""

import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from make_checkpoint import ALIASES, Generator, Recipe, Tensor
from numba.core.runtime import rtsys
from numpy.typing import NDArray

from ramstream.engine.limits import resident_memory
from ramstream.engine.worker import STEP_GRAINS
from ramstream.kernels import host
from ramstream.kernels.layout import BLOCK
from ramstream.kernels.program import trace
from ramstream.methods.ram import Ram
from ramstream.types import GRAIN, STRIP, Dtype

THREADS = 2
AGENTS = 3
WORDS = (2 << 20) // 8
"""Words summed at a time."""
STRIPS = 1000

Buffers = list[NDArray[Any]]


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def total(words: NDArray[np.uint64]) -> Any:
    """The bar: a loop that the compiler vectorises and unrolls, a little faster than numpy's sum."""
    result = np.uint64(0)
    for i in range(words.size):
        result += words[i]
    return result


class Share:
    """One thread's part of the buffers, with what an engine's worker has."""

    def __init__(self, dtype: Dtype, buffers: Buffers, begin: int, end: int) -> None:
        self.dtype, self.begin, self.end = dtype, begin, end
        self.buffers = buffers
        self.addresses = [buffer.ctypes.data for buffer in buffers]
        self.sources = host.Sources(AGENTS)
        self.counter = host.Counter(AGENTS, 1e-5, "error", None)
        method, program = Ram(), trace(Ram(), AGENTS)
        self.merger = host.Merger(program, 1e-5, "error", None)
        self.bits = np.zeros((AGENTS, STRIP // 64), np.uint64)
        self.out = np.empty(STRIP * dtype.itemsize, np.uint8)
        values = {**method.settings(["w"], AGENTS), "lambdas": np.ones((1, AGENTS))}
        self.numbers = program.numbers(values)[0]

    def point(self, first: int, n: int) -> None:
        for k, address in enumerate(self.addresses):
            self.sources.set(k, self.dtype, address + first * self.dtype.itemsize, n)

    def count(self) -> None:
        """Grains as pass 1 counts them, the step histogram on every 16th."""
        for grain in range(self.begin, self.end, GRAIN):
            self.counter.begin(self.dtype, False, grain // GRAIN % STEP_GRAINS == 0)
            for first in range(grain, min(grain + GRAIN, self.end), STRIP):
                self.strip(first, min(STRIP, self.end - first))
            self.counter.finish()

    def strip(self, first: int, n: int) -> None:
        self.point(first, n)
        self.counter.strip(self.sources, n, self.bits[:, : -(-n // 64)])

    def merge(self) -> None:
        for first in range(self.begin, self.end, STRIP):
            n = min(STRIP, self.end - first)
            self.point(first, n)
            out = self.out[: n * self.dtype.itemsize]
            self.merger.strip(self.sources, n, self.numbers, False, self.dtype, out)

    def sum(self) -> None:
        for buffer in self.buffers:
            words = buffer[self.begin : self.end].view(np.uint64)
            for first in range(0, words.size, WORDS):
                total(words[first : first + WORDS])


def buffers_of(name: str, elements: int) -> Buffers:
    """Base and agents with the changes that were published, drawn like the synthetic checkpoints."""
    generator = Generator(Recipe(elements, AGENTS, name))
    buffers: Buffers = [np.empty(elements, generator.recipe.format.bits) for _ in range(AGENTS + 1)]
    for first, sources in generator.chunks(Tensor("weight", (elements,)), 0):
        for buffer, bits in zip(buffers, sources, strict=True):
            buffer[first : first + len(bits)] = bits
    return buffers


def rounds_of(shares: list[Share], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of each loop, the loops in turn; a round before does not count."""
    loops: dict[str, Callable[[Share], None]] = {"sum": Share.sum, "count": Share.count, "merge": Share.merge}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    with ThreadPoolExecutor(THREADS) as pool:
        for number in range(rounds + 1):
            for name, loop in loops.items():
                start = time.perf_counter()
                list(pool.map(loop, shares))
                if number:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def allocations(share: Share, blocks: int) -> int:
    """How often the compiled loops allocate in STRIPS strips of so many blocks."""
    before = rtsys.get_allocation_stats().alloc
    for _ in range(STRIPS):
        share.strip(share.begin, blocks * BLOCK)
    return int(rtsys.get_allocation_stats().alloc - before)


def growth(share: Share) -> tuple[int, int]:
    """Bytes by which Python's heap and the resident set grow over STRIPS strips."""
    share.strip(share.begin, STRIP)
    tracemalloc.start()
    traced, resident = tracemalloc.get_traced_memory()[0], resident_memory() or 0
    for _ in range(STRIPS):
        share.strip(share.begin, STRIP)
    grown = tracemalloc.get_traced_memory()[0] - traced, (resident_memory() or 0) - resident
    tracemalloc.stop()
    return grown


def main() -> None:
    name, elements, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    buffers = buffers_of(name, elements)
    dtype = Dtype[Recipe(0, dtype=ALIASES.get(name, name)).format.name]
    half = elements // THREADS
    shares = [Share(dtype, buffers, k * half, (k + 1) * half) for k in range(THREADS)]
    report: dict[str, Any] = {"bytes": sum(buffer.nbytes for buffer in buffers)}
    report["seconds"] = rounds_of(shares, rounds)
    share = shares[0]
    share.counter.begin(dtype, False, False)
    blocks = STRIP // BLOCK
    one, many = allocations(share, 1), allocations(share, blocks)
    report["allocations_per_block"] = (many - one) / (STRIPS * (blocks - 1))
    report["traced_growth"], report["resident_growth"] = growth(share)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
