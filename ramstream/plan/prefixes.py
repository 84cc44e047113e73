"""Prefixes of tensor names: renaming an agent's tensors, and why two sets of names do not meet."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ramstream.checkpoint.wording import shown
from ramstream.plan.names import name_pattern
from ramstream.types import TensorInfo

Prefixes = Sequence[tuple[str, str]]
"""(from, to), every `from` once."""

_MOST_PATTERNS, _MOST_PAIRS = 500, 50
_SHOWN = 12
_FUSED = (
    (
        ("qkv_proj", "query_key_value", "Wqkv", "qkv", "c_attn"),
        (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv")),
    ),
    (("gate_up_proj",), (("gate_proj", "up_proj"), ("w1", "w3"))),
)
"""Matrices that some models store in one, under one of these names, and others apart."""
_CONVERT = "convert one of them with transformers, ramstream does not"


def renamed(name: str, prefixes: Prefixes) -> str:
    """`name` with the longest of the prefixes that it begins with replaced, once."""
    fitting = [pair for pair in prefixes if name.startswith(pair[0])]
    old, new = max(fitting, key=lambda pair: len(pair[0]), default=("", ""))
    return new + name[len(old) :]


def beginnings(names: Iterable[str]) -> str:
    """What names begin with, up to a number or the last part: `model.layers. × 24, model.norm.`."""
    found = Counter(_beginning(name_pattern(name)) for name in names)
    listed = [shown(text) if n == 1 else f"{shown(text)} × {n}" for text, n in found.most_common(_SHOWN)]
    return ", ".join(listed) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _beginning(pattern: str) -> str:
    head, number, _ = pattern.partition("*")
    return head if number else head[: head.rfind(".") + 1] or head


def hints(
    missing: Sequence[TensorInfo],
    extra: Sequence[TensorInfo],
    met: Mapping[str, str],
    prefixes: Prefixes = (),
) -> list[str]:
    """Why an agent's names may fail to meet the base's, and the option that makes them meet.

    `missing` are the base's tensors that the agent lacks, `extra` its own that the base lacks, by the names that
    are stored. `met` are the names of all agents that the base has: as stored, and as `prefixes` make them.
    """
    names = [info.name for info in missing], [info.name for info in extra]
    found = _Suggestion(missing, extra)
    return [*found.lines(met, prefixes), *_experts(*names), *_fused(*names)]


@dataclass
class _Suggestion:
    """Prefixes that turn most of `extra` into tensors of `missing` that have the same shape."""

    missing: Sequence[TensorInfo]
    extra: Sequence[TensorInfo]
    pairs: list[tuple[str, str]] = field(default_factory=list)
    turned: dict[str, str] = field(default_factory=dict)
    """Names of `extra` and what becomes of them."""

    def __post_init__(self) -> None:
        wanted = {info.name: info.shape for info in self.missing}
        left = {info.name: info.shape for info in self.extra}
        for old, new in _candidates(wanted, left):
            begun = [name for name in left if name.startswith(old)]
            hits = {
                name: target for name in begun if wanted.get(target := new + name[len(old) :]) == left[name]
            }
            if 2 * len(hits) <= min(len(begun), len(wanted)) or any(old == pair[0] for pair in self.pairs):
                continue
            self.pairs.append((old, new))
            self.turned.update(hits)
            for name, target in hits.items():
                del left[name], wanted[target]

    def lines(self, met: Mapping[str, str], prefixes: Prefixes) -> list[str]:
        """The finding in one line; none where it explains less than half."""
        if 2 * len(self.turned) <= min(len(self.missing), len(self.extra)):
            return []
        stands = " and ".join(f"{shown(repr(old))} stands for {shown(repr(new))}" for old, new in self.pairs)
        options = " ".join(f"--map-prefix {shlex.quote(f'{a}={b}')}" for a, b in self._options(met, prefixes))
        advice = f"use {options}" if options else "rename the tensors of one of them"
        return [f"its names match where {stands}: the prefix differs; {advice}"]

    def _options(self, met: Mapping[str, str], prefixes: Prefixes) -> Prefixes:
        """The pairs, and what keeps names that match already as they are; nothing where that cannot be said."""
        given = [*prefixes, *self.pairs]
        keep = {}
        for name, now in met.items():
            if renamed(name, given) != now:
                old = max((old for old, _ in self.pairs if name.startswith(old)), key=len)
                part, dot, _ = name[len(old) :].partition(".")
                keep[old + part + dot] = now[: len(now) - len(name) + len(old + part + dot)]
        options = [*self.pairs, *keep.items()]
        given += keep.items()
        whole = {**met, **self.turned}
        right = len(dict(given)) == len(given) and all(renamed(n, given) == to for n, to in whole.items())
        plain = all("=" not in old and shown(f"{old}={new}") == f"{old}={new}" for old, new in options)
        return options if right and plain and len(options) <= _SHOWN else ()


def _candidates(wanted: Iterable[str], left: Iterable[str]) -> list[tuple[str, str]]:
    """(theirs, ours): what names of `left` begin with instead of those of `wanted` that end alike, by frequency."""
    by_tail: dict[tuple[str, ...], list[str]] = {}
    for pattern in list(dict.fromkeys(map(name_pattern, wanted)))[:_MOST_PATTERNS]:
        by_tail.setdefault(_tail(pattern), []).append(pattern)
    found: Counter[tuple[str, str]] = Counter()
    for pattern, times in Counter(map(name_pattern, left)).most_common(_MOST_PATTERNS):
        if len(_tail(pattern)) == 2 and _tail(pattern) in by_tail:
            partner = max(by_tail[_tail(pattern)], key=lambda other: _common_ending(other, pattern))
            common = _common_ending(partner, pattern)
            found[pattern[: len(pattern) - common], partner[: len(partner) - common]] += times
    return [pair for pair, _ in found.most_common(_MOST_PAIRS) if "*" not in "".join(pair)]


def _tail(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _common_ending(one: str, two: str) -> int:
    """Letters of the components that two names have in common at their ends."""
    letters = -1
    for a, b in zip(reversed(one.split(".")), reversed(two.split(".")), strict=False):
        if a != b:
            break
        letters += len(a) + 1
    return max(letters, 0)


def _experts(missing: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Experts that one side stores fused and the other one by one."""
    experts = [
        [name for name in names if re.search(r"(?:^|\.)experts\.", name)] for names in (missing, extra)
    ]
    separate = [any(re.search(r"(?:^|\.)experts\.\d+\.", name) for name in names) for names in experts]
    if not all(experts) or separate[0] == separate[1]:
        return []
    ours, theirs = ("separate", "fused") if separate[0] else ("fused", "separate")
    return [f"the base stores experts {ours}, the agent {theirs}: {_CONVERT}"]


def _fused(missing: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Projections that one side stores in one matrix and the other apart."""
    ours, theirs = (
        {part for name in names for part in name.split(".") if "experts." not in name}
        for names in (missing, extra)
    )
    lines = []
    for wholes, groups in _FUSED:
        for one, other, order in (
            (ours, theirs, "the base {}, the agent {}"),
            (theirs, ours, "the agent {}, the base {}"),
        ):
            whole = next((name for name in wholes if name in one), None)
            parts = next((group for group in groups if other.issuperset(group)), None)
            if whole and parts:
                stored = order.format(f"stores {whole}", f"{', '.join(parts)} apart")
                lines.append(f"{stored}: {_CONVERT}")
    return lines
