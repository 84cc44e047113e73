"""float8 weights with scales: which scale belongs to which weight, and how its elements lie over it.

A weight is always stored × scale, also where the scale is named `_scale_inv`: quantising divided by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ramstream.checkpoint.wording import Problems, listed, shown
from ramstream.types import Dtype, Scaled, TensorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_STORED = (Dtype.F8_E4M3.name, Dtype.F8_E5M2.name)
_EXPONENT = "F8_E8M0"
_SCALE_ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, _EXPONENT: 1}
_USUAL_BLOCK = 128

_WEIGHT_OF = re.compile(r"(.+)_scale_inv|((?:.*\.)?weight)_scale|((?:.*\.)?)qscale_weight")
"""Names that say they are a weight's scale; `x_scale` and `x.scale` are one only beside a float8 `x`."""
_ACTIVATION = re.compile(r"(.*[._])?((input|activation|act)_scale(_ub|_inv)?|qscale_act)")
_CACHE = re.compile(r"(.*\.)?([qkv]|kv|[kv]_cache|kv_cache|output|prob)_scale")

_AGAIN = "the shards may be of different checkpoints, download all again"
_CONVERT = "convert it to bfloat16 first"


def dequantised(
    config: Mapping[str, Any] | None, tensors: Mapping[str, TensorInfo], label: str
) -> tuple[dict[str, TensorInfo], list[str], list[str]]:
    """The tensors, float8 weights as products with their scales and the scales taken out; problems; notes.

    A product counts as BF16. The scale in its recipe has the shape (matrices, scale rows, scale columns), where
    matrices is 1 or the product of the weight's leading dimensions. float8 without any scale stays as it is.
    """
    float8 = {name for name, info in tensors.items() if info.dtype.startswith("F8_")}
    float8 -= {name for name in float8 if tensors[name].dtype == _EXPONENT}
    if not float8:
        return dict(tensors), [], []
    beside = {name: found for name in tensors if name in float8 and (found := _beside(name, tensors))}
    activations = [name for name, info in tensors.items() if beside and _is_activation(info)]
    gone = {scale for found in beside.values() for scale in found}.union(activations)
    problems = Problems(label)
    declared = _declared(config if beside else None, problems)
    result = {}
    for name, info in tensors.items():
        if name in beside:
            result[name] = _product(info, [tensors[scale] for scale in beside[name]], declared, problems)
        elif name not in gone:
            result[name] = info
    _find_strays(tensors, float8 - gone, beside, gone, problems)
    return result, problems.lines(), _notes(len(beside), activations, label)


def scales_as_float32(dtype: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The elements of a scale as float32, never a view: F32, BF16, F16, F64 (rounded), F8_E8M0 or U8.

    The last two are exponents, `ue8m0`: 2^(e − 127), 255 is NaN (OCP Microscaling Formats, 5.4.1).
    """
    import numpy as np

    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype in (_EXPONENT, "U8"):
        bits = raw.astype(np.uint32) << 23
        bits[raw == 0], bits[raw == 255] = 0x0040_0000, 0x7FC0_0000
        return bits.view(np.float32)
    with np.errstate(all="ignore"):
        return raw.view(f"f{_SCALE_ITEMSIZE[dtype]}").astype(np.float32)


@dataclass(frozen=True)
class _Declared:
    """What `quantization_config` says about the scales."""

    block: tuple[int, int] | None
    exponents: bool
    """Whether bytes may be scales."""


def _declared(config: Mapping[str, Any] | None, problems: Problems) -> _Declared:
    block = _setting(config, "weight_block_size")
    exponents = _setting(config, "scale_fmt") == "ue8m0"
    if isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in block):
        return _Declared((block[0], block[1]), exponents)
    if block is not None:
        problems.add(
            "config.json", f"weight_block_size is {shown(block)}, not two positive integers; correct it"
        )
    return _Declared(None, exponents)


def _setting(config: Mapping[str, Any] | None, key: str) -> Any:
    """A setting of the quantisation, also inside `text_config`; None where it is not said."""
    parts = [config or {}, (config or {}).get("text_config")]
    found = [part.get("quantization_config") for part in parts if isinstance(part, Mapping)]
    values = [part.get(key) for part in found if isinstance(part, Mapping)]
    return next((value for value in values if value is not None), None)


def _beside(name: str, tensors: Collection[str]) -> list[str]:
    """The scales of a float8 tensor; DeepSeek's names are `_scale_inv` and `.scale`, Mistral's `.qscale_weight`."""
    names = [name + "_scale_inv", name + "_scale"]
    if f".{name}".endswith(".weight"):
        module = name.removesuffix("weight")
        names += [module + "scale", module + "qscale_weight"]
    return [scale for scale in names if scale in tensors]


def _is_activation(info: TensorInfo) -> bool:
    """Scales of activations; those of caches and outputs only if single numbers, other models have such weights."""
    single = info.elements == 1 and _CACHE.fullmatch(info.name)
    return bool(single or _ACTIVATION.fullmatch(info.name))


def _product(
    weight: TensorInfo, scales: Sequence[TensorInfo], declared: _Declared, problems: Problems
) -> TensorInfo:
    """The weight as a product with its scale; the weight itself with a problem."""
    scale = scales[0]
    block = _block(weight.shape, scale.shape, declared.block)
    fault = _fault(weight, scales, declared)
    if fault or block is None:
        problems.add("", fault or _misfit(weight, scale, declared), weight.name)
        return weight
    counts = _counts(weight.shape, block)
    matrices = math.prod(weight.shape[:-2]) if scale.elements > 1 else 1
    recipe = Scaled(weight.dtype, replace(scale, shape=(matrices, *counts)), block)
    return replace(weight, dtype=Dtype.BF16.name, recipe=recipe)


def _fault(weight: TensorInfo, scales: Sequence[TensorInfo], declared: _Declared) -> str:
    """What is wrong with how they are stored."""
    scale, known = scales[0], ", ".join(_SCALE_ITEMSIZE)
    if len(scales) > 1:
        endings = ", ".join(
            sorted(other.name.removeprefix(weight.name.removesuffix("weight")) for other in scales)
        )
        return f"has several scales ({endings}); {_AGAIN}"
    if weight.dtype not in _STORED:
        return f"has dtype {weight.dtype} and a scale, with one are known {' and '.join(_STORED)}; {_CONVERT}"
    if weight.recipe or scale.recipe:
        return f"its elements or its scale's do not lie one after the other; {_CONVERT}"
    if scale.dtype == "U8" and not declared.exponents:
        return (
            "has a scale of dtype U8, but config.json's quantization_config does not say scale_fmt ue8m0; "
            f"say so if they are exponents, otherwise {_CONVERT}"
        )
    itemsize = 1 if scale.dtype == "U8" else _SCALE_ITEMSIZE.get(scale.dtype)
    if itemsize is None:
        return f"has a scale of dtype {scale.dtype}, known are {known}; {_CONVERT}"
    if scale.nbytes != scale.elements * itemsize:
        takes = scale.elements * itemsize
        return f"its scale of shape {scale.shape} takes {takes:,} bytes, it has {scale.nbytes:,}; {_AGAIN}"
    return ""


def _misfit(weight: TensorInfo, scale: TensorInfo, declared: _Declared) -> str:
    shapes = f"{weight.dtype} of shape {weight.shape} has a scale of shape {scale.shape}"
    if declared.block:
        return f"{shapes}, but config.json says weight_block_size {list(declared.block)}; {_AGAIN}"
    usual = f"[{_USUAL_BLOCK}, {_USUAL_BLOCK}]"
    return (
        f"{shapes}, which is neither one for all, one a row or column, nor one for each block of {usual}; "
        f"say weight_block_size in config.json's quantization_config, or {_CONVERT}"
    )


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The last two dimensions; a vector is one row."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def _counts(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across a matrix, the last ones perhaps ragged."""
    rows, columns = _matrix(shape)
    return -(-rows // block[0]), -(-columns // block[1])


def _block(
    shape: tuple[int, ...], scale: tuple[int, ...], declared: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns that one element of the scale is for; None where the shapes do not fit.

    A scale with fewer dimensions has the weight's first ones: (rows,) is one a row.
    """
    rows, columns = _matrix(shape)
    if declared is None and math.prod(scale) == 1:
        return max(rows, 1), max(columns, 1)
    *matrices, down, across = (*scale, *[1] * (max(len(shape), 2) - len(scale)))
    if tuple(matrices) != shape[:-2]:
        return None
    if declared is not None:
        return declared if _counts(shape, declared) == (down, across) else None
    block = _extent(rows, down), _extent(columns, across)
    return block if all(block) else None


def _extent(size: int, count: int) -> int:
    """How much of a dimension each of `count` scales is for: all, one, or the usual block; 0 where none fits."""
    extents = (max(size, 1), 1, _USUAL_BLOCK)
    return next((extent for extent in extents if -(-size // extent) == count), 0)


def _find_strays(
    tensors: Mapping[str, TensorInfo],
    weights: Collection[str],
    beside: Collection[str],
    gone: Collection[str],
    problems: Problems,
) -> None:
    """Weights without scales, scales without weights, and what may be a scale in a layout we do not know."""
    for name, info in tensors.items():
        fault = ""
        if name in weights:
            if beside and name not in beside and len(info.shape) > 1:
                fault = f"float8 without a scale, where other weights have one; {_AGAIN}"
        elif name not in gone and "scale" in name:
            fault = _stray(name, tensors, weights)
        if fault:
            problems.add("", fault, name)


def _stray(name: str, tensors: Mapping[str, TensorInfo], weights: Collection[str]) -> str:
    """Why a tensor that is called a scale, and is nobody's, is a problem; empty where it is none."""
    found = _WEIGHT_OF.fullmatch(name)
    if found is not None:
        weight = tensors.get(found[1] or found[2] or f"{found[3]}weight")
        if weight is None:
            return f"a scale without its weight; {_AGAIN}"
        return f"the scale of a weight that is not float8 but {weight.dtype}; {_AGAIN}"
    module, dot, last = name.rpartition(".")
    if "scale" in last and f"{module}{dot}weight" in weights:
        return f"beside a float8 weight, perhaps a scale of a kind ramstream does not know; {_CONVERT}"
    return ""


def _notes(scaled: int, activations: Sequence[str], label: str) -> list[str]:
    notes = [f"{label}: {scaled:,} float8 weights are read as products with their scales"] if scaled else []
    if activations:
        notes.append(
            f"{label}: {len(activations):,} scales of activations are left out, nothing of the output is "
            f"quantised: {listed(activations, 3)}"
        )
    return notes
