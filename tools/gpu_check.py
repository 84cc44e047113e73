"""Check that a GPU merges to the bytes of the CPU's kernels, and measure how fast it does.

    python tools/gpu_check.py                                   on cuda:0
    python tools/gpu_check.py --device cpu                      the same with torch on the CPU
    python tools/gpu_check.py --elements 500M --json

Checked: strips of every method, dtype and policy, with every kind of source and of special value; subnormal
numbers; threads that merge at once; whole merges. Measured: GB/s of input, base and agents counted once, the best
of several rounds. Exits with 0 where everything is equal, with 1 where anything differs, naming each case, and
with 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import make_checkpoint
import numpy as np
import torch
from gpu_cases import Case, Inputs, Merged, cases, difference
from rich.console import Console
from rich.table import Table

from ramstream import Checkpoint, Limits, merge, methods, plan_merge
from ramstream.engine.limits import resolve_device
from ramstream.errors import UsageError
from ramstream.kernels.torch import TorchMerger
from ramstream.types import STRIP, Dtype

CASE = 20_011
"""Elements of a case at most: a few blocks of the CPU's kernels, and a rest."""
STRIPS = 16
"""Strips that a thread merges in a round, one after the other."""
ROUNDS = 5
MERGES = 2
"""Whole merges by each method."""
COPIED = 64 << 20
NO_CUDA = "no CUDA device; use --device cpu to run the same with torch on the CPU"


@dataclass
class Report:
    """What was found; `speed` is GB/s, `memory` bytes."""

    device: str
    name: str
    torch: str = torch.__version__
    elements: int = 0
    checks: int = 0
    different: list[str] = field(default_factory=list)
    speed: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def check(self, what: str, differs: str | None) -> None:
        """Note one check."""
        self.checks += 1
        if differs is not None:
            self.different.append(f"{what}: {differs}")

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def engine_device(self) -> str:
        """What `--device` of a merge is called."""
        return self.device if self.cuda else "cpu:torch"

    def best(self, what: str, nbytes: int, run: Callable[[], object], times: int = 1) -> None:
        """Measure `times` of `run`, `nbytes` each: the best of several rounds, after one that is not counted."""
        seconds = []
        for _ in range(ROUNDS + 1):
            self.wait()
            start = time.perf_counter()
            for _ in range(times):
                run()
            self.wait()
            seconds.append(time.perf_counter() - start)
        self.speed[what] = nbytes * times / min(seconds[1:]) / 1e9

    def wait(self) -> None:
        """Until the device has done everything it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def check_cases(report: Report) -> None:
    """Every case against the CPU's kernels; in two strips, so that buffers are used again."""
    elements = min(report.elements, CASE)
    for number, case in enumerate(cases()):
        inputs, form = Inputs(case, elements, number), case.form(report.device)
        merged = inputs.merged(form.strip, form.take, elements * 2 // 3 // 64 * 64)
        report.check(str(case), difference(merged, inputs.expected()))


def check_subnormals(report: Report) -> None:
    """Flush-to-zero is off: arithmetic around the smallest numbers has numpy's bits."""
    for dtype, tiny, least in ((np.float32, 2.0**-126, 2.0**-149), (np.float64, 2.0**-1022, 2.0**-1074)):
        near = [least * k for k in range(1, 7)] + [tiny * k for k in (0.25, 0.5, 0.75, 1, 1.5, 2)]
        values = np.array([*near, *(-value for value in near), 0.25, 0.5, 0.75, 1, 3], dtype)
        one, two = np.repeat(values, len(values)), np.tile(values, len(values))
        on_device = [torch.from_numpy(array).to(report.device) for array in (one, two)]
        for name in ("add", "subtract", "multiply", "divide"):
            with np.errstate(all="ignore"):
                wanted = getattr(np, name)(one, two)
            got = getattr(torch, name)(*on_device).cpu().numpy()
            wrong = int((got.view(np.uint8) != wanted.view(np.uint8)).reshape(len(one), -1).any(axis=1).sum())
            what = f"subnormal numbers, {name} in {np.dtype(dtype).name}"
            report.check(what, f"{wrong} of {len(one)} results differ" if wrong else None)


def usual(report: Report, length: int, strips: int = STRIPS) -> Inputs:
    """Strips as they mostly are: three agents in bf16, hardly a special value."""
    return Inputs(Case("ram-plus", Dtype.BF16, Dtype.BF16, (Dtype.BF16,) * 3), length * strips, special=1e-4)


def measure_copies(report: Report) -> None:
    """Copies as the merger makes them, in one large piece."""
    here, there = (
        torch.zeros(COPIED, dtype=torch.uint8, pin_memory=report.cuda and pinned, device=device)
        for pinned, device in ((True, "cpu"), (False, report.device))
    )
    if report.cuda:
        report.best("copy to the device", COPIED, lambda: there.copy_(here, non_blocking=True))
        report.best("copy from the device", COPIED, lambda: here.copy_(there, non_blocking=True))
    else:
        report.best("memcpy, host to host", COPIED, lambda: there.copy_(here))


def measure_kernels(report: Report) -> None:
    """Merging alone, of strips that are on the device, of the usual length and (in the same room) a longer one."""
    for length in (STRIP, 4 * STRIP):
        length = min(length, report.elements)
        inputs = usual(report, length, 1)
        form, sources = inputs.case.form(report.device), inputs.sources(0, length)
        with form.on_stream():
            form.copy_in(sources, length)
            compute = partial(form.compute, sources, length, inputs.numbers, False, inputs.case.out)
            report.best(f"kernels, strips of {length}", inputs.nbytes, compute, STRIPS)


def measure_threads(report: Report) -> None:
    """Copies and merging together, in threads that should overlap; their bytes are checked too."""
    length = min(STRIP, report.elements)
    inputs = usual(report, length)
    wanted = inputs.expected()
    for threads in (1, 2, 4):
        forms = [inputs.case.form(report.device) for _ in range(threads)]
        what = f"strips, {threads} thread{'s' * (threads > 1)}"
        with ThreadPoolExecutor(threads) as pool:
            together = partial(merged_together, pool, inputs, forms, length)
            report.best(what, inputs.nbytes * threads, together)
            for merged in together():
                report.check(what, difference(merged, wanted))


def merged_together(
    pool: ThreadPoolExecutor, inputs: Inputs, forms: list[TorchMerger], length: int
) -> list[Merged]:
    """The same inputs by every merger, each in a thread."""
    return list(pool.map(lambda form: inputs.merged(form.strip, form.take, length), forms))


def measure_device_memory(report: Report) -> None:
    """What one merger takes at most, against what the engine plans with."""
    agents = 9
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(report.device)
    torch.cuda.reset_peak_memory_stats(report.device)
    wide = Case("ram-plus", Dtype.F64, Dtype.F8_E4M3, (Dtype.F64,) * agents, "keep", Dtype.BF16)
    form = wide.form(report.device)
    for case in (wide, replace(wide, base=Dtype.BF16, out=Dtype.BF16, kinds=(Dtype.BF16,) * agents)):
        Inputs(case, STRIP).merged(form.strip, form.take)
    peak, planned = (
        torch.cuda.max_memory_reserved(report.device) - before,
        TorchMerger.device_bytes(wide.program),
    )
    report.memory |= {"device, one merger": peak, "device, one merger, planned": planned}
    report.check("device memory", f"{peak} bytes, planned {planned}" if peak > planned else None)


def check_merges(report: Report) -> None:
    """Whole merges on the device and on the CPU in turns: the same weights, and how fast."""
    with tempfile.TemporaryDirectory(prefix="ramstream-gpu-") as work:
        merge_in_turns(report, Path(work))


def merge_in_turns(report: Report, work: Path) -> None:
    """`check_merges` in a folder."""
    base, agents = make_checkpoint.write(work / "in", make_checkpoint.Recipe(report.elements))
    opened = [Checkpoint.open(folder) for folder in (base, *agents)]
    nbytes = sum(path.stat().st_size for path in (work / "in").rglob("*.safetensors"))
    for method in methods.available():
        plan = plan_merge(opened[0], opened[1:], methods.create(method, {}))
        for number in range(MERGES):
            outs = {device: work / device.replace(":", "-") for device in (report.engine_device, "cpu")}
            for device, out in outs.items():
                start = time.perf_counter()
                merge(plan, out, Limits(device=device))
                speed = nbytes / (time.perf_counter() - start) / 1e9
                what = f"merge -m {method} --device {device}"
                report.speed[what] = max(report.speed.get(what, 0), speed)
            report.check(f"merge -m {method}, round {number}", differing(*outs.values()))
            for out in outs.values():
                shutil.rmtree(out)
                shutil.rmtree(f"{out}.ramstream", ignore_errors=True)
    measure_host_memory(report, [base, *agents], work / "out")


def measure_host_memory(report: Report, folders: list[Path], out: Path) -> None:
    """What a merge in a process of its own takes of the host's memory, against what it projects."""
    command = [sys.executable, "-m", "ramstream", "merge", "--device", report.engine_device, "--json", "-q"]
    done = subprocess.run([*command, "-o", out, *folders], stdout=subprocess.PIPE, check=True)
    summary = json.loads(done.stdout)
    for key in ("peak", "projected"):
        report.memory[f"host, a merge, {key}"] = summary[f"{key}_memory"]


def differing(one: Path, two: Path) -> str | None:
    """Which weight files of two outputs are not the same."""
    names = sorted({path.name for folder in (one, two) for path in folder.glob("*.safetensors")})
    _, different, missing = filecmp.cmpfiles(one, two, names, shallow=False)
    return f"{', '.join(different + missing)} differ from the CPU's" if different or missing else None


def table(report: Report) -> Table:
    """The measurements."""
    view = Table("measured", "", title=f"{report.name}, torch {report.torch}", title_justify="left")
    for what, speed in report.speed.items():
        view.add_row(what, f"{speed:.2f} GB/s")
    for what, size in report.memory.items():
        view.add_row(what, f"{size / 1e6:,.0f} MB")
    return view


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", help="cuda:N or cpu; cuda:0 by default")
    parser.add_argument(
        "--elements", type=make_checkpoint.number_with_unit, default="50M", help="of each checkpoint, 50M"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """The exit code."""
    options = arguments(words)
    if options.device is None and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 2
    try:
        device = resolve_device(options.device or "cuda:0").removesuffix(":torch")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name(device) if device != "cpu" else "torch on the CPU"
    report = Report(device, name, elements=options.elements)
    measures = [check_cases, check_subnormals, measure_copies, measure_kernels, measure_threads]
    for measure in [*measures, *([measure_device_memory] if report.cuda else []), check_merges]:
        print(f"{measure.__name__.replace('_', ' ')} ..", file=sys.stderr)
        measure(report)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)
    return 1 if report.different else 0


def show(report: Report) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(report))
    for line in report.different:
        console.print(f"differs: {line}", markup=False, highlight=False)
    equal = report.checks - len(report.different)
    console.print(f"{equal} of {report.checks} checks are equal", highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
