"""Tiny Llama models in float32: a base and what three agents made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folders
import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[np.float32]]

HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, KEYS = 32, 48, 64, 3, 4, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def shapes(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama model by name."""
    kv = KEYS * (HIDDEN // HEADS)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        found |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


@dataclass(frozen=True)
class Family:
    """Weights, flat, and the folders that hold them."""

    base: Weights
    agents: Sequence[Weights]
    base_path: Path
    paths: Sequence[Path]


def family(root: Path, share: float, size: float, seed: int, layers: int = LAYERS) -> Family:
    """Agents that moved a share of the elements, each its own, by about `size`; weights are about 0.02."""
    rng = np.random.default_rng(seed)
    base = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes(layers).items()}
    agents = []
    for _ in range(3):
        agents.append(
            {
                name: np.where(
                    rng.random(weights.shape) < share,
                    weights + rng.normal(0, size, weights.shape).astype(np.float32),
                    weights,
                )
                for name, weights in base.items()
            }
        )
    return written(root, base, agents, num_hidden_layers=layers)


def patterns(root: Path, moves: Sequence[Sequence[float]]) -> Family:
    """A base of halves, and agents that move its elements by the same few numbers over and over."""
    base = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes().items()}
    agents = [
        {name: weights + np.resize(move, weights.shape) for name, weights in base.items()} for move in moves
    ]
    return written(root, base, agents)


def written(
    root: Path, base: Weights, agents: Sequence[Weights], dtype: str = "F32", **config: Any
) -> Family:
    """A family and its folders; `config` changes entries of config.json."""
    paths = [write(root / f"agent-{t}", agent, dtype, **config) for t, agent in enumerate(agents, start=1)]
    flat = [{n: w.ravel().astype(np.float32) for n, w in model.items()} for model in (base, *agents)]
    return Family(flat[0], flat[1:], write(root / "base", base, dtype, **config), paths)


def write(path: Path, model: Weights, dtype: str = "F32", **config: Any) -> Path:
    """A checkpoint folder."""
    tensors = {name: folders.tensor(dtype, weights) for name, weights in model.items()}
    return folders.folder(path, tensors, config=CONFIG | config)
