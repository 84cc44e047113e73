"""What the commands do with parsed options: open, plan, run. The seam between the command line and the library.

Each function imports what it needs: a question to a store is answered before numba would have loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramstream import methods
from ramstream.errors import UsageError
from ramstream.types import parse_dtype

if TYPE_CHECKING:
    from ramstream.config import Recipe
    from ramstream.engine.limits import Limits
    from ramstream.engine.merging import Outcome
    from ramstream.plan import MatchOptions, MergePlan


def parse_parameters(words: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` words as a dictionary. UsageError for a word without `=` or a name given twice."""
    result: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"-p {word!r}: write NAME=VALUE, e.g. -p r=0.2")
        if name in result:
            raise UsageError(f"-p {name} is given twice, as {result[name]} and {value}")
        result[name] = value
    return result


def parse_prefixes(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`FROM=TO` words as pairs; either may be empty. UsageError for a word without `=`."""
    for word in words:
        if "=" not in word:
            raise UsageError(
                f"--map-prefix {word!r}: write FROM=TO, e.g. --map-prefix model.language_model.=model."
            )
    pairs = (word.partition("=") for word in words)
    return tuple((old, new) for old, _, new in pairs)


def _match_options(options: dict[str, Any]) -> MatchOptions:
    from ramstream.plan import MatchOptions

    compare = options["compare_dtype"]
    return MatchOptions(
        include=options["include"],
        exclude=options["exclude"],
        missing=options["missing"],
        extra=options["extra"],
        vocab=options["vocab"],
        on_nonfinite=options["on_nonfinite"],
        compare_dtype=parse_dtype(compare) if compare else None,
        map_prefix=parse_prefixes(options["map_prefix"]),
    )


def _limits(options: dict[str, Any]) -> Limits:
    from ramstream.engine.limits import Limits

    return Limits(
        options["memory"],
        options["workers"],
        options.get("device", "cpu"),
        options["io"],
        options["scheduler"],
    )


def recipe_from(targets: Sequence[str], options: dict[str, Any], given: Collection[str]) -> Recipe:
    """What `ramstream merge` is to do: a file's words or those of the command line, which win over a file's.

    `given` are the options that were typed. UsageError for targets that are neither.
    """
    from ramstream import config
    from ramstream.config.recipe import OPTIONS, Recipe

    first, *agents = targets
    names_file = first.lower().endswith((".yaml", ".yml")) and not Path(first).is_dir()
    if names_file and agents:
        raise UsageError(f"{first} is a configuration file, which names its models; leave out {agents[0]}")
    if names_file and "method" in given:
        raise UsageError(f"{first} says which method; leave out --method, or change merge_method there")
    if not names_file and not agents:
        raise UsageError(
            f"{first} is one checkpoint; give BASE AGENT..., or a configuration file (.yaml, .yml)"
        )
    recipe = config.read(Path(first)) if names_file else Recipe(first, tuple(agents), options["method"])
    return replace(
        recipe,
        parameters={**recipe.parameters, **_typed_parameters(options)},
        dtype=options["dtype"] or recipe.dtype,
        options={
            name: recipe.options[name] if name in recipe.options and name not in given else options[name]
            for name in OPTIONS
        },
    )


_SUGAR = ("scale", "max_norm", "norm_scope")
"""Parameters that `merge` has options of their own for."""


def _typed_parameters(options: dict[str, Any]) -> dict[str, str]:
    """`-p` words and the options that stand for one. UsageError where both are given."""
    found = parse_parameters(options["parameters"])
    for name in _SUGAR:
        if options[name] is None:
            continue
        if name in found:
            raise UsageError(
                f"--{name.replace('_', '-')} {options[name]} and -p {name}={found[name]}: give one"
            )
        found[name] = str(options[name])
    return found


def plan_from(recipe: Recipe, options: dict[str, Any]) -> tuple[MergePlan, Limits]:
    """The plan of `ramstream merge` and its limits; writes `--config-out`."""
    from ramstream.checkpoint import open_all
    from ramstream.engine.limits import parse_size
    from ramstream.planning import plan_merge

    method = methods.create(recipe.method, recipe.parameters)
    dtype = parse_dtype(recipe.dtype) if recipe.dtype else None
    shard_size = parse_size(recipe.options["shard_size"]) if recipe.options["shard_size"] else None
    match_options, limits = _match_options(dict(recipe.options)), _limits(options)
    first, *others = open_all([recipe.base, *recipe.agents])
    plan = plan_merge(first, others, method, match_options, dtype, shard_size)
    if options["config_out"]:
        _write_config(options["config_out"], recipe)
    notes = (*recipe.notes, *plan.count.notes)
    return replace(plan, count=replace(plan.count, notes=notes)), limits


def _write_config(path: Path, recipe: Recipe) -> None:
    from ramstream.config import write

    if path.suffix.lower() not in (".yaml", ".yml"):
        raise UsageError(f"--config-out {path}: a configuration file's name ends in .yaml or .yml")
    write(path, recipe)


def run_merge(plan: MergePlan, out: Path, limits: Limits, options: dict[str, Any]) -> Outcome:
    """Run `ramstream merge` with progress on stderr."""
    from ramstream.engine.ahead import head_start
    from ramstream.engine.place import Place

    local = limits.scheduler is None
    if local and Place.of(out).is_fresh and not (options["store"] and options["store"].exists()):
        head_start(plan.count)
    from ramstream.console import progress
    from ramstream.engine.merging import merge

    with progress(options["quiet"], options["verbose"]) as listener:
        return merge(
            plan,
            out,
            limits,
            store=options["store"],
            keep_store=options["keep_store"],
            overwrite=options["overwrite"],
            listener=listener,
        )


def dry_run(plan: MergePlan, out: Path, limits: Limits, options: dict[str, Any]) -> dict[str, Any]:
    """`ramstream merge --dry-run`."""
    from ramstream.engine.forecast import forecast

    return forecast(plan, out, limits, options["store"], options["keep_store"], options["overwrite"])


def stats_from(targets: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """`ramstream stats`: of a store or an output where one target is given, otherwise of checkpoints."""
    from ramstream import queries
    from ramstream.plan import MatchOptions

    if len(targets) > 1:
        return _stats_of_checkpoints(targets, options)
    resources = options["memory"] or options["workers"] or options["scheduler"]
    if _match_options(options) != MatchOptions() or resources:
        raise UsageError(
            f"{targets[0]} answers for what it was counted with; options of counting go with a base and its agents"
        )
    counted = queries.open_counts(Path(targets[0]), options["store"])
    method = counted.method(options["method"], parse_parameters(options["parameters"]))
    return counted.stats(method, options["by"], options["subset"])


def _stats_of_checkpoints(targets: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    from ramstream import queries
    from ramstream.checkpoint import open_all
    from ramstream.console import progress
    from ramstream.engine.counting import count
    from ramstream.overlap import OverlapStore
    from ramstream.planning import plan_counts
    from ramstream.statistics import statistics

    method = methods.create(options["method"] or "ram-plus", parse_parameters(options["parameters"]))
    by, subset, store = options["by"], options["subset"], options["store"]
    if subset and not store:
        raise UsageError("--agents needs the overlap bits; name a place for them with --store")
    limits, (first, *others) = _limits(options), open_all(targets)
    plan = plan_counts(first, others, method.epsilon, _match_options(options))
    chosen = queries.parse_agents(subset, plan.labels) if subset else None
    with progress(options["quiet"], options["verbose"]) as listener:
        described, tallies = count(plan, limits, store, listener)
    recounted = (chosen, queries.recount(OverlapStore(store), chosen)) if chosen else None
    return statistics(described, tallies, method, by, recounted)
