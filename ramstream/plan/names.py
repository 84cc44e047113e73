"""What names of tensors tell: patterns, by which much is said in few words, and embeddings that may be tied."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable

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


class Tied:
    """The output heads and embeddings of a checkpoint, each of which may be tied to one of the others."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self._found: dict[tuple[bool, tuple[int, ...]], list[TensorInfo]] = {}
        """By whether they are heads, and the shape of a row."""
        for info in tensors:
            if has_vocabulary_rows(info.name):
                self._found.setdefault((_is_head(info.name), info.shape[1:]), []).append(info)

    def partner(self, info: TensorInfo) -> TensorInfo | None:
        """The embedding of a head, or the head of an embedding, with rows as long; None unless it is one."""
        if not has_vocabulary_rows(info.name):
            return None
        found = self._found.get((not _is_head(info.name), info.shape[1:]), [])
        return found[0] if len(found) == 1 else None


def _is_head(name: str) -> bool:
    return _HEAD.fullmatch(name) is not None


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


class Remarks:
    """What is said of a checkpoint's tensors; what holds for many of one pattern is said once."""

    def __init__(self, label: str, single_file: bool) -> None:
        self._label, self._single_file = label, single_file
        self._infos: dict[tuple[str, str, str], list[TensorInfo]] = {}

    def add(self, info: TensorInfo, text: str, advice: str = "") -> None:
        """`advice` is an option that takes the tensor's name or pattern, and what it is for."""
        self._infos.setdefault((name_pattern(info.name), text, advice), []).append(info)

    def lines(self) -> list[str]:
        """`agent/file: NAME TEXT`, or `agent: PATTERN × 24 TEXT`."""
        lines = []
        for (pattern, text, advice), infos in list(self._infos.items())[:_SHOWN]:
            files = {info.file for info in infos}
            where = self._label if self._single_file or len(files) > 1 else f"{self._label}/{files.pop()}"
            name = infos[0].name if len(infos) == 1 else pattern
            what = shown(name) if len(infos) == 1 else f"{shown(name)} × {len(infos)}"
            lines.append(f"{where}: {what} {text}" + advice.format(shlex.quote(shown(name))))
        if len(self._infos) > _SHOWN:
            lines.append(f"{self._label}: {len(self._infos) - _SHOWN} more patterns of tensors like these")
        return lines
