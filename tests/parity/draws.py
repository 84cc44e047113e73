"""The numbers that random methods draw, computed once more: Philox4x32-10 in numpy, from its paper.

*Parallel Random Numbers: As Easy as 1, 2, 3*, Salmon et al., SC 2011. The counter is the element's place by four,
the agent's place and the tensor's name (xxh3, 64 bits), the key is the seed; 24 bits of a word make a number.
"""

from __future__ import annotations

import numpy as np
import xxhash
from llamas import Family
from numpy.typing import NDArray

Words = NDArray[np.uint64]

MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox(counter: list[Words], key: list[Words]) -> list[Words]:
    """Ten rounds: four words of 32 bits of four, with two of key; each in uint64."""
    for _ in range(10):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            second >> HALF ^ counter[1] ^ key[0],
            second & MASK,
            first >> HALF ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [key[0] + np.uint64(0x9E3779B9) & MASK, key[1] + np.uint64(0xBB67AE85) & MASK]
    return counter


def uniform(seed: int, name: str, agent: int, n: int) -> NDArray[np.float32]:
    """The numbers in [0, 1) of a tensor's elements; agents count from 0."""
    place = np.arange((n + 3) // 4, dtype=np.uint64)
    names = xxhash.xxh3_64_intdigest(name.encode())
    words = [agent, names & 0xFFFFFFFF, names >> 32]
    counter = [place, *(np.full_like(place, word) for word in words)]
    key = [np.full_like(place, word) for word in (seed & 0xFFFFFFFF, seed >> 32)]
    numbers = np.stack(philox(counter, key), axis=1).ravel()[:n] >> np.uint64(8)
    return numbers.astype(np.float32) * np.float32(2.0**-24)


def of_family(family: Family, seed: int) -> dict[str, NDArray[np.float32]]:
    """For each tensor, the numbers (T, n) of the agents' elements."""
    return {
        name: np.stack([uniform(seed, name, agent, len(base)) for agent in range(len(family.agents))])
        for name, base in family.base.items()
    }
