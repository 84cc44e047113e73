"""Random numbers of the elements: Philox4x32-10, which gives each of them from its place alone.

*Parallel Random Numbers: As Easy as 1, 2, 3*, Salmon et al., SC 2011. A number depends on the seed, the tensor's
name, the agent and the element, and on nothing else: not on how the work is cut, nor on who does it, or when.

    counter  c0 = (e >> 2) mod 2³²    c1 = agent | (e >> 34) << 6    c2, c3 = low, high half of the name's key
    key      k0, k1 = low, high half of the seed

Element e < 2⁶⁰ takes word e mod 4 of what comes out, of that the upper 24 bits: a number in [0, 1), exact in
float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ramstream.kernels.jit import entry, inner

if TYPE_CHECKING:
    import torch

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
"""What the two halves of the key grow by from round to round."""
LOW = 0xFFFFFFFF
UNIT = 2.0**-24

_M0, _M1, _W0, _W1, _LOW = (np.uint64(value) for value in (*MULTIPLIERS, *WEYL, LOW))
_2, _6, _8, _32 = (np.uint64(value) for value in (2, 6, 8, 32))


def name_key(name: str) -> int:
    """64 bits that stand for a tensor's name."""
    return int(xxhash.xxh3_64_intdigest(name.encode()))


@inner
def fill(row: Any, n: int, seed: Any, name: Any, agent: Any, first: Any) -> None:
    """Numbers of elements first .. first + n of a tensor, for an agent < 64, into row[:n], float32 or float64.

    seed, name (`name_key`): np.uint64. first: a multiple of 4. Writes up to the next multiple of 4 behind n. The
    words of 32 bits lie in uint64, which their products fill: so it vectorises.
    """
    width, unit, place = row.dtype.type, row.dtype.type(UNIT), np.uint64(first) >> _2
    for i in range((n + 3) // 4):
        group = place + np.uint64(i)
        c0, c1 = group & _LOW, np.uint64(agent) | (group >> _32) << _6
        c2, c3 = np.uint64(name) & _LOW, np.uint64(name) >> _32
        k0, k1 = np.uint64(seed) & _LOW, np.uint64(seed) >> _32
        for _ in range(ROUNDS):
            left, right = _M0 * c0, _M1 * c2
            c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _LOW, (left >> _32) ^ c3 ^ k1, left & _LOW
            k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
        row[4 * i] = width(np.int32(c0 >> _8)) * unit
        row[4 * i + 1] = width(np.int32(c1 >> _8)) * unit
        row[4 * i + 2] = width(np.int32(c2 >> _8)) * unit
        row[4 * i + 3] = width(np.int32(c3 >> _8)) * unit


@entry
def uniform(row: Any, n: int, seed: Any, name: Any, agent: Any, first: Any) -> None:
    """`fill`, for Python."""
    fill(row, n, seed, name, agent, first)


def uniform_torch(
    n: int, seed: int, name: int, agent: int, first: int, device: torch.device | str, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of `fill` (n,), made by integer operations on a device."""
    import torch

    group = torch.arange(first // 4, first // 4 + (n + 3) // 4, dtype=torch.int64, device=device)
    c0, c1 = group & LOW, (group >> 32 << 6) | agent
    c2: Any = name & LOW
    c3: Any = name >> 32
    k0, k1 = seed & LOW, seed >> 32
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # int64 wraps around: the same bits
        c0, c1, c2, c3 = (right >> 32 & LOW) ^ c1 ^ k0, right & LOW, (left >> 32 & LOW) ^ c3 ^ k1, left & LOW
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    words = torch.stack((c0, c1, c2, c3), dim=1).reshape(-1)[:n]
    return (words >> 8).to(dtype) * UNIT
