"""LoRA adapters as PEFT saves them: which tensors of the base they change, and by what.

Names, shapes and scaling are PEFT's: `tuners/lora/layer.py` (`get_delta_weight`), `tuners/lora/model.py` (patterns)
and `utils/save_and_load.py` (names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ramstream.checkpoint.endings import ADAPTER_CONFIG
from ramstream.checkpoint.patterns import Patterns
from ramstream.checkpoint.wording import Problems, shown
from ramstream.types import LowRank, TensorInfo

PREFIX = "base_model.model."
"""What PEFT puts before the base's names."""

_PAIR = re.compile(
    r"(?P<module>.+)\.lora_(?:(?P<linear>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<embedding>[AB])(?:\.[^.]+)?)"
)
"""The component after `lora_A` is the adapter's name, which most versions of PEFT leave out."""
_SAVED = re.compile(r"\.modules_to_save\.(?:[^.]+\.(?=.))?")
_NOT_LORA = re.compile(r"(?:^|\.)(?:lora_|token_adapter\.|trainable_tokens_)")

_MERGE = "if PEFT's merge_and_unload can merge it into its base, give the result"
_AGAIN = "download it again"
_VARIANTS = {
    "use_dora": "DoRA rescales the base's weights",
    "lora_bias": "its biases are deltas too",
    "target_parameters": "it adapts parts of modules, as of fused experts",
    "trainable_token_indices": "it replaces the rows of single tokens",
    "layer_replication": "its layers are copies of the base's",
    "alora_invocation_tokens": "it changes the weights for some tokens only",
}
_NO_VARIANTS = {
    "use_rslora",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
    "runtime_config",
}
"""Further keys `use_…` and `…_config` may be set: they say how it was trained, or are read below."""
_INITS = {"none", "true", "false", "gaussian", "eva", "orthogonal", "mica"}
"""Initialisations that leave the base as it is; PiSSA, OLoRA and their like subtract from it."""
_DTYPES = ("F32", "BF16", "F16")
_MOST_COMPARED = 100_000_000
"""Names in `modules_to_save` times letters of the names they are looked for in; usual are some thousands."""
_LARGEST = float.fromhex("0x1.fffffep127")
"""Of float32."""


def adapter_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], label: str
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors of an adapter by the base's names, and a line for every problem, each beginning with `label`.

    `config` is adapter_config.json, `tensors` what the header of the weights holds. A pair becomes an F32 tensor of
    the base's shape with the recipe `LowRank`, at the place of its A; what was trained whole (modules_to_save,
    biases) is a tensor of the agent like any other. A base's weight that PEFT saved beside a pair keeps the
    `.base_layer.weight` of its name.
    """
    problems = Problems(label)
    if config.get("peft_type") != "LORA":
        problems.add(
            ADAPTER_CONFIG, f"peft_type is {shown(config.get('peft_type'))}, only LORA is supported; {_MERGE}"
        )
        return {}, problems.lines()
    settings = _settings(config, problems)
    _refuse_variants(config, problems)
    pairs, whole = _by_kind(tensors, problems)
    _check_saved(config, whole, problems)
    found = [
        _delta(module, embedding, pair, settings, problems) for (module, embedding), pair in pairs.items()
    ]
    logical: dict[str, TensorInfo] = {}
    for info in sorted((*filter(None, found), *whole), key=lambda info: (info.file, info.offset)):
        if info.name in logical:
            problems.add(
                info.file,
                "is there more than once, as several adapters or whole beside a pair; keep one",
                info.name,
            )
        logical[info.name] = info
    if not tensors:
        problems.add(ADAPTER_CONFIG, f"is there, but its weights hold no tensors; {_AGAIN}")
    return logical, problems.lines()


@dataclass(frozen=True)
class _Numbers:
    """A number for each module: that of the first pattern that matches its name, or the one for all others."""

    key: str
    patterns: Patterns
    values: list[float]
    """The last is for all others."""

    def of(self, module: str) -> float:
        """ValueError where the patterns take too long."""
        try:
            found = self.patterns.first(module)
        except ValueError as error:
            raise ValueError(f"{self.key} {error}; write it with fewer and simpler patterns") from None
        return self.values[-1 if found is None else found]


@dataclass(frozen=True)
class _Settings:
    """What the config says about ranks and scaling, by module."""

    ranks: _Numbers
    alphas: _Numbers
    stabilised: bool
    """rsLoRA (arXiv 2312.03732): divide by the root of the rank."""
    transposed: bool
    """The base stores (in, out)."""


def _settings(config: Mapping[str, Any], problems: Problems) -> _Settings | None:
    """None where a number is wrong, with a problem."""
    ranks = _numbers(config, "r", "rank_pattern", _is_rank, "a positive integer", problems)
    alphas = _numbers(config, "lora_alpha", "alpha_pattern", _is_finite, "a finite number", problems)
    flags = [config.get(key) for key in ("use_rslora", "fan_in_fan_out")]
    for key, flag in zip(("use_rslora", "fan_in_fan_out"), flags, strict=True):
        if not (flag is None or isinstance(flag, bool)):
            problems.add(ADAPTER_CONFIG, f"{key} is {shown(flag)}, not true or false; {_AGAIN}")
    return _Settings(ranks, alphas, *map(bool, flags)) if ranks and alphas else None


def _is_rank(value: object) -> bool:
    return type(value) is int and value > 0


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _numbers(
    config: Mapping[str, Any],
    key: str,
    pattern_key: str,
    is_right: Callable[[object], bool],
    kind: str,
    problems: Problems,
) -> _Numbers | None:
    """The numbers under `pattern_key` and the one under `key`; None, with a problem, where one is wrong."""
    entries = config.get(pattern_key) or {}
    if not isinstance(entries, Mapping):
        problems.add(ADAPTER_CONFIG, f"{pattern_key} is {shown(entries)}, not an object of names; {_AGAIN}")
        return None
    found = _Numbers(pattern_key, Patterns(), [*entries.values(), config.get(key, "missing")])
    right = True
    for pattern, value in zip([*entries, None], found.values, strict=True):
        try:
            if not is_right(value):
                raise ValueError(f"is {shown(value)}, not {kind}; {_AGAIN}")
            if pattern is not None:
                found.patterns.add(pattern)
        except ValueError as error:
            right = False
            where = key if pattern is None else f"{pattern_key}: {shown(pattern)}"
            problems.add(ADAPTER_CONFIG, f"{where} {error}")
    return found if right else None


def _refuse_variants(config: Mapping[str, Any], problems: Problems) -> None:
    """PEFT names its variants of LoRA `use_…` and `…_config`; one we do not know computes something else."""
    for key, value in config.items():
        unknown = key.startswith("use_") or key.endswith("_config")
        if value and (key in _VARIANTS or (unknown and key not in _NO_VARIANTS)):
            why = _VARIANTS.get(key, "it may compute something else than LoRA")
            problems.add(
                ADAPTER_CONFIG, f"{shown(key)} is {shown(value)}, which is not supported: {why}; {_MERGE}"
            )
    init = config.get("init_lora_weights")
    if shown(init).lower() not in _INITS:
        problems.add(
            ADAPTER_CONFIG,
            f"init_lora_weights is {shown(init)}, which changes the base before training, so the adapter fits "
            f"another base; save it with path_initial_model_for_weight_conversion; or {_MERGE}",
        )


def _by_kind(
    tensors: Mapping[str, TensorInfo], problems: Problems
) -> tuple[dict[tuple[str, bool], dict[str, TensorInfo]], list[TensorInfo]]:
    """Pairs (`A` and `B`) by module and whether it is an embedding; and the others by the base's names."""
    pairs: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    whole = []
    for info in tensors.values():
        name = info.name.removeprefix(PREFIX)
        pair = _PAIR.fullmatch(name)
        if name == info.name:
            problems.add(
                info.file,
                f"does not begin with {PREFIX}, as PEFT names what it saves; save it with PEFT",
                info.name,
            )
        elif pair is not None:
            embedding = pair["embedding"] is not None
            sides = pairs.setdefault((pair["module"], embedding), {})
            side = pair["embedding"] if embedding else pair["linear"]
            if side in sides:
                problems.add(info.file, "is there for more than one adapter; keep one", info.name)
            sides[side] = info
        elif _NOT_LORA.search(name):
            problems.add(info.file, f"is no part of LoRA that ramstream knows; {_MERGE}", info.name)
        else:
            whole.append(replace(info, name=_saved_name(name)))
    return pairs, whole


def _saved_name(name: str) -> str:
    """The base's name of a tensor that was trained whole; a bias beside a pair lies in its `base_layer`."""
    name = _SAVED.sub(".", name)
    return f"{name.removesuffix('.base_layer.bias')}.bias" if name.endswith(".base_layer.bias") else name


def _check_saved(config: Mapping[str, Any], whole: Iterable[TensorInfo], problems: Problems) -> None:
    """PEFT lists modules the model need not have (`classifier`, `score`), so one of them is enough."""
    modules = config.get("modules_to_save") or []
    if not (isinstance(modules, list) and all(isinstance(module, str) for module in modules)):
        problems.add(ADAPTER_CONFIG, f"modules_to_save is {shown(modules)}, not a list of names; {_AGAIN}")
        return
    names = "\n".join(info.name for info in whole)
    if len(modules) * len(names) > _MOST_COMPARED:
        problems.add(
            ADAPTER_CONFIG,
            f"modules_to_save names {len(modules):,} modules, too many to look for; write fewer",
        )
    elif modules and not any(f"{module}." in names for module in modules):
        problems.add(
            ADAPTER_CONFIG,
            f"modules_to_save is {shown(modules)}, but the weights hold none of them; {_AGAIN}",
        )


def _delta(
    module: str,
    embedding: bool,
    pair: Mapping[str, TensorInfo],
    settings: _Settings | None,
    problems: Problems,
) -> TensorInfo | None:
    """The delta of a module's weight; None where there is none, with a problem.

    linear: A (rank, in), B (out, rank). embedding: A (rank, rows of the base), B (its columns, rank).
    """
    if len(pair) < 2:
        ((side, info),) = pair.items()
        problems.add(info.file, f"has no lora_{'B' if side == 'A' else 'A'} beside it; {_AGAIN}", info.name)
        return None
    a, b = pair["A"], pair["B"]
    faults = [(info, fault) for info in (a, b) if (fault := _fault(info))]
    for info, fault in faults:
        problems.add(info.file, fault, info.name)
    if faults or settings is None:
        return None
    (rank, columns), (rows, inner) = a.shape, b.shape
    try:
        expected, alpha = settings.ranks.of(module), settings.alphas.of(module)
    except ValueError as error:
        problems.add(ADAPTER_CONFIG, str(error))
        return None
    if not rank == inner == expected:
        problems.add(
            a.file,
            f"has rank {rank}, its B has rank {inner}, {ADAPTER_CONFIG} says {expected}; config and weights are of "
            "different adapters, download both again",
            a.name,
        )
        return None
    scaling = alpha / (math.sqrt(rank) if settings.stabilised else rank)
    if abs(scaling) > _LARGEST:
        problems.add(
            ADAPTER_CONFIG,
            f"lora_alpha makes a scaling of {scaling:g}, which float32 cannot hold; correct it",
        )
    transposed = embedding or settings.transposed
    recipe = LowRank(a, b, scaling, transposed)
    shape = (columns, rows) if transposed else (rows, columns)
    return replace(a, name=f"{module}.weight", dtype="F32", shape=shape, recipe=recipe)


def _fault(info: TensorInfo) -> str | None:
    """What is wrong with one matrix of a pair and what to do."""
    if info.dtype not in _DTYPES:
        return f"is {info.dtype}, not one of {', '.join(_DTYPES)}; convert it to F32"
    if 0 in info.shape or len(info.shape) < 2:
        return (
            f"has shape {info.shape}, perhaps saved before DeepSpeed ZeRO-3 or FSDP gathered its parts; "
            "save it again"
        )
    if len(info.shape) > 2:
        return f"has shape {info.shape}, as of a convolution, which is not supported; {_MERGE}"
    return None
