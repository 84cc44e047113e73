"""float8 with scales: which layouts are known, every fault in one line, and the elements to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import folders
import fuzz
import hostile
import numpy as np
import pytest
import reference as ref
import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream import Checkpoint
from ramstream.checkpoint.float8 import dequantised, scales_as_float32
from ramstream.checkpoint.refused import refusals
from ramstream.errors import CheckpointError
from ramstream.folder import with_dtype, without_quantization
from ramstream.kernels.blocks import dequantise
from ramstream.plan import MatchOptions
from ramstream.types import Dtype, Scaled, Strided, TensorInfo

SIZES = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2, "I32": 4}
BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NESTED = {"text_config": BLOCKS}
EXPONENTS = {"quantization_config": {"scale_fmt": "ue8m0", "weight_block_size": None}}

quick = settings(deadline=None, derandomize=True, database=None)

Described = Mapping[str, tuple[str, tuple[int, ...]]]


def infos(described: Described) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, dtype, shape, f"{name}.safetensors", 8, math.prod(shape) * SIZES.get(dtype, 1))
        for name, (dtype, shape) in described.items()
    }


def problems_of(described: Described, config: object = None) -> list[str]:
    return dequantised(config, infos(described), "agent-b")[1]  # type: ignore[arg-type]


# --- which scale is whose ---

NAMES = [
    ("model.a.weight", "model.a.weight_scale_inv"),
    ("model.a.weight", "model.a.weight_scale"),
    ("model.a.weight", "model.a.scale"),
    ("layers.0.wq.weight", "layers.0.wq.qscale_weight"),
    ("weight", "weight_scale_inv"),
    ("weight", "scale"),
    ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale_inv"),
    ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_scale"),
]


@pytest.mark.parametrize(("weight", "scale"), NAMES)
@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2"])
def test_scale_is_found_by_its_name_wherever_it_lies(weight: str, scale: str, stored: str) -> None:
    tensors = infos(
        {"b": ("BF16", (3,)), scale: ("F32", (2, 3)), weight: (stored, (200, 300)), "c": ("I64", (1,))}
    )
    result, problems, notes = dequantised(None, tensors, "agent-b")
    assert problems == []
    assert list(result) == ["b", weight, "c"]
    made, old = result[weight], tensors[weight]
    assert (made.dtype, made.shape, made.offset, made.nbytes) == ("BF16", old.shape, old.offset, old.nbytes)
    assert isinstance(made.recipe, Scaled)
    assert (made.recipe.stored, made.recipe.block) == (stored, (128, 128))
    found = made.recipe.scale
    assert (found.name, found.file, found.shape) == (scale, f"{scale}.safetensors", (1, 2, 3))
    assert len(notes) == 1
    assert notes[0].startswith("agent-b: 1 float8 weights")


LAYOUTS: list[tuple[Any, ...]] = [
    # weight, scale, config, block, the recipe's scale
    ((512, 384), (4, 3), BLOCKS, (128, 128), (1, 4, 3)),
    ((576, 7168), (5, 56), BLOCKS, (128, 128), (1, 5, 56)),
    ((576, 7168), (5, 56), NESTED, (128, 128), (1, 5, 56)),
    ((576, 7168), (5, 56), None, (128, 128), (1, 5, 56)),
    ((1, 129), (1, 2), BLOCKS, (128, 128), (1, 1, 2)),
    ((96, 130), (2, 3), {"quantization_config": {"weight_block_size": [64, 48]}}, (64, 48), (1, 2, 3)),
    ((8, 96), (8, 3), {"quantization_config": {"weight_block_size": [1, 32]}}, (1, 32), (1, 8, 3)),
    ((64, 96), (1, 1), BLOCKS, (128, 128), (1, 1, 1)),
    ((64, 96), (), BLOCKS, (128, 128), (1, 1, 1)),
    ((512, 384), (), None, (512, 384), (1, 1, 1)),
    ((512, 384), (1,), None, (512, 384), (1, 1, 1)),
    ((512, 384), (1, 1), None, (512, 384), (1, 1, 1)),
    ((512, 384), (512, 1), None, (1, 384), (1, 512, 1)),
    ((512, 384), (512,), None, (1, 384), (1, 512, 1)),
    ((512, 384), (1, 384), None, (512, 1), (1, 1, 384)),
    ((512, 384), (512, 3), None, (1, 128), (1, 512, 3)),
    ((128, 128), (128, 1), None, (1, 128), (1, 128, 1)),
    ((64, 96), (64, 1), None, (1, 96), (1, 64, 1)),
    ((6,), (), None, (1, 6), (1, 1, 1)),
    ((6,), (1,), None, (1, 6), (1, 1, 1)),
    ((), (), None, (1, 1), (1, 1, 1)),
    ((4, 200, 300), (4, 2, 3), BLOCKS, (128, 128), (4, 2, 3)),
    ((4, 200, 300), (4, 2, 3), None, (128, 128), (4, 2, 3)),
    ((4, 200, 300), (4, 1, 1), None, (200, 300), (4, 1, 1)),
    ((4, 200, 300), (4,), None, (200, 300), (4, 1, 1)),
    ((4, 200, 300), (4, 200), None, (1, 300), (4, 200, 1)),
    ((4, 200, 300), (4, 1, 300), None, (200, 1), (4, 1, 300)),
    ((4, 200, 300), (), None, (200, 300), (1, 1, 1)),
    ((1, 200, 300), (1, 2, 3), None, (128, 128), (1, 2, 3)),
    ((2, 4, 200, 300), (2, 4, 2, 3), None, (128, 128), (8, 2, 3)),
    ((0, 384), (0, 3), BLOCKS, (128, 128), (1, 0, 3)),
    ((0, 384), (), None, (1, 384), (1, 0, 1)),
]


@pytest.mark.parametrize(("shape", "scale", "config", "block", "arranged"), LAYOUTS)
def test_layout_is_known(shape, scale, config, block, arranged) -> None:
    tensors = infos({"a.weight": ("F8_E4M3", shape), "a.weight_scale": ("F32", scale)})
    result, problems, _ = dequantised(config, tensors, "base")
    assert problems == []
    recipe = result["a.weight"].recipe
    assert isinstance(recipe, Scaled)
    assert recipe.block == block
    assert recipe.scale.shape == arranged


MISFITS: list[tuple[Any, ...]] = [
    ((512, 384), (4, 4), None),
    ((512, 384), (3, 4), None),
    ((512, 384), (4, 3), {"quantization_config": {"weight_block_size": [64, 64]}}),
    ((512, 384), (1, 1), BLOCKS),
    ((512, 384), (), BLOCKS),
    ((512, 384), (512, 1), BLOCKS),
    ((512, 384), (384,), None),
    ((512, 384), (1, 4, 3), None),
    ((512, 384), (8, 6), None),
    ((512, 384), (0,), None),
    ((256,), (2,), None),
    ((4, 200, 300), (2, 3), None),
    ((4, 200, 300), (2, 2, 3), None),
    ((4, 200, 300), (1, 2, 3), None),
    ((4, 200, 300), (), BLOCKS),
    ((2, 4, 200, 300), (8, 2, 3), None),
]


@pytest.mark.parametrize(("shape", "scale", "config"), MISFITS)
def test_misfit_names_both_shapes(shape, scale, config) -> None:
    described = {"a.weight": ("F8_E4M3", shape), "a.weight_scale_inv": ("F32", scale)}
    (line,) = problems_of(described, config)
    assert line.startswith(f"agent-b: a.weight: F8_E4M3 of shape {shape} has a scale of shape {scale}, ")
    assert "weight_block_size" in line


WEIGHT, SCALE = ("F8_E4M3", (256, 128)), ("F32", (2, 1))
FAULTS: dict[str, tuple[Described, object, str]] = {
    "partial": (
        {"a.weight": WEIGHT, "a.weight_scale_inv": SCALE, "b.weight": WEIGHT, "c.weight": WEIGHT},
        BLOCKS,
        "agent-b: b.weight, c.weight: float8 without a scale, where other weights have one; ",
    ),
    "partial, experts": (
        {"a.weight": WEIGHT, "a.scale": SCALE, "b.experts.down_proj": ("F8_E4M3", (4, 8, 8))},
        None,
        "agent-b: b.experts.down_proj: float8 without a scale, ",
    ),
    "no weight": (
        {"a.weight": WEIGHT, "a.weight_scale_inv": SCALE, "b.weight_scale_inv": SCALE, "weight_scale": SCALE},
        BLOCKS,
        "agent-b: b.weight_scale_inv, weight_scale: a scale without its weight; ",
    ),
    "no weight, and no other scale": (
        {"a.weight": WEIGHT, "b.qscale_weight": SCALE},
        None,
        "agent-b: b.qscale_weight: a scale without its weight; ",
    ),
    "weight is no float8": (
        {"a.weight": WEIGHT, "a.scale": SCALE, "b.weight": ("BF16", (2, 2)), "b.weight_scale": SCALE},
        None,
        "agent-b: b.weight_scale: the scale of a weight that is not float8 but BF16; ",
    ),
    "several scales": (
        {"a.weight": WEIGHT, "a.weight_scale_inv": SCALE, "a.scale": SCALE},
        None,
        "agent-b: a.weight: has several scales (scale, weight_scale_inv); ",
    ),
    "several scales of a fused one": (
        {"a.down": WEIGHT, "a.down_scale_inv": SCALE, "a.down_scale": SCALE},
        None,
        "agent-b: a.down: has several scales (_scale, _scale_inv); ",
    ),
    "unknown kind of scale": (
        {"a.weight": WEIGHT, "a.scale_weight": ("F32", ())},
        None,
        "agent-b: a.scale_weight: beside a float8 weight, perhaps a scale of a kind ramstream does not know; ",
    ),
    "second scale": (
        {"weight": WEIGHT, "weight_scale": SCALE, "weight_scale_2": ("F32", ())},
        None,
        "agent-b: weight_scale_2: beside a float8 weight, perhaps a scale of a kind ramstream does not know; ",
    ),
    "activation scale and no other": (
        {"a.weight": WEIGHT, "a.input_scale": ("F32", ())},
        None,
        "agent-b: a.input_scale: beside a float8 weight, perhaps",
    ),
    "another float8": (
        {"a.weight": ("F8_E4M3FNUZ", (256, 128)), "a.weight_scale": SCALE},
        None,
        "agent-b: a.weight: has dtype F8_E4M3FNUZ and a scale, with one are known F8_E4M3 and F8_E5M2; ",
    ),
    "scale of integers": (
        {"a.weight": WEIGHT, "a.scale": ("I32", (2, 1))},
        None,
        "agent-b: a.weight: has a scale of dtype I32, known are F32, BF16, F16, F64, F8_E8M0; ",
    ),
    "scale of float8": (
        {"a.weight": WEIGHT, "a.weight_scale": ("F8_E4M3", (256, 8))},
        None,
        "agent-b: a.weight: has a scale of dtype F8_E4M3, known are",
    ),
    "bytes of unknown meaning": (
        {"a.weight": WEIGHT, "a.scale": ("U8", (2, 1))},
        BLOCKS,
        "agent-b: a.weight: has a scale of dtype U8, but config.json's quantization_config does not say scale_fmt",
    ),
    "block size is a number": (
        {"a.weight": WEIGHT, "a.scale": SCALE},
        {"quantization_config": {"weight_block_size": 128}},
        "agent-b/config.json: weight_block_size is 128, not two positive integers; ",
    ),
    "block size is negative": (
        {"a.weight": WEIGHT, "a.scale": SCALE},
        {"quantization_config": {"weight_block_size": [128, -128]}},
        "agent-b/config.json: weight_block_size is [128, -128], not two positive integers; ",
    ),
    "block size holds a boolean": (
        {"a.weight": WEIGHT, "a.scale": SCALE},
        {"text_config": {"quantization_config": {"weight_block_size": [128, True]}}},
        "agent-b/config.json: weight_block_size is [128, True], not two positive integers; ",
    ),
}


@pytest.mark.parametrize(("described", "config", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_one_line(described, config, message) -> None:
    (line,) = problems_of(described, config)
    assert line.startswith(message)
    assert "; " in line


def test_exponents_of_a_wrong_length_are_a_fault() -> None:
    tensors = infos({"a.weight": WEIGHT, "a.scale": ("F8_E8M0", (2, 1))})
    assert dequantised(None, tensors, "base")[1] == []
    tensors["a.scale"] = TensorInfo("a.scale", "F8_E8M0", (2, 1), "f", 0, 8)
    (line,) = dequantised(None, tensors, "base")[1]
    assert line.startswith("base: a.weight: its scale of shape (2, 1) takes 2 bytes, it has 8; ")


@pytest.mark.parametrize("which", ["a.weight", "a.scale"])
def test_strides_and_a_scale_are_a_fault(which: str) -> None:
    tensors = infos({"a.weight": WEIGHT, "a.scale": SCALE})
    old = tensors[which]
    tensors[which] = TensorInfo(which, old.dtype, old.shape, "f", 0, old.nbytes, Strided((1, old.shape[0])))
    (line,) = dequantised(None, tensors, "base")[1]
    assert "do not lie one after the other" in line


def test_all_problems_are_listed_together_and_short() -> None:
    described = {}
    for i in range(5000):
        described |= {f"{i}.weight": WEIGHT, f"{i}.weight_scale_inv": ("F32", (3, 3))}
    described |= {"x.weight": WEIGHT, "y.weight_scale_inv": SCALE, "z.weight": WEIGHT, "z.scale": ("I32", ())}
    lines = problems_of(described, BLOCKS)
    assert len(lines) == 4
    assert all(line.startswith("agent-b: ") and len(line) < 400 for line in lines)
    assert "and 4,995 more: F8_E4M3 of shape (256, 128) has a scale of shape (3, 3), " in lines[0]


# --- what is left alone, and left out ---


def test_a_model_without_float8_passes_whatever_its_names() -> None:
    tensors = infos(
        {
            "norm.scale": ("BF16", (8,)),
            "a.weight": ("BF16", (8, 8)),
            "a.weight_scale_inv": ("F32", (1, 1)),
            "b.weight_scale": ("F32", ()),
            "c.input_scale": ("F32", ()),
            "d.k_scale": ("F8_E8M0", ()),
        }
    )
    result, problems, notes = dequantised({"quantization_config": {"weight_block_size": 3}}, tensors, "base")
    assert (list(result.items()), problems, notes) == (list(tensors.items()), [], [])


def test_float8_without_scales_stays_as_it_is() -> None:
    tensors = infos({"a.weight": WEIGHT, "logit_scale": ("F32", ()), "norm.scale": ("BF16", (3,))})
    for config in (None, BLOCKS, {"quantization_config": {"weight_block_size": "tensor"}}):
        assert dequantised(config, tensors, "base") == (tensors, [], [])


def test_vectors_without_scales_stay_beside_scaled_matrices() -> None:
    tensors = infos({"a.weight": WEIGHT, "a.scale": SCALE, "norm.weight": ("F8_E4M3", (9,))})
    result, problems, _ = dequantised(None, tensors, "base")
    assert problems == []
    assert result["norm.weight"] is tensors["norm.weight"]


ACTIVATIONS = [
    "a.input_scale",
    "a.input_scale_ub",
    "a.activation_scale",
    "a.act_scale",
    "a.qscale_act",
    "a.output_scale",
    "mlp.experts.gate_up_proj_activation_scale",
    "mlp.experts.down_proj_input_scale",
    "attn.k_scale",
    "attn.v_scale",
    "attn.q_scale",
    "attn.kv_scale",
    "attn.k_proj.k_scale",
]


def test_scales_of_activations_and_caches_are_left_out_with_a_note() -> None:
    described = {"a.weight": WEIGHT, "a.weight_scale": SCALE, **dict.fromkeys(ACTIVATIONS, ("F32", ()))}
    result, problems, notes = dequantised(None, infos(described), "base")
    assert problems == []
    assert list(result) == ["a.weight"]
    assert notes[1].startswith("base: 13 scales of activations are left out, ")
    assert "a.input_scale, a.input_scale_ub, a.activation_scale and 10 more" in notes[1]


def test_parameters_that_are_called_scales_stay() -> None:
    names = ["logit_scale", "norm.scale", "attn.q_scale", "attn.k_scale", "router.per_expert_scale", "scale"]
    described = {"a.weight": WEIGHT, "a.weight_scale": SCALE, **dict.fromkeys(names, ("BF16", (4,)))}
    result, problems, _ = dequantised(None, infos(described), "base")
    assert problems == []
    assert list(result) == ["a.weight", *names]


@pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "F4"])
@pytest.mark.parametrize("scale", ["a.weight_scale", "a.weight_scale_inv", "a.scale"])
def test_integers_with_scales_are_refused(dtype: str, scale: str) -> None:
    (line,) = refusals(infos({"a.weight": (dtype, (8, 8)), scale: ("F8_E4M3", (8, 1))}))
    assert "integers with scales: a.weight" in line


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "BF16"])
def test_integers_without_scales_and_scaled_floats_are_not_refused(dtype: str) -> None:
    described = {"a.weight": ("I8", (8, 8)), "b.weight": (dtype, (8, 8)), "b.weight_scale": ("F32", ())}
    assert refusals(infos(described)) == []


# --- scales ---


def test_every_exponent() -> None:
    raw = np.arange(256, dtype=np.uint8)
    wanted = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)
    for dtype in ("F8_E8M0", "U8"):
        np.testing.assert_array_equal(scales_as_float32(dtype, raw), wanted)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_float_scales_are_rounded_once_and_never_views(dtype: str) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, 8 * 4096, dtype=np.uint8).view(ref.FORMATS[dtype].raw)
    raw = bits.view(np.uint8)
    raw.flags.writeable = False
    with np.errstate(all="ignore"):
        wanted = ref.widen(bits, dtype, "F64").astype(np.float32)
    found = scales_as_float32(dtype, raw)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == np.float32
    assert not np.shares_memory(found, raw)


# --- the kernel ---


def kernel(
    stored: str,
    raw: NDArray[np.uint8],
    scale: NDArray[np.float32],
    block: tuple[int, int],
    shape: tuple[int, ...],
    cuts: list[int],
) -> NDArray[np.float32]:
    """All elements of a tensor, computed in the parts that `cuts` make."""
    out = np.zeros(raw.size, np.float32)
    rows, columns = (1, 1, *shape)[-2:]
    for begin, end in zip([0, *cuts], [*cuts, raw.size], strict=True):
        part = np.full(end - begin, 7, np.float32)
        with np.errstate(all="ignore"):
            address = np.uint64(raw.ctypes.data + begin)
            dequantise(int(Dtype[stored]), address, scale, rows, columns, *block, begin, part)
        out[begin:end] = part
    return out


def same(found: NDArray[np.float32], wanted: NDArray[np.float32], scale_is_nan: object = False) -> None:
    """To the bit, but for the payload of NaN times NaN, which IEEE leaves open."""
    found = found.reshape(wanted.shape)
    both = np.isnan(found) & np.isnan(wanted) & scale_is_nan
    np.testing.assert_array_equal(found.view(np.uint32)[~both], wanted.view(np.uint32)[~both])


@st.composite
def scaled(draw: st.DrawFn) -> tuple[Any, ...]:
    leading = draw(st.lists(st.integers(1, 3), max_size=2))
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 300))
    block = draw(st.sampled_from([(rows, columns), (1, columns), (rows, 1), (1, 32), (128, 128), (7, 5)]))
    counts = -(-rows // block[0]), -(-columns // block[1])
    shape = (
        draw(st.sampled_from([(*leading, rows, columns), (columns,)]))
        if rows == 1
        else (*leading, rows, columns)
    )
    matrices = math.prod(shape[:-2]) if draw(st.booleans()) else 1
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    raw = rng.integers(0, 256, math.prod(shape), dtype=np.uint8)
    scale = np.ldexp(rng.normal(size=(matrices, *counts)), rng.integers(-140, 120)).astype(np.float32)
    cuts = sorted(draw(st.lists(st.integers(0, raw.size), max_size=4)))
    return draw(st.sampled_from(["F8_E4M3", "F8_E5M2"])), raw, scale, block, shape, cuts


@given(scaled())
@settings(quick, max_examples=200)
def test_kernel_equals_oracle_under_any_cut(case: tuple[Any, ...]) -> None:
    stored, raw, scale, block, shape, _ = case
    same(kernel(*case), ref.dequantise(raw, stored, scale, block, shape))


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2"])
def test_every_pattern_times_every_kind_of_scale(stored: str) -> None:
    exponents = scales_as_float32("F8_E8M0", np.arange(256, dtype=np.uint8))
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3e38, 1, -1.5], np.float32)
    scale = np.concatenate([exponents, special])[None, :, None]
    shape = (scale.size, 256)
    raw = np.tile(np.arange(256, dtype=np.uint8), scale.size)
    found = kernel(stored, raw, scale, (1, 256), shape, [1000, 4097])
    same(found, ref.dequantise(raw, stored, scale, (1, 256), shape), np.isnan(scale[0]))


def test_rows_longer_than_the_kernels_blocks() -> None:
    rng = np.random.default_rng(5)
    shape, block = (3, 20_001), (2, 128)
    raw = rng.integers(0, 256, math.prod(shape), dtype=np.uint8)
    scale = rng.normal(size=(1, 2, 157)).astype(np.float32)
    found = kernel("F8_E4M3", raw, scale, block, shape, [4095, 20_001, 30_000])
    same(found, ref.dequantise(raw, "F8_E4M3", scale, block, shape))


def test_no_elements() -> None:
    scale, out = np.ones((1, 0, 1), np.float32), np.zeros(0, np.float32)
    dequantise(int(Dtype.F8_E4M3), np.uint64(0), scale, 0, 4, 128, 128, 0, out)


# --- config.json ---


def rendered(value: Any, space: Any) -> str:
    """JSON of pairs and scalars with `space()` wherever it may stand; objects are lists of pairs, so keys recur."""
    if not isinstance(value, list):
        return json.dumps(value)
    members = [
        f"{space()}{json.dumps(key)}{space()}:{space()}{rendered(v, space)}{space()}" for key, v in value
    ]
    return "{" + (",".join(members) or space()) + "}"


def pruned(value: Any, depth: int = 0) -> Any:
    """Pairs without what has to go."""
    if not isinstance(value, list):
        return value
    return [
        (key, pruned(v, 1) if depth == 0 and key == "text_config" else v)
        for key, v in value
        if key != "quantization_config"
    ]


KEYS = st.sampled_from(["quantization_config", "text_config", "a", 'b"}, "quantization_config": {', "ü\n"])
SCALARS = st.sampled_from([1, -2.5e-7, None, True, "quantization_config", '{"', "\\", "}", "", "é"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(st.tuples(KEYS, inner), max_size=4), max_leaves=12)


DTYPE_KEYS = st.sampled_from(["dtype", "torch_dtype", "text_config", "a"])
DTYPE_VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(st.tuples(DTYPE_KEYS, inner), max_size=4), max_leaves=12
)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=5), st.data())
@settings(quick, max_examples=400)
def test_quantization_goes_from_any_config(config: Any, data: st.DataObject) -> None:
    space = data.draw(st.lists(st.sampled_from(["", "", " ", "\n  ", "\t\r\n"]), min_size=1, max_size=7))
    turn = iter(range(1 << 30))
    text = "\n" + rendered(config, lambda: space[next(turn) % len(space)]) + "\n"
    found = without_quantization(text.encode())
    assert json.loads(found, object_pairs_hook=list) == json.loads(
        rendered(pruned(config), str), object_pairs_hook=list
    )
    pieces = iter(text)
    assert all(letter in pieces for letter in found.decode())  # nothing but what was there, in its order
    if pruned(config) == config:
        assert found == text.encode()


CONFIGS = [
    (
        '{\n  "a": 1,\n  "quantization_config": {\n    "b": [1, {"c": "}"}]\n  },\n  "d": 2\n}\n',
        '{\n  "a": 1,\n  "d": 2\n}\n',
    ),
    ('{\n  "a": 1,\n  "quantization_config": {}\n}\n', '{\n  "a": 1\n}\n'),
    ('{\n  "quantization_config": {},\n  "a": 1\n}', '{\n  "a": 1\n}'),
    ('{\n  "quantization_config": null\n}', "{\n}"),
    ('{"a":1,"quantization_config":{},"b":2}', '{"a":1,"b":2}'),
    (
        '{"text_config": {"x": [1], "quantization_config": {"y": 1}}, "z": 1.50}',
        '{"text_config": {"x": [1]}, "z": 1.50}',
    ),
    ('{"quantization\\u005fconfig": 1, "a": 1}', '{"a": 1}'),
    ('{"vision_config": {"quantization_config": 1}}', '{"vision_config": {"quantization_config": 1}}'),
    ('{"a": "\\"quantization_config\\": {}", "b": NaN}', '{"a": "\\"quantization_config\\": {}", "b": NaN}'),
]


def redone(pairs: Any, below: bool = True) -> Any:
    """An object of [key, value] with its dtypes, and those in `text_config`, called F."""
    return [
        (
            key,
            "F"
            if key in ("dtype", "torch_dtype") and isinstance(value, str)
            else redone(value, False)
            if key == "text_config" and below and isinstance(value, list)
            else value,
        )
        for key, value in pairs
    ]


@given(st.lists(st.tuples(DTYPE_KEYS, DTYPE_VALUES), max_size=5))
@settings(quick, max_examples=400)
def test_dtypes_of_any_config_are_changed(config: Any) -> None:
    text = rendered(config, lambda: " ")
    found = with_dtype(text.encode(), "F").decode()
    assert found == rendered(redone(config), lambda: " ")


def test_configs_are_changed_at_once() -> None:
    many = b'{"a": 1' + b', "torch_dtype": "float32", "quantization_config": 1, "b": 2' * 100_000 + b"}"
    with fuzz.within(5, "100,000 members", processor=True):
        changed = with_dtype(without_quantization(many), "float16")
    assert changed == b'{"a": 1' + b', "torch_dtype": "float16", "b": 2' * 100_000 + b"}"


@pytest.mark.parametrize(("before", "after"), CONFIGS)
def test_quantization_goes_with_one_comma_and_its_line(before: str, after: str) -> None:
    assert without_quantization(before.encode()).decode() == after


# --- whole merges ---

Model = folders.Model
SHAPES = {"a.weight": (300, 200), "mlp.experts.down_proj": (3, 130, 140), "b.weight": (5, 17)}
CONFIG = (
    b'{\n  "model_type": "test",\n  "quantization_config": {\n    "weight_block_size": [\n      128,\n'
    b'      128\n    ]\n  },\n  "torch_dtype": "bfloat16"\n}\n'
)
PLAIN_CONFIG = b'{\n  "model_type": "test",\n  "torch_dtype": "bfloat16"\n}\n'


def float8_model(seed: int, stored: str = "F8_E4M3", scale_dtype: str = "F32") -> Model:
    """Weights with scales of 128 × 128 blocks, of several shapes, and a norm."""
    rng = np.random.default_rng(seed)
    model = {"norm.weight": folders.normal(seed, 200)}
    for name, shape in SHAPES.items():
        model[name] = folders.raw(
            stored,
            rng.integers(0, 0x78, shape, dtype=np.uint8) | rng.choice([0, 0x80], shape).astype(np.uint8),
        )
        counts = (*shape[:-2], *(-(-extent // 128) for extent in shape[-2:]))
        model[name + "_scale_inv"] = folders.tensor(scale_dtype, rng.uniform(1e-4, 2e-4, counts))
    return model


def trained(base: Model, seed: int) -> Model:
    """A fine-tune that was quantised again: some elements moved by a code, some scales moved."""
    rng = np.random.default_rng(seed)
    model = {}
    for name, tensor in base.items():
        if tensor.dtype.startswith("F8_"):
            codes = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
            model[name] = folders.raw(tensor.dtype, codes ^ (rng.random(tensor.shape) < 0.2).astype(np.uint8))
        else:
            model[name] = folders.trained(tensor, seed, share=0.3 if name == "norm.weight" else 0.5)
    return model


def widened(model: Model) -> Model:
    """The same model as float32, dequantised by the oracle; what has no scale stays."""
    wide = {}
    for name, tensor in model.items():
        scale = model.get(name + "_scale_inv")
        if scale is not None:
            raw, values = np.frombuffer(tensor.data, np.uint8), scale.values.astype(np.float32)
            array = ref.dequantise(raw, tensor.dtype, values, (128, 128), tensor.shape)
            wide[name] = folders.raw("F32", array)
        elif not name.endswith("_scale_inv"):
            wide[name] = tensor
    return wide


def as_bf16(model: Model) -> Model:
    return {name: folders.tensor("BF16", tensor.values) for name, tensor in widened(model).items()}


def sharded(path: Path, model: Model, config: bytes | None = CONFIG) -> Path:
    """Weights in one shard, their scales in another."""
    scales = [name for name in model if name.endswith("_scale_inv")]
    weights = [name for name in model if name not in scales]
    parts = {"model-00001-of-00002.safetensors": scales, "model-00002-of-00002.safetensors": weights}
    return folders.folder(path, model, parts, config)


def merged(paths: list[Path], out: Path, **options: Any) -> Model:
    runs.run(runs.plan_of(paths, **options), out)
    return folders.read(out)


@pytest.mark.parametrize("stored", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("out", [None, "F32"])
def test_scaled_agents_and_a_bf16_agent_on_a_scaled_base(
    stored: str, out: str | None, tmp_path: Path
) -> None:
    base = float8_model(1, stored)
    agents = [trained(base, 2), as_bf16(trained(base, 3)), trained(base, 4)]
    paths = [
        folders.folder(tmp_path / "base", base, config=CONFIG),
        sharded(tmp_path / "agent-1", agents[0]),
        folders.folder(tmp_path / "agent-2", agents[1], config=PLAIN_CONFIG),
        sharded(tmp_path / "agent-3", agents[2], config=None),
    ]
    found = merged(paths, tmp_path / "out", dtype=None if out is None else Dtype[out])
    wanted = folders.merged(widened(base), [widened(agent) for agent in agents], out or "BF16")
    assert found == wanted
    config = (tmp_path / "out" / "config.json").read_bytes()
    assert config == (PLAIN_CONFIG if out is None else PLAIN_CONFIG.replace(b"bfloat16", b"float32"))


def test_scale_dtypes_and_shards_make_no_difference(tmp_path: Path) -> None:
    base = float8_model(5, scale_dtype="BF16")
    agent = trained(base, 6)
    as_f32 = {n: folders.tensor("F32", t.values) if n.endswith("inv") else t for n, t in agent.items()}
    found = [
        merged(
            [sharded(tmp_path / f"base-{i}", base), sharded(tmp_path / f"agent-{i}", a)],
            tmp_path / f"out-{i}",
        )
        for i, a in enumerate([agent, as_f32])
    ]
    assert found[0] == found[1] == folders.merged(widened(base), [widened(agent)], "BF16")


@pytest.mark.parametrize("dtype", ["F8_E8M0", "U8"])
def test_scales_that_are_exponents(dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(20)
    base = {n: t for n, t in float8_model(21).items() if not n.endswith("_scale_inv")}
    agent = trained(base, 22)
    stored, wide = [], []
    for model in (base, agent):
        exponents = {
            f"{name}_scale_inv": rng.integers(
                110, 118, [*shape[:-2], *(-(-n // 128) for n in shape[-2:])], np.uint8
            )
            for name, shape in SHAPES.items()
        }
        powers = {n: folders.tensor("F32", np.ldexp(1.0, e - np.int64(127))) for n, e in exponents.items()}
        stored.append({**model, **{n: folders.raw(dtype, e) for n, e in exponents.items()}})
        wide.append(widened({**model, **powers}))
    config = CONFIG.replace(b'"weight_block_size"', b'"scale_fmt": "ue8m0",\n    "weight_block_size"')
    paths = [sharded(tmp_path / name, m, config) for name, m in zip(("base", "agent"), stored, strict=True)]
    assert merged(paths, tmp_path / "out") == folders.merged(wide[0], wide[1:], "BF16")


def test_excluded_scaled_weights_come_out_dequantised(tmp_path: Path) -> None:
    base = float8_model(7)
    agent = trained(base, 8)
    paths = [sharded(tmp_path / "base", base), sharded(tmp_path / "agent", agent)]
    found = merged(paths, tmp_path / "out", options=MatchOptions(exclude=("a.*", "mlp.*")))
    kept = {name: t for name, t in widened(base).items() if name.startswith(("a.", "mlp."))}
    others = {name: t for name, t in widened(base).items() if name not in kept}
    wanted = folders.merged(others, [widened(agent)], "BF16")
    assert found == {**wanted, **{name: folders.tensor("BF16", t.values) for name, t in kept.items()}}


def test_a_scaled_agent_on_a_bf16_base(tmp_path: Path) -> None:
    stored = float8_model(9)
    base, agents = as_bf16(stored), [trained(stored, 10), trained(stored, 11)]
    paths = [
        folders.folder(tmp_path / "base", base, config=PLAIN_CONFIG),
        *(sharded(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(agents)),
    ]
    assert merged(paths, tmp_path / "out") == folders.merged(base, [widened(agent) for agent in agents])
    assert (tmp_path / "out" / "config.json").read_bytes() == PLAIN_CONFIG


def test_an_agent_that_changed_nothing_gives_the_base_dequantised(tmp_path: Path) -> None:
    base = float8_model(12)
    paths = [sharded(tmp_path / "base", base), sharded(tmp_path / "agent", base)]
    found = merged(paths, tmp_path / "out")
    assert found == {name: folders.tensor("BF16", t.values) for name, t in widened(base).items()}


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_weights_longer_than_a_strip(io: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(17)
    shape, counts = (5, 700, 333), (5, 6, 3)
    codes = folders.raw("F8_E4M3", rng.integers(0, 0x78, shape, dtype=np.uint8))
    scale = folders.tensor("F32", rng.uniform(1e-4, 2e-4, counts))
    base = {"odd": folders.tensor("BF16", rng.normal(size=3)), "experts": codes, "experts_scale_inv": scale}
    agents = [trained(base, 18), as_bf16(trained(base, 19))]
    paths = [sharded(tmp_path / "base", base)]
    paths += [sharded(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(agents)]
    runs.run(runs.plan_of(paths), tmp_path / "out", runs.Limits(workers=1, device="cpu", io=io))
    assert folders.read(tmp_path / "out") == folders.merged(
        widened(base), [widened(agent) for agent in agents], "BF16"
    )


def test_plan_tells_what_was_left_out(tmp_path: Path) -> None:
    base = float8_model(13)
    agent = {**trained(base, 14), "a.input_scale": folders.tensor("F32", 0.5)}
    paths = [sharded(tmp_path / "base", base), folders.folder(tmp_path / "agent", agent, config=CONFIG)]
    notes = runs.plan_of(paths).count.notes
    assert any(
        "agent: 1 scales of activations are left out" in note and "a.input_scale" in note for note in notes
    )


def test_faults_of_headers_are_found_on_opening(tmp_path: Path) -> None:
    model = float8_model(15)
    del model["b.weight_scale_inv"], model["mlp.experts.down_proj"]
    path = sharded(tmp_path / "agent", model)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["mlp.experts.down_proj_scale_inv", "b.weight"]


def test_a_single_file_is_known_by_its_shapes(tmp_path: Path) -> None:
    path = folders.weights(tmp_path / hostile.NAME, float8_model(16))
    assert all(Checkpoint.open(path).tensors[name].recipe is not None for name in SHAPES)


def test_what_says_that_the_base_was_quantised_is_left_behind(tmp_path: Path) -> None:
    base = float8_model(13)
    paths = [sharded(tmp_path / "base", base), sharded(tmp_path / "agent", trained(base, 14))]
    (tmp_path / "base" / "hf_quant_config.json").write_text("{}")
    plan = runs.plan_of(paths, "ram")
    assert "hf_quant_config.json" not in {file.name for file in plan.side_files}
    assert any("hf_quant_config.json" in line for line in plan.left_behind)
