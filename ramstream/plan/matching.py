"""Matching: which tensor of which agent belongs to which tensor of the base, and what becomes of the rest.

Everything the headers can show is found here and listed together; nothing is skipped or guessed in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from ramstream.errors import CheckpointError, PlanError
from ramstream.plan.names import has_vocabulary_rows, list_names, mismatch_hint, tied_partner
from ramstream.types import ITEMSIZE, Dtype, TensorInfo

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

    def identity(self) -> dict[str, Any]:
        """Plain data for the count digest."""
        compare = None if self.compare_dtype is None else self.compare_dtype.name
        globs = {"include": list(self.include), "exclude": list(self.exclude)}
        return {**vars(self), **globs, "compare_dtype": compare}

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
    _check_globs(base, options)
    problems: list[str] = []
    tensors = [_Agent(base, agent, options, same_bytes, problems) for agent in agents]
    result = Matched()
    for info in base.tensors.values():
        result.entries.append(_match_one(info, tensors, options))
    for agent in tensors:
        agent.report(result.notes)
    if problems:
        raise CheckpointError("\n".join(problems))
    _note_copied(base, result)
    _note_dtypes(base, agents, result, options.compare_dtype)
    return result


def _check_globs(base: Checkpoint, options: MatchOptions) -> None:
    problems = [
        f"{option} {glob!r} matches none of the {len(base.tensors)} tensors of {base.label}; "
        f"they are {list_names(base.tensors.values())}"
        for option, globs in (("--include", options.include), ("--exclude", options.exclude))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in base.tensors)
    ]
    if problems:
        raise PlanError("\n".join(problems))


def _match_one(info: TensorInfo, agents: Sequence[_Agent], options: MatchOptions) -> Match:
    """Decide one tensor of the base: merged with its sources, or copied for a reason."""
    if not options.selects(info.name):
        return Match([info] + [None] * len(agents), "excluded")
    found = [agent.find(info) for agent in agents]
    nowhere = all(tensor is None for tensor in found)
    known = info.dtype in ITEMSIZE
    if info.dtype not in Dtype.__members__ and (known or not nowhere or len(agents) == 1):
        same = [agent.same_kind(info, tensor, known) for agent, tensor in zip(agents, found, strict=True)]
        reason = f"dtype {info.dtype}" if known else f"unknown dtype {info.dtype}"
        return Match([info, *same], reason, "warn" if known else "error")
    if not nowhere or len(agents) == 1:
        for agent, tensor in zip(agents, found, strict=True):
            if tensor is None:
                agent.missing.append(info)
    if nowhere:
        return Match([info, *found], "no agent has it")
    return Match([info, *(a.accept(info, t) for a, t in zip(agents, found, strict=True))])


class _Agent:
    """One agent's tensors while they are matched: what is missing, extra, tied or of another shape."""

    def __init__(
        self,
        base: Checkpoint,
        checkpoint: Checkpoint,
        options: MatchOptions,
        same_bytes: SameBytes | None,
        problems: list[str],
    ) -> None:
        self.base, self.checkpoint, self.options, self.problems = base, checkpoint, options, problems
        self.same_bytes = same_bytes
        self.absent: list[str] = []
        """Names of the base that it lacks, whatever follows from that."""
        self.missing: list[TensorInfo] = []
        self.unneeded: list[TensorInfo] = []
        """Tensors that it lacks and that are the base's anyway."""
        self.tied: set[str] = set()
        """Names of its tensors that stand for the ones they are tied to."""
        self.rows: list[str] = []
        self.notes: list[str] = []

    def find(self, info: TensorInfo) -> TensorInfo | None:
        """The agent's tensor of that name, or the one it is tied to."""
        found = self.checkpoint.tensors.get(info.name)
        if found is None:
            partner = tied_partner(self.checkpoint.tensors, info)
            if partner is not None and self._ties(info):
                self.tied.add(partner.name)
                self.notes.append(f"{self.checkpoint.label}: {info.name} is tied to {partner.name}")
                return partner
            self.absent.append(info.name)
        return found

    def _ties(self, info: TensorInfo) -> bool:
        """Whether `info` of the base and its partner are one tensor: the configs say, or the base's bytes."""
        for checkpoint in (self.checkpoint, self.base):
            flag = _tie_flag(checkpoint)
            if flag is not None:
                return flag
        partner = tied_partner(self.base.tensors, info)
        return partner is None or (self.same_bytes is not None and self.same_bytes(self.base, info, partner))

    def accept(self, info: TensorInfo, found: TensorInfo | None) -> TensorInfo | None:
        """`found` if it can be merged into the base's tensor, otherwise a problem."""
        if found is None:
            return None
        where = f"{self.checkpoint.label}/{found.file}: {info.name}"
        if found.dtype not in Dtype.__members__:
            self.problems.append(
                f"{where} is {found.dtype}, the base's is {info.dtype}, and they cannot be merged; "
                f"use --exclude {info.name} to copy the base's"
            )
        elif found.shape != info.shape:
            if not self._is_vocabulary(info, found):
                self.problems.append(
                    f"{where} has shape {found.shape}, the base has {info.shape}; give an agent that was trained "
                    f"from this base, or use --exclude {info.name} to copy the base's"
                )
            elif self.options.vocab == "error":
                self.problems.append(
                    f"{where} has shape {found.shape}, the base has {info.shape}; "
                    "use --vocab base-rows to merge the rows both have"
                )
            else:
                self.rows.append(f"{info.name} ({found.shape[0]} rows, the base has {info.shape[0]})")
        return found

    def same_kind(self, info: TensorInfo, found: TensorInfo | None, known: bool) -> TensorInfo | None:
        """`found` if its bytes can be compared with those of a tensor that is copied from the base."""
        if found is None:
            (self.unneeded if known else self.missing).append(info)
            return None
        if (found.dtype, found.shape, found.nbytes) == (info.dtype, info.shape, info.nbytes):
            return found
        text = (
            f"{self.checkpoint.label}/{found.file}: {info.name} is {found.dtype} {found.shape} of {found.nbytes} "
            f"bytes, the base's is {info.dtype} {info.shape} of {info.nbytes}"
        )
        if known:
            self.notes.append(f"{text}; the base's is copied")
        else:
            self.problems.append(
                f"{text}; a dtype we do not know is copied only where all hold the same bytes, "
                f"use --exclude {info.name} to copy the base's"
            )
        return None

    def _is_vocabulary(self, info: TensorInfo, found: TensorInfo) -> bool:
        """Whether the shapes differ in nothing but the number of vocabulary rows."""
        if not info.shape or not found.shape or info.shape[1:] != found.shape[1:]:
            return False
        config = self.base.config or {}
        sizes = [
            part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)
        ]
        return has_vocabulary_rows(info.name) or info.shape[0] in sizes

    def report(self, notes: list[str]) -> None:
        """Turn what was gathered into problems or notes."""
        label, extra = self.checkpoint.label, self._extra()
        hint = mismatch_hint(self.absent, [info.name for info in extra])
        if self.missing:
            text = f"{label} lacks {list_names(self.missing)} that the base has{hint}"
            if self.options.missing == "error":
                self.problems.append(f"{text}; use --missing base to treat them as unchanged there")
            else:
                notes.append(f"{text}; unchanged there")
        if extra:
            text = f"{label} has {list_names(extra)} that the base lacks{hint}"
            if self.options.extra == "error":
                self.problems.append(f"{text}; use --extra ignore to leave them out")
            else:
                notes.append(f"{text}; left out")
        if self.unneeded:
            notes.append(f"{label} lacks {list_names(self.unneeded)}; the base's are copied")
        if self.rows:
            notes.append(f"{label}: only the rows both have are merged: {', '.join(self.rows)}")
        notes.extend(self.notes)

    def _extra(self) -> list[TensorInfo]:
        """Tensors that only the agent has, without a tied one that repeats its partner."""
        extra = []
        for info in self.checkpoint.tensors.values():
            if (
                info.name in self.base.tensors
                or info.name in self.tied
                or not self.options.selects(info.name)
            ):
                continue
            partner = tied_partner(self.checkpoint.tensors, info)
            untied = partner is None or partner.name not in self.base.tensors or _tie_flag(self.base) is False
            if untied or partner is None or self.same_bytes is None:
                extra.append(info)
            elif self.same_bytes(self.checkpoint, info, partner):
                self.notes.append(
                    f"{self.checkpoint.label}: {info.name} repeats {partner.name}, tied in the base"
                )
            else:
                self.problems.append(
                    f"{self.checkpoint.label}: {info.name} differs from {partner.name}, but the base ties "
                    f"the two (it has no {info.name}); an untied agent cannot be merged into this base, give one "
                    "that ties them"
                )
        return extra


def _tie_flag(checkpoint: Checkpoint) -> bool | None:
    """`tie_word_embeddings` of the config, also inside `text_config`; None where it does not say."""
    config = checkpoint.config or {}
    for part in (config, config.get("text_config")):
        flag = part.get("tie_word_embeddings") if isinstance(part, Mapping) else None
        if flag is not None:
            return bool(flag)
    return None


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
    for k, agent in enumerate(agents, start=1):
        pairs: dict[tuple[str, str], list[TensorInfo]] = {}
        for entry in result.entries:
            ours, theirs = entry.sources[0], entry.sources[k]
            if not entry.reason and ours and theirs and ours.dtype != theirs.dtype:
                pairs.setdefault((theirs.dtype, ours.dtype), []).append(ours)
        for pair, infos in pairs.items():
            coarser = min(pair, key=lambda name: Dtype[name].mantissa)
            advice = (
                f"rounding alone counts as a change; --compare-dtype {coarser.lower()} compares what both can hold"
                if compare is None
                else f"what changed is compared in {compare.name}"
            )
            text = f"{agent.label} stores {list_names(infos)} as {pair[0]} where {base.label} has {pair[1]}"
            result.mismatches.append((k - 1, f"{text}: {advice}"))
