"""Measure `ramstream` against its goals: one line a goal, one table.

    python tools/bench.py                              all groups; 0.5 B parameters x (1 + 3), bf16
    python tools/bench.py --quick                      a tenth of that; ratios mean little
    python tools/bench.py --only warm,cold --out bench.json -- --workers 1
    python tools/bench.py --only growth --from bench.json --out bench.json
    python tools/bench.py --only "" --from bench.json --markdown

Groups: start, warm, methods, cold, pressure, store, kernels, growth, forecast, cluster.

Everything timed is a process of its own, from start to exit. The programs of a group take turns and the best of
each counts, so a ratio compares runs taken together on one machine. One round before is not counted: it brings
the files into the page cache and compiles kernels that changed. Outputs are removed between runs, untimed. Cold
means that the page cache was dropped; where that is not allowed, that the inputs were dropped from it. What
follows `--` goes to every `ramstream merge`. `--from` takes over the groups that are not measured this time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import make_checkpoint
from benchmark.caches import Caches
from benchmark.groups import GROUPS, measure
from benchmark.models import Models
from benchmark.processes import Say
from benchmark.report import Report
from benchmark.setting import FULL, Bench, Options
from rich.console import Console


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = make_checkpoint.number_with_unit
    parser.add_argument("--only", type=groups, default=GROUPS, metavar="GROUP,..", help="these groups; all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    parser.add_argument("--parameters", type=size, help="elements of each checkpoint, 0.5B")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program, 5")
    parser.add_argument("--data", type=Path, help="existing folder for models and outputs; a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the models in --data; they are found again")
    parser.add_argument("--peers", action="store_true", help="mergekit too")
    parser.add_argument("--peer-rounds", type=int, help="runs of mergekit; as many as of the others")
    parser.add_argument("--mergekit", default="mergekit-yaml", help="its command; mergekit-yaml")
    parser.add_argument("--cold", choices=["auto", "drop", "fadvise"], default="auto", help="how; auto")
    parser.add_argument("--cgroup", metavar="FOLDER", help="memory cgroup to make a limited one in, or `own`")
    parser.add_argument("--from", dest="earlier", type=Path, help="JSON of an earlier bench to complete")
    parser.add_argument("--markdown", action="store_true", help="print the table for a README")
    parser.add_argument("--out", type=Path, help="write the lines and all figures as JSON")
    parser.add_argument("extra", nargs="*", help="options for `ramstream merge`, after --")
    options = parser.parse_args()
    if options.keep and not options.data:
        parser.error("--keep needs --data, where the models stay")
    return options


def groups(text: str) -> tuple[str, ...]:
    chosen = [name for name in text.split(",") if name]
    if unknown := set(chosen) - set(GROUPS):
        raise argparse.ArgumentTypeError(f"no group {', '.join(sorted(unknown))}; use {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in chosen)


def settled(options: argparse.Namespace) -> Options:
    """The command line with what follows from it."""
    return Options(
        parameters=options.parameters or FULL // (10 if options.quick else 1),
        rounds=options.rounds,
        peers=options.peers,
        peer_rounds=options.rounds if options.peer_rounds is None else options.peer_rounds,
        mergekit=options.mergekit,
        cgroup=options.cgroup,
        extra=options.extra,
    )


@contextmanager
def setting(options: argparse.Namespace, say: Say) -> Iterator[Bench]:
    """What groups share; what they made is gone afterwards, with --keep all but the models."""
    work = Path(tempfile.mkdtemp(prefix="ramstream-bench-", dir=options.data))
    models = Models(options.data or work, options.keep, say)
    outputs = work / "outputs"
    outputs.mkdir()
    try:
        yield Bench(settled(options), models, Caches.of(options.cold), outputs, say)
    finally:
        models.close()
        shutil.rmtree(work, ignore_errors=True)


def about(bench: Bench) -> dict[str, Any]:
    """How a group is measured, beside its lines."""
    return {
        "date": datetime.now().date().isoformat(),
        "parameters": bench.options.parameters,
        "rounds": bench.options.rounds,
        "cold": bench.caches.how,
        "extra": bench.options.extra,
    }


def main() -> None:
    options, console = arguments(), Console(width=None if sys.stdout.isatty() else 160)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    report = Report()
    if options.earlier:
        report.take_over(options.earlier)
    with setting(options, say) as bench:
        for group in options.only:
            say(f"{group}:")
            report.add(group, about(bench), measure(group, bench))
            if options.out:  # after every group: the next may take an hour
                report.save(options.out, GROUPS)
    if options.markdown:
        print(report.markdown(GROUPS))
    else:
        console.print(report.table(GROUPS), highlight=False)


if __name__ == "__main__":
    main()
