"""The counting kernel on resident buffers, against a sum of the same words in the same process."""

from __future__ import annotations

from pathlib import Path

import make_checkpoint

from benchmark.commands import child
from benchmark.lines import Line, at_least, at_most
from benchmark.processes import Run, timed
from benchmark.setting import Bench

BUFFER = 256 << 20
"""Bytes of each of the four buffers at full size."""
GOALS = {"bf16": 30, "f32": 40, "f16": 20, "f8_e4m3": 8}
"""Percent of a plain sum's speed."""
TURNS = 4
"""Times as many rounds as of whole processes: they are short."""
UNIT = 1 << 20
"""Elements are a multiple of this many: two threads' strips."""


def measure(bench: Bench) -> list[Line]:
    lines: list[Line] = []
    for dtype, goal in GOALS.items():
        run = _run(bench, dtype)
        bench.say(f"{dtype}: {run.seconds:.1f} s")
        lines += _lines(dtype, goal, run)
    return lines


def _run(bench: Bench, dtype: str) -> Run:
    itemsize = make_checkpoint.FORMATS[dtype].bits.itemsize
    elements = max(round(BUFFER / itemsize * min(bench.options.scale, 1) / UNIT), 1) * UNIT
    tools = Path(make_checkpoint.__file__).parent
    environment = {"PYTHONPATH": str(tools), "NUMBA_NRT_STATS": "1"}
    return timed(child("kernels", dtype, elements, TURNS * bench.options.rounds), environment=environment)


def _lines(dtype: str, goal: float, run: Run) -> list[Line]:
    report, name = run.printed, dtype.upper()
    raw = {"bytes": report["bytes"], **report["seconds"]}
    speed = {loop: report["bytes"] / min(seconds) / 1e9 for loop, seconds in report["seconds"].items()}
    share = {loop: 100 * value / speed["sum"] for loop, value in speed.items()}
    words = f"{speed['count']:.1f} of {speed['sum']:.1f} GB/s"
    grown = {key: report[f"{key}_growth"] for key in ("traced", "resident")}
    kept = {"allocations_per_block": report["allocations_per_block"], **grown}
    merging = f"{speed['merge']:.1f} GB/s"
    return [
        Line(f"counting {name} / plain sum", share["count"], "%", at_least(goal), words, raw),
        Line(f"merging {name} / plain sum", share["merge"], "%", note=merging, raw=raw),
        Line(f"allocations a block, {name}", kept["allocations_per_block"], "", at_most(0), raw=kept),
        Line(f"memory grown in 1000 strips, {name}", max(grown.values()) / 1e6, "MB", at_most(0.1), raw=kept),
    ]
