"""Measure `ramstream merge` against a plain numpy program that reads and writes the same bytes.

    python tools/bench.py                          0.5 B parameters x (1 + 3), bf16, published profile: 4 GB
    python tools/bench.py --quick                  a tenth of that
    python tools/bench.py --out bench.json --data DIR --keep --peers -- --workers 1

Every timed run is a process of its own, from start to exit. The programs take turns and the best of each
counts, so a ratio compares runs taken together on one machine. One round before is not counted: it brings the
files into the page cache and compiles kernels that changed. Outputs are removed between runs, untimed. Peak
memory is VmHWM, from ramstream's own report or polled from /proc. What follows `--` goes to `ramstream merge`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import make_checkpoint
from rich.console import Console
from rich.table import Table

PLAIN = """
import os, sys, numpy
*paths, base, out = sys.argv[1:]
total = numpy.uint64(0)
for _ in range(2):
    for path in paths:
        data = numpy.memmap(path, numpy.uint8, "r")
        total += data[: len(data) // 8 * 8].view(numpy.uint64).sum()
os.mkdir(out)
for path in base.split(os.pathsep):
    with open(os.path.join(out, os.path.basename(path)), "wb") as file:
        file.write(numpy.memmap(path, numpy.uint8, "r"))
        file.flush()
        os.fsync(file.fileno())
print(total)
"""
"""The yardstick: sum the words of all inputs twice, write as many bytes as the output has, fsync."""

RAMSTREAM = [sys.executable, "-m", "ramstream"]
MERGE_TARGET = {"ratio": 3.5, "peak_memory": 400_000_000}
"""What ram-plus is to stay under on the full-size model: times the plain program's best, bytes."""
HELP_TARGET = 0.3
STATS_TARGET = 1.0
BUDGET = 512 * 10**6
HUGE = 10**9
"""Bytes of the memory test's largest tensor."""


@dataclass
class Run:
    """What one process took: seconds, bytes, and what it printed."""

    seconds: float
    peak: int
    stdout: str


@dataclass
class Program:
    """A command, the runs it had, and what has to go before the next."""

    name: str
    command: list[str]
    leftovers: list[Path]
    runs: list[Run] = field(default_factory=list)

    def run(self) -> None:
        remove(self.leftovers)
        os.sync()
        self.runs.append(timed(self.command))

    @property
    def best(self) -> float:
        return min(run.seconds for run in self.runs)

    def reported(self, key: str) -> int | None:
        """A number from the JSON objects that the runs printed, the largest."""
        values = [json.loads(run.stdout).get(key) for run in self.runs if run.stdout.startswith("{")]
        return max((value for value in values if value is not None), default=None)

    @property
    def peak(self) -> int:
        return max(self.reported("peak_memory") or 0, *(run.peak for run in self.runs))


def timed(command: list[str]) -> Run:
    """Run a command to its end; a failure ends the bench with what it said."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        with ThreadPoolExecutor(1) as pool:
            watch = pool.submit(watched, process.pid)
            code = process.wait()
            seconds = time.perf_counter() - start
        stdout.seek(0)
        stderr.seek(0)
        if code:
            raise SystemExit(f"{' '.join(command)}\nexited {code}:\n{stderr.read()[-4000:]}")
        return Run(seconds, watch.result(), stdout.read())


def watched(pid: int) -> int:
    """The process's high-water mark, read every 20 ms until it is gone."""
    peak = 0
    while now := high_water(pid):
        peak = max(peak, now)
        time.sleep(0.02)
    return peak


def high_water(pid: int) -> int:
    """VmHWM of a live process in bytes, 0 once it is gone or where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def plain(folders: list[Path], out: Path) -> Program:
    inputs = [str(path) for folder in folders for path in weights(folder)]
    base = os.pathsep.join(str(path) for path in weights(folders[0]))
    return Program("plain numpy", [sys.executable, "-c", PLAIN, *inputs, base, str(out)], [out])


def merge(method: str, folders: list[Path], out: Path, extra: list[str]) -> Program:
    command = [*RAMSTREAM, "merge", *map(str, folders), "-o", str(out), "-m", method, "--json", *extra]
    return Program(f"ramstream {method}", command, [out, out.with_name(out.name + ".ramstream")])


def mergekit(method: str, folders: list[Path], work: Path) -> Program:
    """The same merge by mergekit; its RAM+ has ratios per tensor, so it does less and gives other bytes."""
    models = "".join(f"  - model: {folder}\n" for folder in folders[1:])
    recipe = work / f"{method}.yml"
    recipe.write_text(
        f"merge_method: {method}\nbase_model: {folders[0]}\nmodels:\n{models}"
        "dtype: float32\nout_dtype: bfloat16\n"
    )
    out = work / f"mergekit-{method}"
    command = ["mergekit-yaml", str(recipe), str(out), "--no-copy-tokenizer", "--quiet"]
    return Program(f"mergekit {method}", command, [out])


def make(out: Path, parameters: int, largest: int = 0) -> list[Path]:
    """Base and three agents, base first."""
    base, agents = make_checkpoint.write(out, make_checkpoint.Recipe(parameters, largest=largest))
    return [base, *agents]


def remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def speed(options: argparse.Namespace, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Wall time and memory of merges beside the plain program."""
    start = time.perf_counter()
    folders = make(work / "speed", options.parameters)
    say(f"made {options.parameters:,} parameters x 4 in {time.perf_counter() - start:.1f} s in {work}")
    programs = [plain(folders, work / "plain")]
    if not options.plain_only:
        programs += [merge(m, folders, work / f"out-{m}", options.extra) for m in ("ram-plus", "ram")]
    if options.peers and shutil.which("mergekit-yaml"):
        programs += [mergekit(method, folders, work) for method in ("ram", "ramplus_tl")]
    elif options.peers:
        say("mergekit is not installed: `mergekit-yaml` is not on the path")
    nbytes = sum(path.stat().st_size for folder in folders for path in weights(folder))
    try:
        for number in range(options.rounds + 1):
            for program in programs:
                program.run()
                say(f"round {number}/{options.rounds}: {program.name} {program.runs[-1].seconds:.2f} s")
                program.runs = program.runs if number else []
        store = work / "out-ram-plus.ramstream" / "overlap.zarr"
        questions = [timed([*RAMSTREAM, "stats", str(store)]) for _ in range(5) if store.exists()]
    finally:
        remove([path for program in programs for path in program.leftovers])
        remove([] if options.keep else [work / "speed"])
    return {
        "parameters": options.parameters,
        "input_bytes": nbytes,
        "stats_of_store_seconds": min((run.seconds for run in questions), default=None),
        "programs": [figures(program, programs[0], nbytes) for program in programs],
    }


def figures(program: Program, yardstick: Program, nbytes: int) -> dict[str, Any]:
    """Best time, its ratio to the yardstick's best, and GB/s of input bytes, each counted once."""
    return {
        "program": program.name,
        "seconds": round(program.best, 3),
        "all_seconds": [round(run.seconds, 3) for run in program.runs],
        "ratio": round(program.best / yardstick.best, 3),
        "gb_per_second": round(nbytes / program.best / 1e9, 3),
        "peak_memory": program.peak,
        "projected_memory": program.reported("projected_memory"),
    }


def memory(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """A model whose largest tensor is about twice the budget (with --quick a fifth)."""
    scale = 0.1 if options.quick else 1.0
    largest = round(HUGE * scale)
    folders = make(work / "memory", round(6e8 * scale), largest)
    program = merge("ram-plus", folders, work / "out-memory", [*options.extra, "--memory", "512MB"])
    try:
        program.run()
    finally:
        remove([*program.leftovers, *([] if options.keep else [work / "memory"])])
    return {
        **figures(program, program, 4 * int(6e8 * scale) * 2),
        "largest_tensor": largest,
        "allowed_memory": BUDGET,
    }


def megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.0f} MB"


def table(report: dict[str, Any]) -> Table:
    """Programs, then the memory test and the start-up time, each with its target."""
    view = Table("program", "best", "to plain", "GB/s", "peak", "projected", "target")
    for row in report["speed"]["programs"]:
        target = ""
        if row["program"] == "ramstream ram-plus":
            target = f"{MERGE_TARGET['ratio']} x, {megabytes(MERGE_TARGET['peak_memory'])}"
        view.add_row(*cells(row), target)
    if row := report.get("memory"):
        view.add_row("--memory 512MB", *cells(row)[1:2], "", *cells(row)[3:], megabytes(BUDGET))
    if seconds := report["speed"]["stats_of_store_seconds"]:
        view.add_row("ramstream stats STORE", f"{seconds:.2f} s", "", "", "", "", f"{STATS_TARGET} s")
    if seconds := report.get("help_seconds"):
        view.add_row("ramstream --help", f"{seconds:.2f} s", "", "", "", "", f"{HELP_TARGET} s")
    return view


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["program"],
        f"{row['seconds']:.2f} s",
        f"{row['ratio']:.2f}",
        f"{row['gb_per_second']:.1f}",
        megabytes(row["peak_memory"]),
        megabytes(row["projected_memory"]),
    ]


def arguments() -> argparse.Namespace:
    size = make_checkpoint.number_with_unit
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the size; ratios mean little")
    parser.add_argument("--parameters", type=size, help="elements of each checkpoint, 0.5B")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program, 5")
    parser.add_argument("--data", type=Path, help="existing folder for some 8 GB; a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the data")
    parser.add_argument("--peers", action="store_true", help="mergekit too, where it is installed")
    parser.add_argument("--plain-only", action="store_true", help="only the yardstick")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("extra", nargs="*", help="options for `ramstream merge`, after --")
    options = parser.parse_args()
    options.parameters = options.parameters or size("0.05B" if options.quick else "0.5B")
    return options


def main() -> None:
    options, console = arguments(), Console(width=None if sys.stdout.isatty() else 100)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    work = Path(tempfile.mkdtemp(prefix="ramstream-bench-", dir=options.data))
    report: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    try:
        report["speed"] = speed(options, work, say)
        if not options.plain_only:
            report["memory"] = memory(options, work)
            report["help_seconds"] = min(timed([*RAMSTREAM, "--help"]).seconds for _ in range(5))
    finally:
        remove([] if options.keep else [work])
    console.print(table(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
