"""Processes of a dask cluster on this machine beside threads of one process, warm, in the same rounds."""

from __future__ import annotations

from contextlib import ExitStack

from benchmark.clusters import started
from benchmark.commands import merge
from benchmark.lines import Line
from benchmark.processes import seconds_of
from benchmark.setting import Bench

THREADS = (1, 2)
PROCESSES = (1, 2, 4)


def measure(bench: Bench) -> list[Line]:
    model = bench.main()
    with ExitStack() as stack:
        threads = [merge(bench, "ram-plus", model, "--workers", str(n), name=f"threads {n}") for n in THREADS]
        processes = [
            merge(
                bench,
                "ram-plus",
                model,
                "--scheduler",
                stack.enter_context(started(bench.work, n)),
                name=f"processes {n}",
            )
            for n in PROCESSES
        ]
        bench.rounds(*threads, *processes)
    one = threads[0]
    return [
        Line(
            f"{program.name} / threads 1",
            program.best / one.best,
            note=f"{program.best:.2f} s",
            raw=seconds_of(program),
        )
        for program in (*threads, *processes)
    ]
