"""Configuration files: one merge as a YAML file, in mergekit's words where it has one.

Read are `merge_method`, `base_model`, `models`, `parameters`, `dtype`, `out_dtype` and `tokenizer_source` with the
meaning that mergekit 0.1.5 gives them; what it has no word for stands under `ramstream`, which it ignores.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ramstream.config.recipe import Recipe

if TYPE_CHECKING:
    from ramstream.config.reading import read
    from ramstream.config.writing import render, write

_HOMES = {"read": "reading", "render": "writing", "write": "writing"}
"""What needs a YAML library, which a merge without a file does not load."""

__all__ = ["Recipe", "read", "render", "write"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ramstream.config' has no attribute {name!r}")
    return getattr(import_module(f"ramstream.config.{_HOMES[name]}"), name)
