"""Weights that must not be averaged as they are, known by the names and dtypes of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ramstream.checkpoint.wording import listed
from ramstream.types import TensorInfo

_QUANTISED = (
    ((".qweight", ".qzeros"), "GPTQ or AWQ"),
    ((".weight_packed",), "compressed-tensors"),
    ((".SCB",), "bitsandbytes 8-bit"),
    (
        (".weight.absmax", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
        "bitsandbytes 4-bit",
    ),
    (("_blocks",), "MXFP4"),
)
_ORIGINAL = "quantised integers cannot be averaged; use the unquantised checkpoint"


def refusals(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """A line for every kind of weights among `tensors` that ramstream refuses, with the reason."""
    found = []
    for endings, kind in _QUANTISED:
        names = [
            name for name in tensors if f".{name}".endswith(endings) and _is_quantised(name, kind, tensors)
        ]
        if names:
            found.append(f"is quantised ({kind}: {listed(names, 3)}); {_ORIGINAL}")
    scaled = [
        info.name for info in tensors.values() if info.dtype.startswith("F8_") and _has_scale(info, tensors)
    ]
    if scaled:
        found.append(
            f"holds float8 weights with scales ({listed(scaled, 3)}), which are not supported yet; "
            "convert it to bfloat16 first"
        )
    if _is_adapter(tensors):
        found.append("is a LoRA adapter, which is not supported yet; merge it into its base first")
    return found


def _is_quantised(name: str, kind: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """gpt-oss names its MXFP4 weights `x_blocks` beside `x_scales`, both bytes; the name alone is too common."""
    return kind != "MXFP4" or (
        tensors[name].dtype == "U8" and name.removesuffix("_blocks") + "_scales" in tensors
    )


def _has_scale(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """DeepSeek's `weight_scale_inv` and `scale`, compressed-tensors' `weight_scale`."""
    beside = [info.name + "_scale_inv", info.name + "_scale"]
    if info.name.endswith(".weight"):
        beside.append(info.name.removesuffix("weight") + "scale")
    return any(name in tensors for name in beside)


def _is_adapter(names: Collection[str]) -> bool:
    """As peft saves one; LoRA layers inside a full checkpoint are tensors like any other."""
    return all(name.startswith("base_model.model.") for name in names) and any(
        ".lora_" in name for name in names
    )
