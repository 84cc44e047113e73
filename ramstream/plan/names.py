"""What names of tensors tell: patterns, embeddings that may be tied, and why two sets of names do not meet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ramstream.checkpoint.wording import shown
from ramstream.types import TensorInfo

_OUTSIDE_LAYERS = r"(?:[^.\d][^.]*\.)*"
_HEAD = re.compile(rf"{_OUTSIDE_LAYERS}(lm_head|embed_out|predictions\.decoder)\.weight|output\.weight")
_EMBEDDING = re.compile(
    rf"{_OUTSIDE_LAYERS}(embed_tokens|tok_embeddings|wte|embed_in|word_embeddings|shared)\.weight"
)
_SHOWN = 12


def has_vocabulary_rows(name: str) -> bool:
    """Whether a tensor of this name has one row a token: an input embedding or an output head."""
    return bool(_HEAD.fullmatch(name) or _EMBEDDING.fullmatch(name))


def tied_partner(tensors: Mapping[str, TensorInfo], info: TensorInfo) -> TensorInfo | None:
    """The embedding that an output head may be tied to, or the head of an embedding; None unless it is one.

    `tensors` are those of the checkpoint to look in; a partner's rows are as long as those of `info`.
    """
    if _HEAD.fullmatch(info.name):
        wanted = _EMBEDDING
    elif _EMBEDDING.fullmatch(info.name):
        wanted = _HEAD
    else:
        return None
    found = [t for t in tensors.values() if wanted.fullmatch(t.name) and t.shape[1:] == info.shape[1:]]
    return found[0] if len(found) == 1 else None


def name_pattern(name: str) -> str:
    """A tensor name with its numbers replaced: `model.layers.*.mlp.up_proj.weight`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def list_names(infos: Iterable[TensorInfo]) -> str:
    """`24 tensors (model.layers.*.mlp.up_proj.weight × 24)`, the patterns by frequency."""
    names = [info.name for info in infos]
    if len(names) <= 3:
        return ", ".join(shown(name) for name in names)
    patterns = Counter(name_pattern(name) for name in names)
    listed = [shown(name) if n == 1 else f"{shown(name)} × {n}" for name, n in patterns.most_common(_SHOWN)]
    more = len(patterns) - len(listed)
    return f"{len(names)} tensors ({', '.join(listed)}{f' and {more} more patterns' if more > 0 else ''})"


def mismatch_hint(missing: Sequence[str], extra: Sequence[str]) -> str:
    """Why names may fail to match, in brackets: another prefix, or experts stored another way; or nothing."""
    prefixes = _prefixes(missing, extra)
    if prefixes is not None:
        ours, theirs = prefixes
        hits = len({ours + name[len(theirs) :] for name in extra if name.startswith(theirs)} & set(missing))
        if 2 * hits > min(len(missing), len(extra)):
            return f" (its names match where {theirs!r} stands for {ours!r}: the prefix differs)"
    separate = [any(re.search(r"experts\.\d+\.", name) for name in names) for names in (missing, extra)]
    experts = [any("experts." in name for name in names) for names in (missing, extra)]
    if all(experts) and separate[0] != separate[1]:
        which = ("separate", "fused") if separate[0] else ("fused", "separate")
        return f" (the base stores experts {which[0]}, the agent {which[1]}: convert one of them)"
    return ""


def _prefixes(missing: Sequence[str], extra: Sequence[str]) -> tuple[str, str] | None:
    """What the first extra name that ends like a missing one begins with instead: (missing's, extra's)."""
    by_tail: dict[tuple[str, ...], list[str]] = {}
    for name in missing:
        by_tail.setdefault(_tail(name), []).append(name)
    for name in extra:
        if len(_tail(name)) == 2 and _tail(name) in by_tail:
            partner = max(by_tail[_tail(name)], key=lambda other: _common_ending(other, name))
            common = _common_ending(partner, name)
            return partner[: len(partner) - common], name[: len(name) - common]
    return None


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
