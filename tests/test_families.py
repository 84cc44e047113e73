"""Real architectures: what transformers saves is merged, and what it loads again is the merge done in memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import reference
from numpy.typing import NDArray
from runs import cli

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
GQA = {**SIZES, **LAYERS, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
VISION = {"image_size": 28, "patch_size": 14, "hidden_size": 16, "intermediate_size": 32, **LAYERS}
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}
SPEECH = {
    "vocab_size": 64,
    "d_model": 16,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDES.items()},
    **dict(
        zip(
            ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
            (0, 1, 2, 1),
            strict=True,
        )
    ),
}
PICTURES = {
    "text_config": {**GQA, "sliding_window": 8},
    "vision_config": VISION,
    "mm_tokens_per_image": 1,
    "image_token_index": 63,
}


def words() -> dict[str, Any]:
    import torch

    return {"input_ids": torch.arange(6)[None]}


def pictures() -> dict[str, Any]:
    import torch

    ids = torch.tensor([[2, 63, 5, 6, 7]])
    kinds = {"token_type_ids": (ids == 63).long()}
    return {"input_ids": ids, "pixel_values": torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28), **kinds}


def speech() -> dict[str, Any]:
    import torch

    return {
        "input_features": torch.linspace(-1, 1, 8 * 16).view(1, 8, 16),
        "decoder_input_ids": torch.arange(4)[None],
    }


FAMILIES: dict[str, tuple[str, Mapping[str, Any], str, Callable[[], dict[str, Any]]]] = {
    "Qwen2": ("ForCausalLM", GQA, "bfloat16", words),
    "Qwen3": ("ForCausalLM", GQA | {"tie_word_embeddings": True}, "bfloat16", words),
    "Qwen3Moe": ("ForCausalLM", GQA | EXPERTS | {"num_experts": 4}, "bfloat16", words),
    "Llama": ("ForCausalLM", GQA, "float16", words),
    "Mistral": ("ForCausalLM", GQA, "bfloat16", words),
    "Gemma3": ("ForConditionalGeneration", PICTURES, "bfloat16", pictures),
    "DeepseekV3": ("ForCausalLM", SIZES | LAYERS | EXPERTS | LATENT | GROUPS, "bfloat16", words),
    "GPTNeoX": ("ForCausalLM", SIZES | LAYERS, "float32", words),
    "Mamba": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}, "float32", words),
    "Whisper": ("ForConditionalGeneration", SPEECH, "float32", speech),
    "GPT2": ("LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}, "float32", words),
    "Mixtral": ("ForCausalLM", GQA | {"num_local_experts": 4}, "bfloat16", words),
    "Phi3": ("ForCausalLM", GQA | {"pad_token_id": 0}, "bfloat16", words),
    "Bert": ("ForMaskedLM", SIZES | LAYERS, "float32", words),
}
"""What transformers calls it, its sizes, its dtype, and what it is asked. A new family is one line."""

SHARES = (0.05, 0.45, 0.3)
"""How much of the weights each agent changed."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_merge_loads_as_the_merge_done_in_memory(name: str, transformers: Any, tmp_path: Path) -> None:
    import torch

    suffix, sizes, dtype, questions = FAMILIES[name]
    kind = getattr(transformers, name + suffix)
    torch.manual_seed(0)
    kind(kind.config_class(**sizes, dtype=dtype)).to(getattr(torch, dtype)).save_pretrained(tmp_path / "seed")
    model = load_without_a_word(kind, tmp_path / "seed").eval()  # some families keep a few weights in float32
    sources = [tmp_path / part for part in ("base", "agent-1", "agent-2", "agent-3")]
    base, agents = weights_of(model), []
    model.save_pretrained(sources[0], max_shard_size="20KB")
    for path, share in zip(sources[1:], SHARES, strict=True):
        train(model, base, share)
        agents.append(weights_of(model))
        model.save_pretrained(path)
    wanted = reference.merge(base, agents)
    set_weights(model, wanted.bits)

    assert cli("merge", *sources, "-o", tmp_path / "out", "-q") == 0

    loaded = load_without_a_word(kind, tmp_path / "out").eval()
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert theirs[key].dtype == tensor.dtype, key
        assert torch.equal(bits_of(theirs[key]), bits_of(tensor)), key
    assert any(not (wanted.bits[key] == base[key].bits).all() for key in base)
    asked = questions()
    asked = {key: t.to(model.dtype) if t.is_floating_point() else t for key, t in asked.items()}
    with torch.no_grad():
        assert torch.equal(loaded(**asked).logits, model(**asked).logits)
        assert torch.isfinite(model(**asked).logits).all()


def bits_of(tensor: Any) -> Any:
    import torch

    sizes = {2: torch.int16, 4: torch.int32}
    return tensor.detach().view(sizes[tensor.element_size()]) if tensor.is_floating_point() else tensor


def floats(model: Any) -> dict[str, Any]:
    """The float tensors that a model saves, tied ones once."""
    found = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def weights_of(model: Any) -> dict[str, reference.Source]:
    """The weights for the oracle, as they are now."""
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
    sources = {}
    for name, tensor in floats(model).items():
        dtype = names[str(tensor.dtype)]
        bits = bits_of(tensor).numpy().ravel().view(reference.FORMATS[dtype].raw).copy()
        sources[name] = reference.Source(dtype, bits)
    return sources


def set_weights(model: Any, bits: Mapping[str, NDArray[Any]]) -> None:
    """The weights of a model set to these bits."""
    import torch

    with torch.no_grad():
        for name, tensor in floats(model).items():
            signed = bits[name].view(f"i{bits[name].itemsize}")
            tensor.copy_(torch.from_numpy(signed.copy()).view(tensor.dtype).view(tensor.shape))


def train(model: Any, base: Mapping[str, reference.Source], share: float) -> None:
    """A share of the base's weights moved by a step, as reinforcement learning leaves them."""
    import torch

    set_weights(model, {name: source.bits for name, source in base.items()})
    with torch.no_grad():
        for tensor in floats(model).values():
            step = 0.01 * torch.randint(-2, 3, tensor.shape)
            tensor.add_((step * (torch.rand(tensor.shape) < share)).to(tensor.dtype))


def load_without_a_word(kind: Any, path: Path) -> Any:
    """`from_pretrained` where every warning, of Python or of its logger, is an error."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = kind.from_pretrained(path, dtype="auto", output_loading_info=True)
    finally:
        logger.removeHandler(listener)
    assert said == []
    assert not any(info.values()), info
    return model
