"""Matching: which tensor of which agent belongs to which tensor of the base, and what becomes of the rest.

Everything the headers can show is found here and listed together; nothing is skipped or guessed in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from ramstream.checkpoint.wording import listed, shown
from ramstream.errors import CheckpointError, PlanError, UsageError
from ramstream.plan.agent import Agent
from ramstream.plan.names import list_names
from ramstream.plan.prefixes import Prefixes, beginnings, renamed
from ramstream.types import ITEMSIZE, Dtype, LowRank, Scaled, TensorInfo

if TYPE_CHECKING:
    from ramstream.checkpoint import Checkpoint

SameBytes = Callable[["Checkpoint", TensorInfo, TensorInfo], bool]
"""Whether two tensors of one checkpoint hold the same bytes; the one question that headers cannot answer."""


@dataclass(frozen=True)
class MatchOptions:
    """What the user decided about tensors that do not simply match."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    missing: Literal["error", "base"] = "error"
    extra: Literal["error", "ignore"] = "error"
    vocab: Literal["error", "base-rows"] = "error"
    on_nonfinite: Literal["error", "base", "keep"] = "error"
    compare_dtype: Dtype | None = None
    map_prefix: tuple[tuple[str, str], ...] = ()
    """(from, to): an agent's name that begins with `from`, as it is written, begins with `to` instead. The longest
    `from` counts, once."""

    def __post_init__(self) -> None:
        times = Counter(old for old, _ in set(self.map_prefix))
        problems = [
            f"--map-prefix: {old!r} is to become {' and '.join(repr(b) for a, b in self.map_prefix if a == old)}; "
            "give it once"
            for old, n in times.items()
            if n > 1
        ]
        if problems:
            raise UsageError("\n".join(problems))

    def identity(self) -> dict[str, Any]:
        """Plain data for the count digest."""
        compare = None if self.compare_dtype is None else self.compare_dtype.name
        globs = {"include": list(self.include), "exclude": list(self.exclude)}
        prefixes = [list(pair) for pair in sorted(set(self.map_prefix))]
        return {**vars(self), **globs, "compare_dtype": compare, "map_prefix": prefixes}

    def selects(self, name: str) -> bool:
        """Whether the globs leave a tensor to be merged."""
        included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return included and not any(fnmatchcase(name, glob) for glob in self.exclude)


@dataclass
class Match:
    """A tensor of the base with its sources (base first, None for absent); `reason` says why it is copied."""

    sources: list[TensorInfo | None]
    reason: str = ""
    compare: Literal["ignore", "warn", "error"] = "ignore"


@dataclass
class Matched:
    """All tensors of the base in file order, and what the user should be told."""

    entries: list[Match] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatches: list[tuple[int, str]] = field(default_factory=list)
    """(agent, what) where an agent stores another dtype than the base; rounding alone then counts as a change."""


def match(
    base: Checkpoint, agents: Sequence[Checkpoint], options: MatchOptions, same_bytes: SameBytes | None = None
) -> Matched:
    """Match every tensor of the base; PlanError or CheckpointError listing every problem."""
    _check_request(base, agents, options)
    tensors = [Agent(base, agent, options, same_bytes) for agent in agents]
    result = Matched([_match_one(info, tensors, options) for info in base.tensors.values()])
    met = {old: new for agent in tensors for new, old in agent.stored.items() if new in base.tensors}
    for agent in tensors:
        agent.report(met)
        result.notes += agent.notes
    problems = [problem for agent in tensors for problem in agent.problems]
    if problems:
        raise CheckpointError("\n".join(problems))
    _note_copied(base, result)
    _note_dtypes(base, agents, result, options.compare_dtype)
    return result


def _check_request(base: Checkpoint, agents: Sequence[Checkpoint], options: MatchOptions) -> None:
    """PlanError for a base that is none, and for globs and prefixes that mean nothing with these checkpoints."""
    problems = []
    if base.adapter:
        problems.append(f"{base.label} is a LoRA adapter; give the model that it was trained on as the base")
    problems += [
        f"{option} {glob!r} matches none of the {len(base.tensors)} tensors of {base.label}; "
        f"they are {list_names(base.tensors.values())}"
        for option, globs in (("--include", options.include), ("--exclude", options.exclude))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in base.tensors)
    ]
    if options.map_prefix:
        problems += _prefix_problems(agents, options.map_prefix)
    if problems:
        raise PlanError("\n".join(problems))


def _prefix_problems(agents: Sequence[Checkpoint], prefixes: Prefixes) -> Iterator[str]:
    """Prefixes that no agent has, and those that make one name of several tensors."""
    names = {name for agent in agents for name in agent.tensors}
    for old, new in dict.fromkeys(prefixes):
        if not any(name.startswith(old) for name in names):
            text = f"--map-prefix {old}={new}: no tensor of an agent begins with {old!r}"
            yield f"{text}; they begin with {beginnings(names)}"
    for agent in agents:
        by_name: dict[str, list[str]] = {}
        for name in agent.tensors:
            by_name.setdefault(renamed(name, prefixes), []).append(name)
        clashes = [(new, names) for new, names in by_name.items() if len(names) > 1]
        for new, clashing in clashes[:1]:
            more = f", and {len(clashes) - 1} more such" if len(clashes) > 1 else ""
            yield (
                f"{agent.label}: --map-prefix makes {shown(new)} of both {listed(clashing)}{more}; rename the one "
                "out of the way with another --map-prefix, and leave it out with --extra ignore"
            )


def _match_one(info: TensorInfo, agents: Sequence[Agent], options: MatchOptions) -> Match:
    """Decide one tensor of the base: merged with its sources, or copied for a reason."""
    if not options.selects(info.name):
        return Match([info] + [None] * len(agents), "excluded")
    found = [agent.find(info) for agent in agents]
    whole = [agent for agent in agents if not agent.checkpoint.adapter]
    nowhere = bool(whole) and all(tensor is None for tensor in found)
    alone = len(whole) == 1
    known = info.dtype in ITEMSIZE
    if info.dtype not in Dtype.__members__ and (known or not nowhere or alone):
        same = [agent.same_kind(info, tensor, known) for agent, tensor in zip(agents, found, strict=True)]
        reason = f"dtype {info.dtype}" if known else f"unknown dtype {info.dtype}"
        return Match([info, *same], reason, "warn" if known else "error")
    if not nowhere or alone:
        for agent, tensor in zip(agents, found, strict=True):
            if tensor is None:
                agent.lacks(info)
    if nowhere:
        return Match([info, *found], "no agent has it")
    return Match([info, *(a.accept(info, t) for a, t in zip(agents, found, strict=True))])


def _note_copied(base: Checkpoint, result: Matched) -> None:
    total = sum(info.nbytes for info in base.tensors.values()) or 1
    groups: dict[str, list[TensorInfo]] = {}
    for entry in result.entries:
        info = entry.sources[0]
        if entry.reason and info is not None:
            groups.setdefault(entry.reason, []).append(info)
    for reason, infos in groups.items():
        share = 100 * sum(info.nbytes for info in infos) / total
        result.notes.append(
            f"copied from the base, {share:.2g} % of its bytes: {list_names(infos)} ({reason})"
        )


def _note_dtypes(
    base: Checkpoint, agents: Sequence[Checkpoint], result: Matched, compare: Dtype | None
) -> None:
    """Where an agent stores weights another way than the base, so that rounding alone counts as a change."""
    for k, agent in enumerate(agents, start=1):
        pairs: dict[tuple[str, str], list[TensorInfo]] = {}
        for entry in result.entries:
            ours, theirs = entry.sources[0], entry.sources[k]
            if entry.reason or not ours or not theirs or isinstance(theirs.recipe, LowRank):
                continue
            if _form(theirs) != _form(ours):
                pairs.setdefault((_form(theirs), _form(ours)), []).append(ours)
        for pair, infos in pairs.items():
            text = f"{agent.label} stores {list_names(infos)} as {pair[0]} where {base.label} has {pair[1]}"
            result.mismatches.append((k - 1, f"{text}: {_advice(*pair, compare)}"))


def _form(info: TensorInfo) -> str:
    """How the weights of a tensor are rounded."""
    if not isinstance(info.recipe, Scaled):
        return info.dtype
    whole = (1, *info.shape)[-2:]
    rows, columns = (min(pair) for pair in zip(info.recipe.block, whole, strict=True))
    each = {(1, whole[1]): "a scale a row", whole: "one scale"}.get(
        (rows, columns), f"a scale for {rows} × {columns}"
    )
    return f"{info.recipe.stored} with {each}"


def _advice(theirs: str, ours: str, compare: Dtype | None) -> str:
    if compare is not None:
        return f"what changed is compared in {compare.name}"
    if theirs not in Dtype.__members__:
        return (  # quantised after training: nothing tells the two kinds of changes apart
            "rounding alone changes nearly every weight, and no --compare-dtype undoes that; "
            "give base and agent in one form"
        )
    if ours not in Dtype.__members__:  # trained from what the base's were dequantised to
        coarser = theirs if Dtype[theirs].itemsize <= 2 else Dtype.BF16.name
    else:
        coarser = min((theirs, ours), key=lambda name: Dtype[name].mantissa)
    return f"rounding alone counts as a change; --compare-dtype {coarser.lower()} compares what both can hold"
