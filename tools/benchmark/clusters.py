"""dask clusters on this machine: a scheduler, and workers of one thread each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 60.0
"""Until a cluster has to be there."""


@contextmanager
def started(folder: Path, workers: int) -> Iterator[str]:
    """The address of a scheduler with so many workers; all of them end with the block."""
    file = folder / f"scheduler-{workers}.json"
    processes = [_start("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))]
    try:
        address = _address(file)
        scratch = ("--no-nanny", "--local-directory", str(folder))
        processes += [_start("worker", address, "--nthreads", "1", *scratch) for _ in range(workers)]
        yield address
    finally:
        for process in reversed(processes):
            _end(process)
        file.unlink(missing_ok=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:  # dask's workers may wait for ever for their scheduler
        process.kill()
        process.wait()


def _start(what: str, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"distributed.cli.dask_{what}", "--no-dashboard", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _address(file: Path) -> str:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            return str(json.loads(file.read_text())["address"])
        except (FileNotFoundError, ValueError):
            time.sleep(0.1)
    raise SystemExit("the dask scheduler did not start")
