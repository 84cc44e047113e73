"""Adapters whose config aims at the reader: patterns that take for ever, numbers too large, paths as names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.build import entry, weight_file

Make = Callable[[Path], object]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODULE = "model.layers.0." + "a" * 60 + "!"


def adapter(folder: Path, modules: int = 1, module: str = MODULE, **config: Any) -> None:
    """An adapter of rank 1 for so many modules of one element each."""
    header, at = {}, 0
    for i in range(modules):
        for side in "AB":
            header[f"base_model.model.{module}{i or ''}.lora_{side}.weight"] = entry(
                "F32", [1, 1], [at, at + 4]
            )
            at += 4
    weight_file(folder / WEIGHTS, header, bytes(at))
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, **config}))


def _pattern(*patterns: str, modules: int = 1) -> Make:
    return lambda folder: adapter(folder, modules, rank_pattern=dict.fromkeys(patterns, 1))


def _text(text: str) -> Make:
    def make(folder: Path) -> None:
        adapter(folder)
        (folder / CONFIG).write_text(text)

    return make


def _many_saved(folder: Path) -> None:
    """Modules none of whose names is among those of the weights."""
    header = {
        f"base_model.model.layers.{i}.modules_to_save.weight": entry("F32", [0], [0, 0]) for i in range(4_000)
    }
    weight_file(folder / WEIGHTS, header)
    (folder / CONFIG).write_text(
        json.dumps(
            {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": [f"m{i}" for i in range(4_000)]}
        )
    )


TRAPS: dict[str, Make] = {
    "repeated repetition": _pattern(r".*(a+)+$"),
    "alternatives that are the same": _pattern(r".*(a|a)*$"),
    "forty alternatives in a row": _pattern(".*" + "(a|a)" * 40 + "b"),
    "forty optional letters": _pattern(".*" + "a?" * 60 + "a" * 60 + "b"),
    "twenty times anything": _pattern(".*" * 20 + "b"),
    "repetition of nothing": _pattern("((){100}){10}model", "(a*)*b", "(|)*c"),
    "ten thousand names, ten thousand modules": _pattern(
        *(f"model.layers.{i}.up_proj" for i in range(10_000)), modules=5_000
    ),
}
"""Adapters that open, and that Python's own matching would not be done with in years."""

ADAPTERS: dict[str, tuple[Make, str]] = {
    "pattern that repeats a repetition of a repetition": (
        _pattern("(((a{1000}){1000}){1000}){1000}"),
        r"rank_pattern: .*a\{1000.* is too large a pattern, alone or after",
    ),
    "pattern that repeats nothing": (
        _pattern("((()" + "{10000}" + "){10000}){10000}"),
        "is too large a pattern",
    ),
    "pattern that looks back": (_pattern(r"(.)\1"), r"is a regular expression with \\1, which is not read"),
    "pattern that looks around": (_pattern(r"(?!lm_head).*"), r"with \(\?!, which is not read"),
    "pattern with flags": (_pattern("(?i)Q_PROJ"), r"with \(\?i, which is not read"),
    "pattern that gives nothing back": (_pattern("a*+b"), "with a possessive repetition, which is not read"),
    "pattern 1,000 deep": (_pattern("(?:" * 1_000 + ")" * 1_000), "is no regular expression"),
    "two thousand regular expressions": (
        _pattern(*(f"x{i}.*" for i in range(2_000))),
        "is one regular expression more than 1,000",
    ),
    "patterns that take too long": (
        _pattern(*(f".*.*x{i:03}[a-z]*.*y{i:03}" for i in range(1_000)), modules=5_000),
        "rank_pattern takes too long to match; write it with fewer and simpler patterns",
    ),
    "a thousand patterns of nine thousand states": (
        _pattern(*(f"a{{9000}}x{i}" for i in range(1_000))),
        "rank_pattern: .*is too large a pattern, alone or after those before it; write fewer and smaller ones",
    ),
    "pattern of 100,000 letters": (
        _pattern("[ab]" * 25_000),
        "rank_pattern: .*…'? has 100,000 letters, the limit is 4,096; write it shorter",
    ),
    "five thousand names of dots at other places": (
        _pattern(*("a" * i + ".a" * 500 for i in range(1_000))),
        "is too large a pattern, alone or after those before it",
    ),
    "four thousand modules to save, four thousand tensors": (
        _many_saved,
        "modules_to_save names 4,000 modules, too many to look for; write fewer",
    ),
    "config is no text": (_text("\x00\x01"), "adapter_config.json: is not valid JSON"),
    "config 100,000 deep": (_text("[" * 100_000), "adapter_config.json: is JSON nested too deeply"),
    "four million keys": (
        lambda folder: _text('{"use_a":1' + ',"use_a":1' * 4_100_000 + "}")(folder),
        "adapter_config.json: is JSON of 4,100,001 values",
    ),
    "a hundred thousand unknown variants": (
        lambda folder: adapter(folder, **{f"use_{i}": 1 for i in range(100_000)}),
        "agent: has 99,950 more problems",
    ),
    "a variant with an escape sequence": (
        lambda folder: adapter(folder, **{"use_\x1b[2J": "\x1b[2J"}),
        r"'use_\\x1b\[2J' is '\\x1b\[2J', which is not supported",
    ),
    "a rank of 999 digits": (
        lambda folder: adapter(folder, r=10**998),
        "has rank 1, its B has rank 1, .* says 1000",
    ),
    "an alpha of 999 digits": (
        lambda folder: adapter(folder, lora_alpha=10**998),
        "lora_alpha is 1000.*…, not a fin",
    ),
}
"""Faults of an adapter's config."""

HUGE: dict[str, tuple[Make, str]] = {
    "four million patterns that are wrong": (
        lambda folder: adapter(folder, rank_pattern=dict.fromkeys((f"*{i}" for i in range(3_900_000)), 1)),
        r"rank_pattern: \*0 is no regular expression; (.|\n)*has 3,899,950 more problems",
    ),
    "four million numbers that are wrong": (
        lambda folder: adapter(folder, rank_pattern=dict.fromkeys(map(str, range(3_900_000)), 0)),
        r"rank_pattern: 0 is 0, not a positive integer; (.|\n)*has 3,899,950 more problems",
    ),
}
"""Large faults of an adapter's config."""
