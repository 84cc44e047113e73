"""Weights that must not be averaged as they are, known by the names and dtypes of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ramstream.checkpoint.endings import ADAPTER_CONFIG
from ramstream.checkpoint.lora import PREFIX
from ramstream.checkpoint.wording import listed
from ramstream.types import Dtype, TensorInfo

_QUANTISED = (
    ((".qweight", ".qzeros"), "GPTQ or AWQ"),
    ((".weight_packed",), "compressed-tensors"),
    ((".SCB",), "bitsandbytes 8-bit"),
    (
        (".weight.absmax", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
        "bitsandbytes 4-bit",
    ),
    (("_blocks",), "MXFP4"),
    ((".weight._data",), "optimum-quanto"),
    ((".weight",), "integers with scales"),
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
    if _is_adapter(tensors):
        found.append(
            f"is a LoRA adapter, and {ADAPTER_CONFIG} says how to apply it; give the folder that holds both"
        )
    return found


def _is_quantised(name: str, kind: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Names that are too common by themselves say it with their dtype and their neighbours only.

    gpt-oss names its MXFP4 weights `x_blocks` beside `x_scales`, both bytes. int8 and packed NVFP4 weights have
    the names of float8 ones (see `float8`).
    """
    dtype, module = tensors[name].dtype, name.removesuffix("weight")
    if kind == "MXFP4":
        return dtype == "U8" and name.removesuffix("_blocks") + "_scales" in tensors
    if kind == "integers with scales":
        beside = (name + "_scale", name + "_scale_inv", module + "scale")
        return (
            dtype not in Dtype.__members__
            and not dtype.startswith("F8_")
            and any(s in tensors for s in beside)
        )
    return True


def _is_adapter(names: Collection[str]) -> bool:
    """As peft saves one; LoRA layers inside a full checkpoint are tensors like any other."""
    return all(name.startswith(PREFIX) for name in names) and any(".lora_" in name for name in names)
