"""Whole processes, timed from start to exit, that take turns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL = 0.02
"""Seconds between two looks at a process's memory."""
INSIDE = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
"""Shell words that move a process into a cgroup before it becomes the command."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """What one process took, and what it printed."""

    seconds: float
    peak: int
    """Bytes of its largest resident set."""
    read: int
    """Bytes that came from the disk on its behalf, mapped reads included."""
    stdout: str

    @property
    def printed(self) -> dict[str, Any]:
        """The JSON object it printed, empty where it printed something else."""
        return dict(json.loads(self.stdout)) if self.stdout.startswith("{") else {}


@dataclass
class Program:
    """A command, what happens before each run of it, and the runs it had."""

    name: str
    command: list[str]
    leftovers: list[Path] = field(default_factory=list)
    """Folders of the last run that have to go before the next."""
    before: Callable[[], None] = lambda: None
    """Brings the page cache into the state that is measured."""
    cgroup: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    rounds: int | None = None
    """Runs that count, where it takes part in fewer rounds than the others."""
    runs: list[Run] = field(default_factory=list)

    def run(self) -> None:
        remove(self.leftovers)
        os.sync()
        self.before()
        self.runs.append(timed(self.command, self.cgroup, self.environment))

    @property
    def seconds(self) -> list[float]:
        return [round(run.seconds, 4) for run in self.runs]

    @property
    def best(self) -> float:
        return min(run.seconds for run in self.runs)

    @property
    def peak(self) -> int:
        """Its own word for it, where it prints one, also sees what happens between two polls."""
        return max(max(run.peak, run.printed.get("peak_memory") or 0) for run in self.runs)

    @property
    def read(self) -> int:
        return min(run.read for run in self.runs)

    def printed(self, key: str) -> list[Any]:
        """A number from every run's JSON object."""
        return [run.printed[key] for run in self.runs]


def timed(
    command: list[str], cgroup: Path | None = None, environment: Mapping[str, str] | None = None
) -> Run:
    """Run a command to its end; a failure ends the bench with what it said."""
    if cgroup is not None:
        command = ["sh", "-c", INSIDE, str(cgroup), *command]
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env={**os.environ, **(environment or {})}
        )
        with ThreadPoolExecutor(1) as pool:
            watch = pool.submit(watched, process.pid)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            seconds = time.perf_counter() - start
        read = disk_reads(process.pid)  # a process that was not waited for keeps its final count
        code = process.wait()
        stdout.seek(0)
        stderr.seek(0)
        if code:
            raise SystemExit(f"{' '.join(command)}\nexited {code}:\n{stderr.read()[-4000:]}")
        return Run(seconds, watch.result(), read, stdout.read())


def watched(pid: int) -> int:
    """The process's high-water mark in bytes, polled until it is gone."""
    peak = 0
    while now := 1024 * status(Path(f"/proc/{pid}/status"), "VmHWM"):
        peak = max(peak, now)
        time.sleep(POLL)
    return peak


def disk_reads(pid: int) -> int:
    """Bytes the process had fetched from storage so far."""
    return status(Path(f"/proc/{pid}/io"), "read_bytes")


def status(path: Path, key: str) -> int:
    """A number from a file of `key: number` lines, 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


def take_turns(programs: Sequence[Program], rounds: int, say: Say, warm_up: bool = True) -> None:
    """Run all programs in every round; the first round brings files and kernels in and does not count."""
    try:
        for number in range(0 if warm_up else 1, rounds + 1):
            for program in programs:
                if number > (rounds if program.rounds is None else program.rounds):
                    continue
                program.run()
                say(f"round {number}/{rounds}: {program.name} {program.runs[-1].seconds:.2f} s")
                if number == 0:
                    program.runs.clear()
    finally:
        for program in programs:
            remove(program.leftovers)


def seconds_of(*programs: Program) -> dict[str, list[float]]:
    """The raw figures of programs, by name."""
    return {program.name: program.seconds for program in programs}


def remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
        if path.is_file():
            path.unlink()
