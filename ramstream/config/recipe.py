"""What a configuration file and a command line both say, and which of its words are mergekit's."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ramstream.plan.matching import MatchOptions


@dataclass(frozen=True)
class Recipe:
    """One merge in the words of the command line."""

    base: str
    agents: tuple[str, ...]
    method: str
    """Any name that `methods.find` knows."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """As `methods.create` takes them."""
    dtype: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options by the names of `OPTIONS`: the fields of `MatchOptions` as words, and `shard_size`."""
    notes: tuple[str, ...] = ()
    """What the user should know about how it was read."""


LISTS = ("include", "exclude", "map_prefix")
WORDS = ("compare_dtype", "shard_size")
CHOICES = {
    name: typing.get_args(hint)
    for name, hint in typing.get_type_hints(MatchOptions).items()
    if typing.get_origin(hint) is typing.Literal
}
OPTIONS = (*LISTS, *CHOICES, *WORDS)
"""Beside parameters and `dtype`, what may stand under `ramstream`."""

SPELLINGS = {"scale": "lambda"}
"""Parameters that mergekit calls otherwise."""

_TASK_ARITHMETIC = frozenset({"weight", "density", "normalize", "rescale", "lambda", "int8_mask"})
MERGEKIT: Mapping[str, frozenset[str]] = {
    "linear": frozenset({"weight", "normalize"}),
    "task-arithmetic": _TASK_ARITHMETIC,
    "ties": _TASK_ARITHMETIC,
    "dare-linear": _TASK_ARITHMETIC,
    "dare-ties": _TASK_ARITHMETIC,
    "ram": frozenset({"epsilon"}),
    "ramplus-tl": frozenset({"r", "alpha", "epsilon"}),
}
"""The methods of mergekit that are here too, and the parameters they have there; it ignores others."""

IDLE: Mapping[tuple[str, str], str] = {
    ("task-arithmetic", "density"): "task-arithmetic drops nothing, in mergekit neither",
    ("task-arithmetic", "rescale"): "task-arithmetic drops nothing, in mergekit neither",
}
"""Parameters of mergekit, by method, whatever value they have without effect; `int8_mask` is one everywhere."""

ABSENT_METHODS = {
    *("arcee-fusion", "breadcrumbs", "breadcrumbs-ties", "della", "della-linear", "karcher", "model-stock"),
    *("multislerp", "nearswap", "nuslerp", "passthrough", "sce", "slerp"),
}
"""Methods of mergekit that are not here."""

NOT_HERE: Mapping[str, str] = {
    "slices": "layers are not restacked here; list whole models under models, or use mergekit for it",
    "modules": "parts of a model are not merged apart; list models, and choose tensors by include and exclude "
    "under ramstream",
    "tokenizer": "no tokenizer is built and no embedding moved here; use tokenizer_source: base, and for "
    "vocabularies of different size vocab: base-rows under ramstream",
    "chat_template": "the output has the base's chat template; change it in OUT after the merge",
    **dict.fromkeys(
        ("experts", "gate_mode", "experts_per_token", "shared_experts", "architecture"),
        "mixtures of experts are not made here; use mergekit-moe",
    ),
}
"""Keys that mean something to mergekit and are refused, with what to do."""
