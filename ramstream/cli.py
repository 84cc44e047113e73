"""The command line: parse, one library call, an exit code. Everything heavy is imported inside the commands."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from ramstream.engine import signals
from ramstream.errors import IntegrityError, RamstreamError

F = TypeVar("F", bound=Callable[..., Any])

_STOPPED = "stopped; the same command goes on from here"


def main() -> NoReturn:
    """Run `ramstream`; every error a user can cause is one message and its exit code, never a traceback."""
    gc.set_threshold(100_000)  # loading numba and zarr takes a fifth longer with the collector's usual zeal
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # nothing here uses it, and its threads would spin
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no λ shows a question mark
    signals.insisted = _at_once
    signal.signal(signal.SIGTERM, _terminated)  # now that there is something it can write to
    try:
        sys.exit(cli(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RamstreamError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        click.echo(f"error: {error.filename or 'input/output'}: {error.strerror or error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        _stop(130)
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11, of one in the middle of a class
            _stop(130)
        raise


def _terminated(*_: object) -> NoReturn:
    _stop(143)


def _at_once(number: int) -> NoReturn:
    """End the process, threads that hang and all: whoever asks twice does not wait."""
    shown = "\033[?25h" if os.isatty(2) else ""  # a progress bar hides the cursor
    with suppress(OSError, RuntimeError):  # also where what was interrupted is a print
        print(f"{shown}{_STOPPED}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _stop(status: int) -> NoReturn:
    """Say that the run was stopped, and end it; what it interrupted in libraries goes in silence."""
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    click.echo(_STOPPED, err=True)
    sys.exit(status)


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


_matching = _options(
    click.option("--compare-dtype", metavar="D", help="Round base and agents to this dtype to see what changed."),
    click.option("--include", multiple=True, metavar="GLOB", help="Merge or count only these; repeatable."),
    click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these as the base has them; repeatable."),
    click.option("--missing", type=click.Choice(["error", "base"]), default="error", show_default=True,
                 help="A tensor that some agents lack."),
    click.option("--extra", type=click.Choice(["error", "ignore"]), default="error", show_default=True,
                 help="A tensor that only an agent has."),
    click.option("--vocab", type=click.Choice(["error", "base-rows"]), default="error", show_default=True,
                 help="Vocabularies of different size."),
    click.option("--map-prefix", multiple=True, metavar="FROM=TO",
                 help="Names of agents that begin with FROM begin with TO instead; repeatable."),
    click.option("--on-nonfinite", type=click.Choice(["error", "base", "keep"]), default="error", show_default=True,
                 help="NaN or Inf in an agent where the base differs."),
)  # fmt: skip

_resources = _options(
    click.option("--memory", metavar="SIZE", help="Largest resident set; by default a quarter of RAM, up to 4GB."),
    click.option("--workers", type=int, metavar="N", help="Worker threads, by default one a core."),
    click.option("--io", type=click.Choice(["pread", "mmap"]), default="pread", show_default=True,
                 help="How checkpoints are read: into reused buffers, or as mappings."),
    click.option("--scheduler", metavar="ADDRESS",
                 help="A dask scheduler, tcp://HOST:PORT, whose workers do the work on files that all hosts share; "
                 "--memory is for each of their processes, --workers for all their threads."),
)  # fmt: skip

_parameters = click.option(
    "-p",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the method, see `ramstream methods METHOD`; repeatable.",
)
_strength = _options(
    click.option("--scale", metavar="X", help="Multiply the merged delta by X; as -p scale=X."),
    click.option("--max-norm", type=click.Choice(["none", "largest", "mean"]),
                 help="Bound the merged delta's norm by that of the agents' deltas; as -p max_norm=."),
    click.option("--norm-scope", type=click.Choice(["model", "tensor"]),
                 help="What --max-norm is about; as -p norm_scope=."),
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
_loudness = _options(
    click.option("-q", "--quiet", is_flag=True, help="No progress and no notes."),
    click.option("-v", "--verbose", is_flag=True, help="A line for every batch that is on disk."),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ramstream")
def cli() -> None:
    """Merge RL-trained checkpoints of one base, out of core: bounded memory, resumable, audited."""


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="(BASE AGENT... | FILE.yaml)")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="The output folder.")
@click.option(
    "-m",
    "--method",
    default="ram-plus",
    show_default=True,
    metavar="METHOD",
    help="How agents are merged; `ramstream methods` lists them.",
)
@_parameters
@_strength
@click.option(
    "--dtype", metavar="D", help="Dtype of every float tensor of the output; by default the base's."
)
@_matching
@click.option("--store", type=click.Path(path_type=Path), help="An overlap store to use, or to make there.")
@click.option(
    "--keep-store/--no-keep-store", default=None, help="Keep the overlap store; by default if under 10 GB."
)
@click.option("--shard-size", metavar="SIZE", help="Cut the output anew into files of this size, e.g. 5GB.")
@click.option("--overwrite", is_flag=True, help="Replace OUT when the new one is complete.")
@click.option(
    "--config-out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write this merge as a file that `ramstream merge FILE` takes, with --dry-run too; a file that says "
    "something else is not overwritten.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and what it takes; merge nothing.")
@_resources
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda:N, cuda:all for every GPU in turn, or cpu:torch for the torch form.",
)
@_json
@_loudness
def merge(targets: tuple[str, ...], out: Path, as_json: bool, **options: Any) -> None:
    """Merge agents into their base.

    AGENT... are merged into BASE and OUT is written. The same command again goes on where a killed one stopped.

    FILE.yaml says all that in mergekit's words; what is typed beside it wins over what it says.
    """
    from ramstream.commands import dry_run, plan_from, recipe_from, run_merge

    plan, limits = plan_from(recipe_from(targets, options, _typed()), options)
    if options["dry_run"]:
        from ramstream.report import plan_view

        _show(as_json, dry_run(plan, out, limits, options), plan_view)
        return
    outcome = run_merge(plan, out, limits, options)
    from ramstream.report import outcome_view

    done = {"out": str(outcome.out), "already_complete": outcome.already_complete, **outcome.summary}
    _show(as_json, done, lambda summary: outcome_view(summary["out"], summary["already_complete"], summary))


@cli.command()
@click.argument("targets", nargs=-1, required=True, metavar="(STORE | OUT | BASE AGENT...)")
@click.option(
    "--store", type=click.Path(path_type=Path), help="Keep the counts there, or find an OUT's bits there."
)
@click.option("-m", "--method", help="Whose λ to show; by default the one OUT was merged by, or ram-plus.")
@_parameters
@_matching
@click.option("--by", type=click.Choice(["tensor", "layer", "kind"]), help="Break the numbers down.")
@click.option(
    "--agents", "subset", metavar="1,3", help="Only these agents, by number or label (needs a store)."
)
@_resources
@_json
@_loudness
def stats(targets: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Show which agent changed what.

    From checkpoints, from an overlap store, or from a merge's output. A store or an output answers without
    opening a checkpoint.
    """
    from ramstream.commands import stats_from
    from ramstream.report import stats_view

    _show(as_json, stats_from(targets, options), stats_view)


@cli.command()
@click.argument("name", required=False)
@_json
def methods(name: str | None, as_json: bool) -> None:
    """List the methods.

    With a NAME, what that method does and its parameters.
    """
    from ramstream.manual import describe, list_view, method_view

    described = describe(name)
    _show(as_json, described if name is None else described[0], method_view if name else list_view)


@cli.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--read-data", is_flag=True, help="Read every byte of the weights; without it only the structure."
)
@_json
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def verify(out: Path, read_data: bool, as_json: bool, quiet: bool) -> None:
    """Check a merge's output.

    Every file, size and header; with --read-data every byte.
    """
    from ramstream.console import spinner
    from ramstream.report import verify_view
    from ramstream.verify import verify_output

    with spinner(quiet) as progress:
        report = verify_output(out, read_data, progress)
    _show(as_json, report.as_dict(), verify_view)
    if report.problems:
        raise IntegrityError(
            f"{out} is not what was written; restore it from a copy, or remove it and merge again"
        )


def _typed() -> set[str]:
    """The options that the command line holds, beside those that have their default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is typed}


def _show(as_json: bool, data: Any, view: Callable[[Any], Any]) -> None:
    """One JSON object on stdout, or tables."""
    if as_json:
        click.echo(json.dumps(data, allow_nan=False))
        return
    if sys.stdout is None:
        return
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(highlight=False, markup=False, width=None if terminal else 200)
    for part in view(data):
        console.print(part, soft_wrap=not terminal)
