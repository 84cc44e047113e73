"""LoRA agents: what an adapter means for the base, its deltas to the bit, and whole merges with them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pytest
import reference as ref
import runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ramstream import Checkpoint, Limits, RamPlus, merge, plan_merge
from ramstream.checkpoint import lora
from ramstream.checkpoint.lora import adapter_tensors
from ramstream.checkpoint.safetensors import read_header
from ramstream.errors import CheckpointError, ContentError, PlanError
from ramstream.kernels.lowrank import TILE, low_rank
from ramstream.methods.ram import Ram
from ramstream.plan import MatchOptions
from ramstream.types import GRAIN, Dtype, LowRank, TensorInfo

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
SIZES = {"F32": 4, "F64": 8, "BF16": 2, "F16": 2, "I32": 4}
Q = "model.layers.0.self_attn.q_proj"

quick = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])

Shapes = Mapping[str, tuple[int, ...]]


def header(shapes: Shapes, dtype: str = "F32", prefix: str = PREFIX) -> dict[str, TensorInfo]:
    """Tensors end to end, as `read_header` gives them."""
    found, end = {}, 100
    for short, shape in shapes.items():
        name, nbytes = prefix + short, math.prod(shape) * SIZES.get(dtype, 1)
        found[name] = TensorInfo(name, dtype, shape, "adapter_model.safetensors", end, nbytes)
        end += nbytes
    return found


def pair(module: str = Q, rank: int = 4, rows: int = 6, columns: int = 10) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_A.weight": (rank, columns), f"{module}.lora_B.weight": (rows, rank)}


def embedding(module: str, rank: int = 4, words: int = 20, width: int = 10) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_embedding_A": (rank, words), f"{module}.lora_embedding_B": (width, rank)}


def read(shapes: Shapes, dtype: str = "F32", **config: Any) -> dict[str, TensorInfo]:
    """The logical tensors of an adapter without problems."""
    found, problems = adapter_tensors({**CONFIG, **config}, header(shapes, dtype), "agent-b")
    assert problems == []
    return found


def recipe(info: TensorInfo) -> LowRank:
    assert isinstance(info.recipe, LowRank)
    return info.recipe


def scaling(module: str = Q, rank: int = 4, **config: Any) -> float:
    return recipe(read(pair(module, rank), **config)[f"{module}.weight"]).scaling


# --- what an adapter means ---


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_a_pair_is_a_delta_of_the_bases_weight(dtype: str) -> None:
    stored = header(pair(), dtype)
    a, b = stored.values()
    assert read(pair(), dtype) == {
        f"{Q}.weight": TensorInfo(
            f"{Q}.weight",
            "F32",
            (6, 10),
            "adapter_model.safetensors",
            a.offset,
            a.nbytes,
            LowRank(a, b, scaling=2.0, transposed=False),
        )
    }


def test_fan_in_fan_out_stores_the_base_transposed() -> None:
    info = read(pair("h.0.attn.c_attn"), fan_in_fan_out=True)["h.0.attn.c_attn.weight"]
    assert info.shape == (10, 6)
    assert recipe(info).transposed


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_an_embedding_has_a_row_for_every_column_of_its_a(fan_in_fan_out: bool) -> None:
    found = read(embedding("model.embed_tokens"), fan_in_fan_out=fan_in_fan_out)
    info = found["model.embed_tokens.weight"]
    assert info.shape == (20, 10)
    assert recipe(info).transposed
    assert recipe(info).a.name == f"{PREFIX}model.embed_tokens.lora_embedding_A"


def test_the_adapters_own_name_may_stand_in_the_names() -> None:
    shapes = {**pair(), **embedding("model.embed_tokens")}
    renamed = {
        re.sub(r"(lora_(embedding_)?[AB])", r"\1.default", name): shape for name, shape in shapes.items()
    }
    plain, named = read(shapes), read(renamed)
    assert list(plain) == list(named) == [f"{Q}.weight", "model.embed_tokens.weight"]
    assert [info.shape for info in plain.values()] == [info.shape for info in named.values()]


def test_what_was_trained_whole_is_a_tensor_like_any_other() -> None:
    names = {
        "lm_head.weight": "lm_head.weight",
        "score.modules_to_save.weight": "score.weight",
        "classifier.modules_to_save.default.weight": "classifier.weight",
        "head.modules_to_save.default.dense.weight": "head.dense.weight",
        "h.0.attn.c_attn.base_layer.bias": "h.0.attn.c_attn.bias",
        "h.0.ln_1.bias": "h.0.ln_1.bias",
    }
    shapes = {name: (3, i) for i, name in enumerate(names)}
    stored = header(shapes, "BF16")
    found = read(shapes, "BF16", modules_to_save=["lm_head"], bias="all")
    assert list(found) == list(names.values())
    for before, after in zip(stored.values(), found.values(), strict=True):
        assert after == replace(before, name=after.name)


def test_a_copy_of_the_bases_weight_keeps_its_own_name() -> None:
    shapes = {**pair("lm_head"), "lm_head.base_layer.weight": (6, 10)}
    assert list(read(shapes)) == ["lm_head.weight", "lm_head.base_layer.weight"]


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    shapes = {"z.weight": (2,), **pair("y"), "x.weight": (2,)}
    assert list(read(dict(reversed(shapes.items())))) == ["x.weight", "y.weight", "z.weight"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 2.0),
        ({"lora_alpha": 16.5}, 4.125),
        ({"lora_alpha": -8}, -2.0),
        ({"use_rslora": True}, 4.0),
        ({"use_rslora": None, "rank_pattern": None, "alpha_pattern": {}}, 2.0),
        ({"r": 99, "rank_pattern": {"q_proj": 4}}, 2.0),
        ({"r": 99, "rank_pattern": {"k_proj": 5, "q_proj": 4, Q: 6}, "use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 3}}, 0.75),
        ({"alpha_pattern": {"proj": 3}}, 2.0),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.[qk]_proj": 3}}, 0.75),
        ({"alpha_pattern": {f"^{Q}": 3}}, 0.75),
        ({"alpha_pattern": {"^self_attn.q_proj": 3}}, 2.0),
        ({"alpha_pattern": {"q_proj|k_proj": 3, "q_proj": 100}}, 0.75),
    ],
)
def test_scaling(config: dict[str, Any], expected: float) -> None:
    assert scaling(**config) == expected


def test_settings_that_change_no_delta_are_left_alone() -> None:
    config: dict[str, Any] = dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), False)
    config |= dict.fromkeys(
        ("target_parameters", "layer_replication", "trainable_token_indices", "eva_config")
    )
    config |= {
        "qalora_group_size": 16,
        "loftq_config": {},
        "runtime_config": {"ephemeral_gpu_offload": False},
    }
    config |= {"corda_config": {"cov": 1}, "megatron_core": "megatron.core", "lora_dropout": 0.1}
    config |= {"target_modules": ["q_proj"], "peft_version": "0.18.0", "something_new": 3}
    for init in (True, False, None, "gaussian", "eva", "orthogonal"):
        assert scaling(**config, init_lora_weights=init) == 2.0


# --- what is wrong with one ---

SEVERAL = {
    "use_dora": True,
    "r": 0,
    "lora_alpha": "16",
    "rank_pattern": {"(": 4, "q": 0},
    "fan_in_fan_out": 1,
}

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({"peft_type": ...}, "peft_type is None, only LORA"),
    **{
        kind: (
            {"peft_type": kind},
            f"peft_type is {kind}, only LORA is supported; if PEFT's merge_and_unload",
        )
        for kind in ("IA3", "LOHA", "LOKR", "ADALORA", "VERA", "PROMPT_TUNING", "XLORA", "TRAINABLE_TOKENS")
    },
    "type is a list": ({"peft_type": ["LORA"]}, "only LORA"),
    "no rank": ({"r": ...}, "r is missing, not a positive integer"),
    "rank null": ({"r": None}, "r is None"),
    "rank zero": ({"r": 0}, "r is 0, not a positive integer"),
    "rank negative": ({"r": -4}, "r is -4"),
    "rank a fraction": ({"r": 4.0}, "r is 4.0, not a positive integer"),
    "rank true": ({"r": True}, "r is True"),
    "rank text": ({"r": "4"}, "r is 4, not a positive integer"),
    "another rank": (
        {"r": 8},
        f"{Q}.lora_A.weight: has rank 4, its B has rank 4, adapter_config.json says 8",
    ),
    "huge rank": ({"r": 1 << 80}, f"says {1 << 80}"),
    "pattern of another rank": ({"rank_pattern": {"q_proj": 5}}, "adapter_config.json says 5"),
    "no alpha": ({"lora_alpha": ...}, "lora_alpha is missing, not a finite number"),
    "alpha text": ({"lora_alpha": "16"}, "lora_alpha is 16, not a finite number"),
    "alpha true": ({"lora_alpha": True}, "lora_alpha is True"),
    "alpha NaN": ({"lora_alpha": math.nan}, "lora_alpha is nan"),
    "alpha infinite": ({"lora_alpha": math.inf}, "lora_alpha is inf"),
    "alpha of 400 digits": ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
    "scaling beyond float32": ({"lora_alpha": 1e40}, r"scaling of 2.5e\+39, which float32 cannot hold"),
    "patterns are a list": ({"rank_pattern": ["q_proj"]}, "rank_pattern is .*, not an object"),
    "pattern is no pattern": ({"alpha_pattern": {"q_(": 4}}, r"alpha_pattern: q_\( is no regular expression"),
    "pattern repeats too often": ({"rank_pattern": {"a{99999999999}": 4}}, "no regular expression"),
    "pattern nests too deeply": ({"rank_pattern": {"(" * 1_000 + ")" * 1_000: 4}}, "no regular expression"),
    "pattern to text": (
        {"rank_pattern": {"q_proj": "4"}},
        "rank_pattern: q_proj is 4, not a positive integer",
    ),
    "pattern to infinity": ({"alpha_pattern": {"x": math.inf}}, "alpha_pattern: x is inf, not a finite"),
    "flag is a number": ({"use_rslora": 1}, "use_rslora is 1, not true or false"),
    "flag is text": ({"fan_in_fan_out": "true"}, "fan_in_fan_out is true, not true or false"),
    "DoRA": ({"use_dora": True}, "use_dora is True, which is not supported: DoRA rescales.*merge_and_unload"),
    "biases": ({"lora_bias": True}, "lora_bias is True"),
    "parameters": ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is .*fused experts"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is .*rows of single tokens"),
    "replicated layers": ({"layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is .*some tokens only"),
    "quantisation-aware": ({"use_qalora": True}, "use_qalora is True"),
    "variant nobody knows": ({"use_new_trick": True}, "use_new_trick is True.*something else than LoRA"),
    "config of an unknown variant": ({"kasa_config": {"beta": 1}}, "kasa_config is "),
    **{
        init: (
            {"init_lora_weights": init},
            f"init_lora_weights is {init}, which changes the base.*path_initial",
        )
        for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "unheard of")
    },
    "initialisation is a list": ({"init_lora_weights": ["eva"]}, "init_lora_weights is "),
    "saved modules are text": ({"modules_to_save": "lm_head"}, "modules_to_save is lm_head, not a list"),
    "saved modules are absent": ({"modules_to_save": ["lm_head"]}, "the weights hold none of them"),
}

HALF = {f"{Q}.lora_A.weight": (4, 10)}
NOT_LORA = "is no part of LoRA that ramstream knows"

TENSORS: dict[str, tuple[Shapes, str]] = {
    "nothing": ({}, "weights hold no tensors"),
    "no B": (HALF, f"{Q}.lora_A.weight: has no lora_B beside it"),
    "no A": ({f"{Q}.lora_B.weight": (6, 4)}, "has no lora_A beside it"),
    "B of another rank": ({**HALF, f"{Q}.lora_B.weight": (6, 5)}, "has rank 4, its B has rank 5"),
    "transposed files": ({**HALF, f"{Q}.lora_B.weight": (4, 6)}, "has rank 4, its B has rank 6"),
    "half an embedding": ({"e.lora_embedding_B": (10, 4)}, "has no lora_A beside it"),
    "linear A and embedding B": ({**HALF, f"{Q}.lora_embedding_B": (6, 4)}, "has no lora_B beside it"),
    "convolution": (
        {"conv.lora_A.weight": (4, 3, 3, 3), "conv.lora_B.weight": (6, 4, 1, 1)},
        r"lora_A.weight: has shape \(4, 3, 3, 3\), as of a convolution, which is not supported",
    ),
    "experts": (
        {"e.lora_A.weight": (8, 4, 10), "e.lora_B.weight": (8, 6, 4)},
        r"has shape \(8, 4, 10\), as of a convolution",
    ),
    "not gathered": (
        {f"{Q}.lora_A.weight": (0,), f"{Q}.lora_B.weight": (0,)},
        r"lora_A.weight, .*lora_B.weight: has shape \(0,\), perhaps saved before DeepSpeed ZeRO-3",
    ),
    "empty": ({f"{Q}.lora_A.weight": (4, 0), f"{Q}.lora_B.weight": (6, 4)}, r"has shape \(4, 0\), perhaps"),
    "rank of zero": ({f"{Q}.lora_A.weight": (0, 10), f"{Q}.lora_B.weight": (6, 0)}, r"has shape \(0, 10\)"),
    "bias of B": ({**pair(), f"{Q}.lora_B.bias": (6,)}, f"lora_B.bias: {NOT_LORA}"),
    "magnitudes": ({**pair(), f"{Q}.lora_magnitude_vector": (6,)}, f"magnitude_vector: {NOT_LORA}"),
    "magnitudes with a name": ({**pair(), f"{Q}.lora_magnitude_vector.default.weight": (6,)}, NOT_LORA),
    "AdaLoRA": ({**pair(), f"{Q}.lora_E": (4, 1)}, NOT_LORA),
    "A without weight": ({f"{Q}.lora_A": (4, 10)}, NOT_LORA),
    "A of the model itself": ({"lora_A.weight": (4, 10)}, NOT_LORA),
    "tokens": ({"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 10)}, NOT_LORA),
    "two adapters": (
        {f"{Q}.lora_{side}.{name}.weight": (4, 4) for side in "AB" for name in ("default", "other")},
        "lora_A.other.weight, .*lora_B.other.weight: is there for more than one adapter; keep one",
    ),
    "whole and a pair": ({**pair(), f"{Q}.weight": (6, 10)}, f"{Q}.weight: is there more than once"),
    "linear and embedding": ({**pair("e"), **embedding("e")}, "e.weight: is there more than once"),
    "whole twice": ({"h.weight": (2,), "h.modules_to_save.x.weight": (2,)}, "h.weight: is there more than"),
}


def config_with(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`...` takes a key away."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_faulty_config_is_one_line(fault: str) -> None:
    changes, expected = CONFIGS[fault]
    _, problems = adapter_tensors(config_with(changes), header(pair()), "agent-b")
    assert len(problems) == 1
    assert re.match("agent-b/adapter_(config.json|model.safetensors): .*;", problems[0])
    assert re.search(expected, problems[0])
    assert len(problems[0]) < 600


@pytest.mark.parametrize("fault", TENSORS)
def test_faulty_tensors_are_named_in_one_line(fault: str) -> None:
    shapes, expected = TENSORS[fault]
    _, problems = adapter_tensors(CONFIG, header(shapes), "agent-b")
    text = "\n".join(problems)
    assert re.search(expected, text)
    assert all(line.startswith("agent-b/adapter_") for line in problems)
    assert len(problems) <= 2


@pytest.mark.parametrize("dtype", ["I32", "F64", "F8_E4M3", "F4_NEW"])
def test_dtypes_that_are_no_lora_are_refused(dtype: str) -> None:
    _, problems = adapter_tensors(CONFIG, header(pair(), dtype), "agent-b")
    assert len(problems) == 1
    assert f"lora_B.weight: is {dtype}, not one of F32, BF16, F16; convert it to F32" in problems[0]


def test_names_without_pefts_prefix_are_refused() -> None:
    _, problems = adapter_tensors(CONFIG, header(pair(), prefix="unet."), "agent-b")
    assert len(problems) == 1
    assert "does not begin with base_model.model., as PEFT names what it saves" in problems[0]


def test_all_problems_are_listed_at_once_and_the_same_ones_together() -> None:
    shapes = {f"{i}.{name}": shape for i in range(9) for name, shape in HALF.items()}
    shapes |= {"conv.lora_A.weight": (4, 3, 3, 3), "conv.lora_B.weight": (6, 4, 1, 1), "x.lora_E": (4,)}
    _, problems = adapter_tensors(config_with(SEVERAL), header(shapes), "agent-b")
    assert len(problems) == 10
    assert "and 4 more: has no lora_B beside it" in "\n".join(problems)


PARTS = ["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "weight", "bias", "default", "q"]
PARTS += ["base_layer", "modules_to_save", "lora_", "", "x\ny"]
NAMES = st.lists(st.sampled_from(PARTS), max_size=5).map(lambda parts: PREFIX + ".".join(parts))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = ["peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"]
KEYS += ["modules_to_save", "init_lora_weights", "use_dora", "x_config"]


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES),
    st.dictionaries(NAMES, st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6),
)
@settings(quick, max_examples=300)
def test_whatever_stands_there_is_a_tensor_or_a_problem(config: dict[str, Any], shapes: Shapes) -> None:
    for start in ({}, CONFIG):
        found, problems = adapter_tensors({**start, **config}, header(shapes, prefix=""), "agent-b")
        assert all(line.startswith("agent-b/") and line.isprintable() for line in problems)
        used = {info.name for info in found.values() if info.recipe is None}
        used |= {
            part.name for info in found.values() if info.recipe for part in (recipe(info).a, recipe(info).b)
        }
        assert problems or len(used) == len(shapes) > 0


# --- the kernel ---


def delta(
    a: NDArray[np.float32], b: NDArray[np.float32], scaling: float, transposed: bool = False
) -> NDArray[np.float32]:
    """All of it, in plain numpy: a sum from 0, k ascending, then scaled; every operation rounds to float32."""
    total = np.zeros((len(b), a.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(len(a)):
            total = total + b[:, k, None] * a[k]
        total = np.float32(scaling) * total
    return total.T if transposed else total


def computed(
    a: NDArray[np.float32], b: NDArray[np.float32], scaling: float, transposed: bool, cuts: list[int]
) -> NDArray[np.float32]:
    """The same by the kernel, from cut to cut."""
    b = np.ascontiguousarray(b.T) if transposed else b
    out = np.full(cuts[-1], np.nan, np.float32)
    with np.errstate(all="ignore"):
        for begin, end in pairwise(cuts):
            low_rank(a, b, np.float32(scaling), transposed, begin, out[begin:end])
    return out


def assert_same_bits(one: NDArray[np.float32], two: NDArray[np.float32]) -> None:
    """NaNs may differ in their payload: a computed one is written as the one NaN."""
    assert np.array_equal(np.isnan(one), np.isnan(two))
    keep = ~np.isnan(one)
    assert np.array_equal(one[keep].view(np.uint32), two[keep].view(np.uint32))


def matrices(
    seed: int, rank: int, rows: int, columns: int, wild: bool
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Ordinary factors, or any bits at all."""
    rng = np.random.default_rng(seed)
    if wild:
        bits = [rng.integers(0, 1 << 32, shape, np.uint32) for shape in ((rank, columns), (rows, rank))]
        return bits[0].view(np.float32), bits[1].view(np.float32)
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((rank, columns), (rows, rank)))
    a[:, ::3], b[1::2] = -0.0, np.float32(1e-30)
    return a, b


@given(
    seed=st.integers(0, 99),
    rank=st.integers(1, 20) | st.sampled_from([32, 64, 65]),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40) | st.sampled_from([TILE - 1, TILE, TILE + 1, 2 * TILE + 7]),
    scale=st.sampled_from([2.0, 0.1, -1 / 3, 0.0, 1e38]),
    transposed=st.booleans(),
    wild=st.booleans(),
    data=st.data(),
)
@settings(quick, max_examples=150)
def test_every_cut_gives_the_same_bits(
    seed: int, rank: int, rows: int, columns: int, scale: float, transposed: bool, wild: bool, data: Any
) -> None:
    a, b = matrices(seed, rank, rows, columns, wild)
    n = rows * columns
    cuts = sorted([0, n, *data.draw(st.lists(st.integers(0, n), max_size=6))])
    expected = delta(a, b, scale, transposed).ravel()
    assert_same_bits(computed(a, b, scale, transposed, cuts), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_only_the_rows_of_the_range_need_to_be_there(transposed: bool) -> None:
    a, b = matrices(0, 5, 30, 40, wild=False)
    expected = delta(a, b, 2.0, transposed)
    out = np.empty(70, np.float32)
    if transposed:
        low_rank(np.ascontiguousarray(a[:, 8:12]), np.ascontiguousarray(b.T), np.float32(2), True, 15, out)
    else:
        low_rank(a, b[8:12], np.float32(2), False, 15, out)
    assert_same_bits(out, expected[8:12].ravel()[15:85])


def check_a_few() -> None:
    """For the interpreter without numba's compiler."""
    for transposed in (False, True):
        for wild in (False, True):
            a, b = matrices(3, 9, 4, 50, wild)
            cuts = [0, 3, 60, 200]
            expected = delta(a, b, -1 / 3, transposed).ravel()
            assert_same_bits(computed(a, b, -1 / 3, transposed, cuts), expected)


def test_the_kernel_as_plain_python_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import test_lora; test_lora.check_a_few()"],
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- PEFT is the oracle ---


@contextmanager
def unheard() -> Iterator[None]:
    """PEFT and transformers warn of much that is meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def peft() -> Any:
    with unheard():
        pytest.importorskip("transformers")
        return pytest.importorskip("peft")


def tiny(kind: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2":
        sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        config = transformers.GPT2Config(**sizes, tie_word_embeddings=False)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    name, tied, _ = kind.partition(TIED)
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=bool(tied), attention_bias=True)
    return getattr(transformers, name)(config)


TIED = ", tied"
LLAMA, SCORED = "LlamaForCausalLM", "LlamaForSequenceClassification"
ATTENTION = ["q_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"down_proj": 3, r"^model\.layers\.1\.self_attn\.q_proj": 6},
    "alpha_pattern": {r"layers\.\d\.mlp\..*": 5, "layers.0.self_attn.q_proj": 7},
}
ORACLE: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": (LLAMA, {"target_modules": ATTENTION}),
    "all kinds": (LLAMA, {"target_modules": [*ATTENTION, "embed_tokens"], "modules_to_save": ["lm_head"]}),
    "embedding and head": (LLAMA, {"target_modules": ["embed_tokens", "lm_head"], "lora_alpha": 7}),
    "root of the rank": (LLAMA, {"target_modules": ATTENTION, "use_rslora": True, "r": 5}),
    "patterns": (LLAMA, {"target_modules": ATTENTION, **PATTERNS}),
    "patterns and root": (LLAMA, {"target_modules": ATTENTION, **PATTERNS, "use_rslora": True}),
    "all biases": (LLAMA, {"target_modules": ["q_proj"], "bias": "all"}),
    "biases beside pairs": (LLAMA, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "one layer": (LLAMA, {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "classifier": (SCORED, {"target_modules": "all-linear", "task_type": "SEQ_CLS"}),
    "Conv1D": ("GPT2", {"target_modules": ["c_attn", "c_proj", "wte"], "fan_in_fan_out": True}),
    "Conv1D with biases": ("GPT2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "bias": "all"}),
    "Conv1D by itself": ("GPT2", {"target_modules": ["c_attn"], "bias": "lora_only"}),
}


@dataclass(frozen=True)
class Trained:
    """A PEFT model as files, and its weights before and after PEFT merged them, float32."""

    folder: Path
    before: dict[str, NDArray[np.float32]]
    after: dict[str, NDArray[np.float32]]


def weights_of(model: Any) -> dict[str, NDArray[np.float32]]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def train(peft: Any, path: Path, kind: str, **config: Any) -> Trained:
    """Random numbers in everything that PEFT would train: B begins with zeros."""
    import torch

    with unheard():
        model = tiny(kind)
        before = weights_of(model)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 16, **config}))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3)
        adapted.save_pretrained(path)
        return Trained(path, before, weights_of(adapted.merge_and_unload()))


def logical_tensors(path: Path) -> dict[str, TensorInfo]:
    name = "adapter_model.safetensors"
    _, infos = read_header(path / name, name, name)
    config = json.loads((path / "adapter_config.json").read_text())
    found, problems = adapter_tensors(config, {info.name: info for info in infos}, "adapter")
    assert problems == []
    return found


def values(path: Path, info: TensorInfo) -> NDArray[np.float32]:
    data = (path / info.file).read_bytes()[info.offset : info.offset + info.nbytes]
    bits = np.frombuffer(data, ref.FORMATS[info.dtype].raw)
    return ref.widen(bits, info.dtype, "F32").reshape(info.shape)


def assert_adds_up(
    path: Path, info: TensorInfo, base: NDArray[np.float32], after: NDArray[np.float32]
) -> None:
    """base + delta is what PEFT merged, but for the order of its sums."""
    how = recipe(info)
    a, b = values(path, how.a), values(path, how.b)
    assert info.shape == base.shape
    change = computed(a, b, how.scaling, how.transposed, [0, info.elements]).reshape(info.shape)
    size = delta(abs(a), abs(b), abs(how.scaling), how.transposed)
    ulps = np.abs(base + change - after) / np.spacing(size + abs(base))
    assert ulps.max() <= 2 + len(a)
    assert np.abs(change).max() > 1e-3


@pytest.mark.parametrize("case", ORACLE)
def test_peft_merges_to_the_same(case: str, peft: Any, tmp_path: Path) -> None:
    kind, config = ORACLE[case]
    trained = train(peft, tmp_path, kind, **config)
    found = logical_tensors(tmp_path)
    for name, base in trained.before.items():
        after, info = trained.after[name], found.pop(name, None)
        if info is None:
            assert np.array_equal(base, after), name
        elif info.recipe is None:
            assert np.array_equal(values(tmp_path, info), after), name
        else:
            assert_adds_up(tmp_path, info, base, after)
    for name, info in found.items():
        original = trained.before[name.replace(".base_layer.weight", ".weight")]
        assert np.array_equal(values(tmp_path, info), original), name


PIECES = ["model", "layers", "0", "1", "10", "q_proj", "k_proj", "mlp"]
MODULES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map(".".join)
REGEXES = MODULES | st.sampled_from(
    ["^model.layers.0", r".*\.q_proj", "[qk]_proj", "q_proj|mlp", "", r"layers\.\d+\.mlp", "(q_proj)", "lp"]
)


@given(st.lists(REGEXES, unique=True, max_size=4), MODULES)
@settings(quick, max_examples=300)
def test_patterns_match_as_pefts_do(peft: Any, patterns: list[str], module: str) -> None:
    alphas = {pattern: 10 + i for i, pattern in enumerate(patterns)}
    key = peft.utils.other.get_pattern_key(alphas.keys(), module)
    assert scaling(module, alpha_pattern=alphas) == alphas.get(key, 8) / 4


def test_what_peft_calls_its_variants_is_known_or_refused(peft: Any) -> None:
    """A new variant in PEFT must not pass for LoRA."""
    import dataclasses

    variants = {
        field.name
        for field in dataclasses.fields(peft.LoraConfig)
        if field.metadata.get("is_lora_variant") or field.name.startswith("use_")
    }
    for name in variants - lora._NO_VARIANTS:
        _, problems = adapter_tensors({**CONFIG, name: [1]}, header(pair()), "agent-b")
        assert len(problems) == 1, name


# --- whole merges ---


@dataclass(frozen=True)
class Delta:
    """What the oracle takes for a LoRA pair: its float32 deltas."""

    values: NDArray[np.float32]

    @property
    def source(self) -> ref.Source:
        return ref.Source(ref.DELTA, self.values.ravel())


EMBED, HEAD, DOWN, NORM = "embed_tokens.weight", "lm_head.weight", "mlp.down_proj.weight", "norm.weight"


def base_model(width: int = 24) -> folders.Model:
    shapes = {EMBED: (50, width), f"{Q}.weight": (width, width), DOWN: (width, 64)}
    shapes |= {NORM: (width,), HEAD: (50, width)}
    return {name: folders.normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


@dataclass(frozen=True)
class Adapter:
    """An adapter as files hold it, and as the oracle takes it."""

    stored: folders.Model
    config: dict[str, Any]
    oracle: dict[str, Any]

    def write(self, path: Path) -> Path:
        folders.weights(path / "adapter_model.safetensors", self.stored)
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        return path


def adapter_of(base: folders.Model, seed: int = 7, dtype: str = "BF16", **config: Any) -> Adapter:
    """Pairs for embedding and matrices, the head saved whole; many rows of B are zero or small."""
    rng = np.random.default_rng(seed)
    settings = {**CONFIG, "modules_to_save": ["lm_head"], **config}
    stored: folders.Model = {}
    oracle: dict[str, Any] = {}
    for name in (name for name, tensor in base.items() if len(tensor.shape) == 2 and name != HEAD):
        module, shape = name.removesuffix(".weight"), base[name].shape
        embedded = name == EMBED
        transposed = embedded or bool(settings.get("fan_in_fan_out"))
        rows, columns = shape[::-1] if transposed else shape
        a = folders.tensor(dtype, rng.normal(0, 0.02, (settings["r"], columns)))
        steps = rng.choice([0.0, 1e-3, 0.02], (rows, 1)) * rng.normal(0, 1, (rows, settings["r"]))
        b = folders.tensor(dtype, steps)
        for side, matrix in (("A", a), ("B", b)):
            ending = f"lora_embedding_{side}" if embedded else f"lora_{side}.weight"
            stored[f"{PREFIX}{module}.{ending}"] = matrix
        factors = [matrix.values.astype(np.float32) for matrix in (a, b)]
        oracle[name] = Delta(delta(*factors, settings["lora_alpha"] / settings["r"], transposed))
    head = folders.trained(base[HEAD], seed)
    return Adapter({**stored, f"{PREFIX}{HEAD}": head}, settings, {**oracle, HEAD: head})


def plan_for(paths: list[Path], method: Any = None, **options: Any) -> Any:
    base, *agents = [Checkpoint.open(path) for path in paths]
    return plan_merge(base, agents, method or RamPlus(), MatchOptions(**options))


def written_family(
    tmp_path: Path, base: folders.Model, adapter: Adapter, count: int = 1
) -> tuple[list[Path], list[Any]]:
    """Folders of a base, an adapter and `count` full agents; and the agents for the oracle."""
    full = folders.agents_of(base, count)
    paths = [folders.folder(tmp_path / "base", base, config={}), adapter.write(tmp_path / "adapter")]
    paths += [folders.folder(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(full)]
    return paths, [adapter.oracle, *full]


@pytest.mark.parametrize("device", ["cpu", "cpu:torch"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("count", [0, 2])
def test_an_adapter_among_full_agents_merges_as_the_oracle_does(
    dtype: str, count: int, device: str, tmp_path: Path
) -> None:
    base = base_model()
    paths, agents = written_family(tmp_path, base, adapter_of(base, dtype=dtype), count)
    merge(plan_for(paths), tmp_path / "out", Limits(workers=2, device=device))
    assert folders.read(tmp_path / "out") == folders.merged(base, agents)
    assert folders.read(tmp_path / "out") != base


@pytest.mark.parametrize("config", [{"fan_in_fan_out": True}, {"use_rslora": False, "r": 7, "lora_alpha": 3}])
def test_the_config_decides_what_is_merged(config: dict[str, Any], tmp_path: Path) -> None:
    base = base_model()
    paths, agents = written_family(tmp_path, base, adapter_of(base, **config))
    merge(plan_for(paths, Ram()), tmp_path / "out", Limits(workers=1, device="cpu"))
    assert folders.read(tmp_path / "out") == folders.merged(base, agents, r=0)


def test_adapters_are_compared_in_another_dtype_as_the_oracle_does(tmp_path: Path) -> None:
    base = base_model()
    paths, agents = written_family(tmp_path, base, adapter_of(base))
    plan = plan_for(paths, compare_dtype=Dtype.BF16)
    merge(plan, tmp_path / "out", Limits(workers=1, device="cpu"))
    assert folders.read(tmp_path / "out") == folders.merged(base, agents, compare="BF16")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], folders.Model]:
    """A model of more than one grain, and what the oracle merges it to."""
    base = {"big.weight": folders.normal(99, GRAIN // 1000 + 3, 1010), **base_model()}
    paths, agents = written_family(tmp_path_factory.mktemp("large"), base, adapter_of(base))
    return paths, folders.merged(base, agents)


def test_bytes_do_not_depend_on_workers_or_reading(
    large: tuple[list[Path], folders.Model], tmp_path: Path
) -> None:
    paths, expected = large
    outputs = []
    for workers, io in ((1, "mmap"), (3, "mmap"), (1, "pread"), (3, "pread")):
        out = tmp_path / f"out-{workers}-{io}"
        merge(plan_for(paths), out, Limits(workers=workers, io=io, device="cpu"))  # type: ignore[arg-type]
        outputs.append(runs.promised(out))
    assert all(output == outputs[0] for output in outputs)
    assert folders.read(tmp_path / "out-1-mmap") == expected


@pytest.mark.parametrize("title", ["counting", "merging"])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    title: str, large: tuple[list[Path], folders.Model], tmp_path: Path
) -> None:
    paths, expected = large
    runs.stopped(plan_for(paths), tmp_path / "out", title)
    merge(plan_for(paths), tmp_path / "out", Limits(workers=1, device="cpu"))
    assert folders.read(tmp_path / "out") == expected


def test_another_config_is_another_merge(tmp_path: Path) -> None:
    """The scaling stands in no weight file."""
    base = base_model()
    adapter = adapter_of(base)
    paths, _ = written_family(tmp_path, base, adapter)
    digests = set()
    for alpha in (8, 16):
        replace(adapter, config={**adapter.config, "lora_alpha": alpha}).write(paths[1])
        digests.add(plan_for(paths).count.digest)
    assert len(digests) == 2


def test_what_matches_nothing_of_the_base_is_an_error_that_names_it(tmp_path: Path) -> None:
    base = base_model()
    paths, _ = written_family(tmp_path, base, adapter_of(base))
    del base[DOWN], base[HEAD]
    folders.folder(tmp_path / "base", base)
    with pytest.raises(CheckpointError) as caught:
        plan_for(paths[:2])
    assert DOWN in str(caught.value)
    assert HEAD in str(caught.value)


def test_an_adapter_of_a_larger_model_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    base = base_model()
    paths, _ = written_family(tmp_path, base, adapter_of(base_model(width=32)))
    with pytest.raises(CheckpointError) as caught:
        plan_for(paths[:2])
    assert re.search(rf"{re.escape(Q)}.weight .*\(32, 32\).*\(24, 24\)", str(caught.value))


def test_nonfinite_factors_are_found(tmp_path: Path) -> None:
    base = base_model()
    adapter = adapter_of(base)
    name = f"{PREFIX}{Q}.lora_A.weight"
    values = adapter.stored[name].values
    values[1, 3] = np.nan
    adapter.stored[name] = folders.tensor("BF16", values)
    paths, _ = written_family(tmp_path, base, adapter)
    with pytest.raises(ContentError) as caught:
        merge(plan_for(paths), tmp_path / "out", Limits(workers=1, device="cpu"))
    assert f"{Q}.weight" in str(caught.value)


def test_an_adapter_is_no_base(tmp_path: Path) -> None:
    base = base_model()
    paths, _ = written_family(tmp_path, base, adapter_of(base))
    with pytest.raises(PlanError, match="LoRA adapter"):
        plan_for([paths[1], paths[0]])


def test_problems_of_an_adapter_are_problems_of_the_checkpoint(tmp_path: Path) -> None:
    adapter = adapter_of(base_model())
    path = replace(adapter, config={**adapter.config, "use_dora": True, "r": 3}).write(tmp_path / "adapter")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert "adapter/adapter_config.json: use_dora is True" in str(caught.value)
    assert "adapter_config.json says 3" in str(caught.value)


@pytest.mark.parametrize("as_file", [False, True])
def test_an_adapter_without_its_config_is_refused(as_file: bool, tmp_path: Path) -> None:
    path = adapter_of(base_model()).write(tmp_path / "adapter")
    if not as_file:
        (path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json") as caught:
        Checkpoint.open(path / "adapter_model.safetensors" if as_file else path)
    assert "LoRA adapter" in str(caught.value) or not as_file


def test_a_peft_folder_merges_into_its_saved_base(peft: Any, tmp_path: Path) -> None:
    """Saved by transformers and PEFT, merged by us, against PEFT's own merge."""
    with unheard():
        tiny(LLAMA).save_pretrained(tmp_path / "base")
    trained = train(peft, tmp_path / "adapter", LLAMA, target_modules=ATTENTION, modules_to_save=["lm_head"])
    merge(plan_for([tmp_path / "base", tmp_path / "adapter"], Ram(epsilon=0.0)), tmp_path / "out")
    for name, tensor in folders.read(tmp_path / "out").items():
        assert np.allclose(tensor.values, trained.after[name], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_an_adapter_that_trains_one_of_two_tied_tensors_apart_is_an_error(
    saved: str, peft: Any, tmp_path: Path
) -> None:
    """What PEFT saves whole it trained as a copy: in the base the same values would do for both."""
    with unheard():
        tiny(LLAMA + TIED).save_pretrained(tmp_path / "base")
    train(peft, tmp_path / "adapter", LLAMA + TIED, target_modules=["q_proj"], modules_to_save=[saved])
    with pytest.raises(CheckpointError, match=rf"holds \S*{saved}.weight whole, trained apart"):
        plan_for([tmp_path / "base", tmp_path / "adapter"])


def test_the_copies_of_the_base_that_peft_saves_beside_embeddings_are_not_read(
    peft: Any, tmp_path: Path
) -> None:
    with unheard():
        tiny(LLAMA).save_pretrained(tmp_path / "base")
    targets = ["q_proj", "embed_tokens", "lm_head"]
    trained = train(peft, tmp_path / "adapter", LLAMA, target_modules=targets)
    plan = plan_for([tmp_path / "base", tmp_path / "adapter"], Ram(epsilon=0.0))
    held = read_header(tmp_path / "adapter" / "adapter_model.safetensors", "", "")[1]
    copies = [info.name for info in held if ".base_layer." in info.name]
    assert len([note for note in plan.count.notes if "PEFT's copy" in note]) == len(copies) > 0
    merge(plan, tmp_path / "out")
    for name, tensor in folders.read(tmp_path / "out").items():
        assert np.allclose(tensor.values, trained.after[name], rtol=1e-6, atol=1e-6), name


def test_a_merge_without_adapters_loads_no_kernel_of_theirs(tmp_path: Path) -> None:
    base = base_model()
    paths = [folders.folder(tmp_path / "base", base)]
    paths += [
        folders.folder(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(folders.agents_of(base, 2))
    ]
    code = (
        "import sys; from ramstream import *; paths = sys.argv[1:]; "
        "base, *agents = map(Checkpoint.open, paths[:3]); "
        "merge(plan_merge(base, agents, RamPlus()), paths[3]); "
        "assert 'ramstream.kernels.merging' in sys.modules; "
        "assert 'ramstream.kernels.lowrank' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
