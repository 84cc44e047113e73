"""One agent's tensors while they are matched: what it has for each of the base's, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ramstream.plan.names import Remarks, Tied, has_vocabulary_rows, list_names
from ramstream.plan.prefixes import hints, renamed
from ramstream.types import Dtype, LowRank, Scaled, Strided, TensorInfo

if TYPE_CHECKING:
    from ramstream.checkpoint import Checkpoint
    from ramstream.plan.matching import MatchOptions, SameBytes

_COPY = "use --exclude {} to copy the base's"


class Agent:
    """One agent's tensors by the names that the base would give them, and all that is to be said about them."""

    def __init__(
        self, base: Checkpoint, checkpoint: Checkpoint, options: MatchOptions, same_bytes: SameBytes | None
    ) -> None:
        self.base, self.checkpoint, self.options, self._same_bytes = base, checkpoint, options, same_bytes
        self.label = checkpoint.label
        self.stored = {renamed(name, options.map_prefix): name for name in checkpoint.tensors}
        """Names in its files, by those they are matched by."""
        self.tensors = {
            new: info if new == old else replace(info, name=new)
            for (new, old), info in zip(self.stored.items(), checkpoint.tensors.values(), strict=True)
        }
        self._partners = Tied(self.tensors.values())
        self._base_partners = Tied(base.tensors.values())
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._absent: list[TensorInfo] = []
        """Tensors of the base that it has under no name, whatever follows from that."""
        self._missing: list[TensorInfo] = []
        self._unneeded: list[TensorInfo] = []
        """Tensors that it lacks and that are the base's anyway."""
        self._tied: set[str] = set()
        """Names of its tensors that stand for the ones they are tied to."""
        self._rows: list[str] = []
        self._refused, self._odd = (Remarks(self.label, checkpoint.single_file) for _ in range(2))

    def find(self, info: TensorInfo) -> TensorInfo | None:
        """The agent's tensor of that name, or the one it is tied to."""
        found = self.tensors.get(info.name)
        if found is None:
            partner = self._partners.partner(info)
            if partner is not None and self._ties(info):
                if self.checkpoint.adapter and partner.recipe is None:
                    self._refuse_untied(info, partner)
                self._tied.add(partner.name)
                delta = ", so its delta changes both" if isinstance(partner.recipe, LowRank) else ""
                self.notes.append(f"{self.label}: {info.name} is tied to {partner.name}{delta}")
                return partner
            self._absent.append(info)
        elif self.checkpoint.adapter and found.recipe is None:
            self._refuse_untied(info, found)
        return found

    def _refuse_untied(self, info: TensorInfo, found: TensorInfo) -> None:
        """An adapter that holds one of two tied tensors whole (PEFT's modules_to_save) has untied them."""
        partner = self._partners.partner(info)
        if partner is not None and partner is not found and self._same(self.checkpoint, found, partner):
            return
        if has_vocabulary_rows(info.name) and _ties_embeddings(self.base):
            self.problems.append(
                f"the adapter {self.label} holds {self.stored[found.name]} whole, trained apart from the tensor "
                "that the base ties it to; an untied agent cannot be merged into this base, merge the adapter into "
                "an untied copy of the base first"
            )

    def lacks(self, info: TensorInfo, needed: bool = True) -> None:
        """A tensor of the base has no counterpart here: by design in an adapter, otherwise to be said."""
        if not self.checkpoint.adapter:
            (self._missing if needed else self._unneeded).append(info)

    def accept(self, info: TensorInfo, found: TensorInfo | None) -> TensorInfo | None:
        """`found` if it can be merged into the base's tensor, otherwise a problem."""
        if found is None:
            return None
        if found.dtype not in Dtype.__members__:
            text = f"is {found.dtype}, the base's is {info.dtype}, and they cannot be merged; "
            self._refused.add(found, text, _COPY)
        elif found.shape != info.shape:
            text = f"has shape {found.shape}, the base has {info.shape}; "
            if not self._is_vocabulary(info, found):
                self._refused.add(found, f"{text}{_shape_advice(info, found)}, or ", _COPY)
            elif self.options.vocab == "error":
                self._refused.add(found, f"{text}use --vocab base-rows to merge the rows both have")
            else:
                self._rows.append(f"{info.name} ({found.shape[0]} rows, the base has {info.shape[0]})")
        return found

    def same_kind(self, info: TensorInfo, found: TensorInfo | None, known: bool) -> TensorInfo | None:
        """`found` if its bytes can be compared with those of a tensor that is copied from the base."""
        if found is None:
            self.lacks(info, needed=not known)
            return None
        if isinstance(found.recipe, LowRank):
            self._refused.add(found, f"is a delta, the base's is {info.dtype}, which takes none; ", _COPY)
            return None
        if _layout(found) == _layout(info):
            return found
        text = f"is {_described(found)}, the base's is {_described(info)}"
        if known:
            self._odd.add(found, f"{text}; the base's is copied")
        else:
            text = f"{text}; a dtype we do not know is copied only where all hold the same bytes, "
            self._refused.add(found, text, _COPY)
        return None

    def report(self, met: Mapping[str, str]) -> None:
        """Turn what was gathered into problems and notes; `met` as `hints` wants it."""
        extra, adapter = self._extra(), self.checkpoint.adapter
        lacks = f"{self.label} lacks {list_names(self._missing)} that the base has"
        has = f"{self.label} has {list_names(extra)} that the base lacks"
        if adapter:
            has = f"the adapter {self.label} targets {list_names(extra)}, which the base does not have"
        problems = len(self.problems)
        self.problems += self._refused.lines()
        if self._missing and self.options.missing == "error":
            self.problems.append(f"{lacks}; use --missing base to treat them as unchanged there")
        elif self._missing:
            self.notes.append(f"{lacks}; unchanged there")
        if extra and self.options.extra == "error":
            self.problems.append(f"{has}; use --extra ignore to leave them out")
        elif extra:
            self.notes.append(f"{has}; left out")
        stored = [replace(info, name=self.stored[info.name]) for info in extra]
        why = hints(self._absent, stored, met, self.options.map_prefix)
        (self.problems if len(self.problems) > problems else self.notes).extend(
            f"{self.label}: {line}" for line in why
        )
        if self._unneeded:
            self.notes.append(f"{self.label} lacks {list_names(self._unneeded)}; the base's are copied")
        if self._rows:
            self.notes.append(f"{self.label}: only the rows both have are merged: {', '.join(self._rows)}")
        self.notes += self._odd.lines()

    def _ties(self, info: TensorInfo) -> bool:
        """Whether `info` of the base and its partner are one tensor: the configs say, or the base's bytes."""
        for checkpoint in (self.checkpoint, self.base):
            flag = _tie_flag(checkpoint)
            if flag is not None:
                return flag
        partner = self._base_partners.partner(info)
        return partner is None or self._same(self.base, info, partner)

    def _is_vocabulary(self, info: TensorInfo, found: TensorInfo) -> bool:
        """Whether the shapes differ in nothing but the number of vocabulary rows."""
        if not info.shape or not found.shape or info.shape[1:] != found.shape[1:]:
            return False
        config = self.base.config or {}
        sizes = [
            part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)
        ]
        return has_vocabulary_rows(info.name) or info.shape[0] in sizes

    def _extra(self) -> list[TensorInfo]:
        """Tensors that only the agent has, without a tied one that repeats its partner."""
        extra = []
        for info in self.tensors.values():
            taken = info.name in self.base.tensors or info.name in self._tied
            if taken or not self.options.selects(info.name):
                continue
            if self._is_copy(info):
                self.notes.append(f"{self.label}: {info.name} is PEFT's copy of the base's and is not read")
                continue
            partner = self._partners.partner(info)
            untied = partner is None or partner.name not in self.base.tensors or _tie_flag(self.base) is False
            if untied or partner is None or self._same_bytes is None:
                extra.append(info)
            elif self._same(self.checkpoint, info, partner):
                self.notes.append(f"{self.label}: {info.name} repeats {partner.name}, tied in the base")
            else:
                self.problems.append(
                    f"{self.label}: {info.name} differs from {partner.name}, but the base ties "
                    f"the two (it has no {info.name}); an untied agent cannot be merged into this base, give one "
                    "that ties them"
                )
        return extra

    def _is_copy(self, info: TensorInfo) -> bool:
        """Whether PEFT saved this beside a delta of the same tensor, as it does for embeddings and heads."""
        name = info.name.replace(".base_layer.", ".")
        ours, delta = self.base.tensors.get(name), self.tensors.get(name)
        copies = delta is not None and isinstance(delta.recipe, LowRank) and name != info.name
        return copies and ours is not None and ours.shape == info.shape

    def _same(self, checkpoint: Checkpoint, one: TensorInfo, two: TensorInfo) -> bool:
        """Whether two tensors of a checkpoint have the same elements, as far as their stored bytes show it."""
        (how, ours), (way, theirs) = _stored(one), _stored(two)
        return how == way and all(
            _place(a) == _place(b) or (self._same_bytes is not None and self._same_bytes(checkpoint, a, b))
            for a, b in zip(ours, theirs, strict=True)
        )


def _stored(info: TensorInfo) -> tuple[Any, list[TensorInfo]]:
    """How a tensor is computed, and the tensors that it is computed from."""
    match info.recipe:
        case Scaled(stored, scale, block):
            return (info.shape, stored, block), [replace(info, dtype=stored, recipe=None), scale]
        case LowRank(a, b, scaling, transposed):
            return (scaling, transposed), [a, b]
        case Strided():
            return (info.dtype, info.shape, info.recipe, _place(info)), []
        case None:
            return (info.dtype, info.shape), [info]


def _place(info: TensorInfo) -> tuple[str, int, int]:
    return info.file, info.offset, info.nbytes


def _layout(info: TensorInfo) -> tuple[Any, ...]:
    """What has to be equal for two tensors' bytes to be compared."""
    return info.dtype, info.shape, info.nbytes, info.recipe


def _described(info: TensorInfo) -> str:
    order = ", not contiguous" if isinstance(info.recipe, Strided) else ""
    return f"{info.dtype} {info.shape} of {info.nbytes} bytes{order}"


def _shape_advice(info: TensorInfo, found: TensorInfo) -> str:
    if isinstance(found.recipe, LowRank) and found.shape == info.shape[::-1]:
        return "its adapter_config.json is wrong about fan_in_fan_out"
    return "give an agent that was trained from this base"


def _ties_embeddings(base: Checkpoint) -> bool:
    """Whether a base's head is its embedding: it says so, or is a language model without a head."""
    flag = _tie_flag(base)
    if flag is not None:
        return flag
    names = (base.config or {}).get("architectures")
    generates = any(
        str(name).endswith(("CausalLM", "ConditionalGeneration", "LMHeadModel"))
        for name in (names if isinstance(names, list) else [])
    )
    return generates and sum(map(has_vocabulary_rows, base.tensors)) == 1


def _tie_flag(checkpoint: Checkpoint) -> bool | None:
    """`tie_word_embeddings` of the config, also inside `text_config`; None where it does not say."""
    config = checkpoint.config or {}
    for part in (config, config.get("text_config")):
        flag = part.get("tie_word_embeddings") if isinstance(part, Mapping) else None
        if flag is not None:
            return bool(flag)
    return None
