"""Statistics from tallies alone: the published numbers, groups by name, warnings."""

import numpy as np
import pytest

from ramstream.methods.ram_plus import RamPlus
from ramstream.plan import Described
from ramstream.statistics import kind_of, layer_of, statistics
from ramstream.tallies import Tallies, empty

PROFILE = {
    0b000: 26.4,
    0b001: 0.20,
    0b010: 18.8,
    0b100: 25.8,
    0b011: 0.20,
    0b101: 1.37,
    0b110: 25.7,
    0b111: 1.42,
}
"""Published for Qwen2.5-7B-Instruct (code, tool, memory agent), percent of all elements by contributors."""


def described(*names: str, size: int = 1000, dtype: str = "F32", agents: int = 3) -> Described:
    labels = ("code", "tool", "memory", "more")[:agents]
    return Described("base", labels, 1e-5, names, ((size,),) * len(names), (dtype,) * len(names), (), ())


def tallies_of(patterns: dict[int, float], agents: int = 3) -> Tallies:
    """One tensor's tallies from its elements by contributor pattern."""
    tallies = empty(agents, 1)
    for pattern, n in patterns.items():
        inside = [t for t in range(agents) if pattern >> t & 1]
        tallies["patterns"][0, pattern] = n
        for t in inside:
            tallies["overlap"][0, t, len(inside) - 1] += n
            for s in inside:
                tallies["pairs"][0, s, t] += n
    return tallies


def test_the_published_profile_gives_the_published_table() -> None:
    tallies = tallies_of({pattern: round(100 * share) for pattern, share in PROFILE.items()})
    stats = statistics(described("w", size=9989), tallies, RamPlus())
    code, tool, memory = stats["agents"]
    assert [round(100 * agent["changed_share"], 1) for agent in (code, tool, memory)] == [3.2, 46.2, 54.3]
    assert [agent["rho"] for agent in (code, tool, memory)] == pytest.approx([14.9, 1.45, 1.11], rel=0.01)
    assert stats["lambda"] == pytest.approx([1.200, 1.145, 1.111], abs=1e-3)
    assert [100 * share for share in tool["overlapping"]] == pytest.approx([40.8, 56.1, 3.1], abs=0.1)
    assert stats["counts"] == [2640, 4480, 2727, 142]


def test_no_unique_element_gives_infinity_and_alpha() -> None:
    tallies = tallies_of({0b011: 10}, agents=2)
    stats = statistics(described("w", agents=2), tallies, RamPlus(alpha=1.5))
    assert [agent["rho"] for agent in stats["agents"]] == ["inf", "inf"]
    assert stats["lambda"] == [1.15, 1.15]


def test_nothing_changed_is_said_and_divides_nothing_by_zero() -> None:
    tallies = tallies_of({}, agents=2)
    stats = statistics(described("w", agents=2), tallies, RamPlus(), "tensor")
    assert stats["lambda"] == [1.0, 1.0]
    assert stats["counts"] == [1000, 0, 0]
    assert any("nothing changed at all" in text for text in stats["warnings"])


def test_no_merged_tensor_at_all_is_no_division_by_zero() -> None:
    tallies = empty(2, 0)
    stats = statistics(described(agents=2), tallies, RamPlus(), "kind")
    assert (stats["elements"], stats["lambda"], stats["groups"]) == (0, [], [])


def test_a_lambda_for_each_tensor_is_a_row_for_each_tensor() -> None:
    tallies = empty(2, 2)
    tallies["overlap"][0, :, 1] = 5
    stats = statistics(described("a", "b", agents=2), tallies, RamPlus(scope="tensor"))
    assert stats["lambda"] == {"a": [1.2, 1.2], "b": [1.0, 1.0]}


def test_almost_everything_changed_is_alarmed_with_the_two_reasons() -> None:
    tallies = tallies_of({0b1: 950}, agents=1)
    (warning,) = statistics(described("w", agents=1), tallies, RamPlus())["warnings"]
    assert "95.0 %" in warning
    assert "not an RL fine-tune" in warning
    assert "not one of this base" in warning


def test_identical_agents_are_named() -> None:
    tallies = tallies_of({0b11: 10}, agents=2)
    tallies["dots"][...] = 3.0
    warnings = statistics(described("w", agents=2), tallies, RamPlus())["warnings"]
    assert "code and tool are identical in every merged element" in warnings


def test_in_bf16_the_steps_that_lambda_moves_are_named() -> None:
    tallies = tallies_of({0b01: 10, 0b11: 2}, agents=2)
    stats = statistics(described("w", dtype="BF16", agents=2), tallies, RamPlus())
    assert stats["lambda"][0] == 1.02
    assert any("by 25 steps of bf16 or more" in text for text in stats["warnings"])


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "attention", "layer 3"),
        ("model.layers.10.mlp.up_proj.weight", "mlp", "layer 10"),
        ("model.layers.2.mlp.experts.7.down_proj.weight", "expert", "layer 2"),
        ("model.layers.0.input_layernorm.weight", "norm", "layer 0"),
        ("model.embed_tokens.weight", "embedding", "outside layers"),
        ("lm_head.weight", "embedding", "outside layers"),
        ("transformer.h.11.attn.c_attn.weight", "attention", "layer 11"),
        ("something.else", "other", "outside layers"),
    ],
)
def test_kind_and_layer_come_from_the_name(name: str, kind: str, layer: str) -> None:
    assert (kind_of(name), layer_of(name)) == (kind, layer)


def test_groups_add_up_to_the_whole() -> None:
    tallies = empty(2, 3)
    overlap = tallies["overlap"] = np.arange(3 * 2 * 2).reshape(3, 2, 2)
    names = ("layers.0.mlp.a", "layers.0.attn.b", "layers.1.mlp.c")
    for by in ("tensor", "layer", "kind"):
        groups = statistics(described(*names, agents=2), tallies, RamPlus(), by)["groups"]
        assert sum(group["elements"] for group in groups) == 3000
        assert sum(group["agents"][1]["changed"] for group in groups) == overlap[:, 1].sum()
