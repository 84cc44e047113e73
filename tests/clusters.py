"""dask clusters of real processes on this machine, for tests: a scheduler, workers, and what may befall them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import distributed

HERE = Path(__file__).parent

SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1",
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "PYTHONPATH": f"{HERE}:{HERE.parent}",  # for `deeds`, and for ramstream where it is not installed
}


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something to become true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


@dataclass
class Machines:
    """A scheduler and its workers. All are started by `dask`'s own commands, and gone after `close`."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        file = self.folder / "scheduler.json"
        words = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        self.scheduler = self._start("scheduler", words)
        until(lambda: file.exists() and file.stat().st_size)
        time.sleep(0.1)
        self.address: str = distributed.scheduler.json.loads(file.read_text())["address"]

    def _start(
        self, what: str, words: Sequence[str], inside: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        command = [*inside, sys.executable, "-m", f"distributed.cli.dask_{what}", *words]
        with open(self.folder / f"{len(self.processes)}-{what}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **SETTINGS, **environment},
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def worker(self, *words: str, inside: Sequence[str] = (), **environment: str) -> subprocess.Popen[bytes]:
        """One worker of one thread that nobody starts again, unless `words` say otherwise."""
        usual = [self.address, "--nthreads", "1", "--no-dashboard", "--local-directory", str(self.folder)]
        nanny = [] if "--nworkers" in words else ["--no-nanny"]
        return self._start("worker", [*usual, *nanny, *words], inside, **environment)

    def workers(self) -> int:
        """How many workers are there."""
        return len(self.ask("ncores"))

    def ask(self, question: str) -> dict[str, object]:
        """Ask the scheduler."""

        async def ask() -> dict[str, object]:
            async with distributed.rpc(self.address) as scheduler:
                answer: dict[str, object] = await getattr(scheduler, question)()
                return answer

        return asyncio.run(ask())

    def wait(self, workers: int) -> Machines:
        """Until exactly so many workers are there."""
        until(lambda: self.workers() == workers)
        return self

    def close(self) -> None:
        """End everything, also what is stopped."""
        for processes in (self.processes[1:], self.processes[:1]):
            for process in processes:
                process.terminate()
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
