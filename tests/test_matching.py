"""Matching of tensors that are computed: deltas of adapters, float8 with scales, elements in another order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ramstream.checkpoint import Checkpoint
from ramstream.errors import CheckpointError, PlanError
from ramstream.plan import MatchOptions
from ramstream.plan.matching import Matched, match
from ramstream.types import ITEMSIZE, Dtype, LowRank, Scaled, Strided, TensorInfo

EMBED, HEAD, UP, NORM = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.up.weight",
    "model.norm.weight",
)
SHAPES = {EMBED: (40, 8), UP: (16, 8), NORM: (8,)}
TIED = {"tie_word_embeddings": True}


def plain(name: str, shape: tuple[int, ...], dtype: str = "BF16", offset: int = 0) -> TensorInfo:
    size = ITEMSIZE.get(dtype, 1)
    for extent in shape:
        size *= extent
    return TensorInfo(name, dtype, shape, "model.safetensors", offset, size)


def delta(name: str, shape: tuple[int, int], offset: int = 0, transposed: bool = False) -> TensorInfo:
    rows, columns = shape[::-1] if transposed else shape
    a, b = plain("a", (2, columns), "F32", offset), plain("b", (rows, 2), "F32", offset + 1000)
    file = "adapter_model.safetensors"
    return TensorInfo(name, "F32", shape, file, offset, 0, LowRank(a, b, 0.5, transposed))


def scaled(
    name: str, shape: tuple[int, ...], block: tuple[int, int] = (128, 128), offset: int = 0
) -> TensorInfo:
    scale = plain(f"{name}_scale_inv", (1, 1), "F32", offset + 5000)
    return replace(
        plain(name, shape, "F8_E4M3", offset), dtype="BF16", recipe=Scaled("F8_E4M3", scale, block)
    )


def checkpoint(
    label: str, *infos: TensorInfo, adapter: bool = False, config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """A checkpoint of headers alone."""
    return Checkpoint(label, Path(label), {}, {info.name: info for info in infos}, config, False, adapter)


def adapter(*infos: TensorInfo, label: str = "lora") -> Checkpoint:
    return checkpoint(label, *infos, adapter=True)


def model(label: str, without: str = "", config: Mapping[str, Any] | None = None) -> Checkpoint:
    tensors = [plain(name, shape) for name, shape in SHAPES.items() if name != without]
    return checkpoint(label, *tensors, config=config)


BASE = model("base")


def matched(base: Checkpoint, *agents: Checkpoint, **words: Any) -> Matched:
    same = words.pop("same_bytes", None)
    return match(base, agents, MatchOptions(**words), same)


def refusal(base: Checkpoint, *agents: Checkpoint, **words: Any) -> list[str]:
    with pytest.raises((CheckpointError, PlanError)) as caught:
        matched(base, *agents, **words)
    return str(caught.value).splitlines()


def present(result: Matched) -> dict[str, list[bool]]:
    """Which agents have each merged tensor."""
    return {
        entry.sources[0].name: [source is not None for source in entry.sources[1:]]
        for entry in result.entries
        if not entry.reason and entry.sources[0]
    }


# --- adapters ---


def test_what_an_adapter_does_not_name_is_unchanged_without_a_word() -> None:
    result = matched(BASE, adapter(delta(UP, (16, 8))), model("full"))
    assert present(result) == {EMBED: [False, True], UP: [True, True], NORM: [False, True]}
    assert (result.notes, result.mismatches) == ([], [])


@pytest.mark.parametrize("count", [1, 2])
def test_where_all_agents_are_adapters_everything_is_merged(count: int) -> None:
    result = matched(BASE, *(adapter(delta(UP, (16, 8)), label=f"lora-{i}") for i in range(count)))
    assert present(result) == {EMBED: [False] * count, UP: [True] * count, NORM: [False] * count}
    assert result.notes == []


def test_an_adapter_is_no_witness_of_tensors_that_full_agents_lack() -> None:
    lora = adapter(delta(UP, (16, 8)))
    result = matched(BASE, lora, model("one", NORM), model("two", NORM))
    assert NORM not in present(result)
    assert any("(no agent has it)" in note for note in result.notes)
    (line,) = refusal(BASE, lora, model("one", NORM))
    assert line.startswith(f"one lacks {NORM} that the base has; use --missing base")
    lines = refusal(BASE, lora, model("one", UP), model("two", UP))
    assert [line.split(" that")[0] for line in lines] == [f"one lacks {UP}", f"two lacks {UP}"]


def test_integers_an_adapter_does_not_have_are_copied_without_a_word() -> None:
    base = checkpoint("base", plain(UP, (16, 8)), plain("ids", (4,), "I64"), plain("q", (4,), "F4_NEW"))
    result = matched(base, adapter(delta(UP, (16, 8))))
    assert [entry.reason for entry in result.entries] == ["", "dtype I64", "unknown dtype F4_NEW"]
    assert all(note.startswith("copied from the base") for note in result.notes)


@pytest.mark.parametrize("info", [delta("model.gone.weight", (16, 8)), plain("score.weight", (2, 8))])
def test_what_an_adapter_targets_and_the_base_lacks_is_an_error_or_left_out(info: TensorInfo) -> None:
    lora = adapter(delta(UP, (16, 8)), info)
    text = f"the adapter lora targets {info.name}, which the base does not have; "
    assert refusal(BASE, lora) == [text + "use --extra ignore to leave them out"]
    assert matched(BASE, lora, extra="ignore").notes == [text + "left out"]


def test_an_adapter_of_another_prefix_gets_the_hint_and_the_renaming() -> None:
    lora = adapter(*(delta(f"model.language_model.layers.{i}.up.weight", (16, 8)) for i in range(9)))
    base = checkpoint(
        "base", *(plain(f"model.layers.{i}.up.weight", (16, 8)) for i in range(9)), plain(NORM, (8,))
    )
    targets, hint = refusal(base, lora)
    assert targets.startswith(
        "the adapter lora targets 9 tensors (model.language_model.layers.*.up.weight × 9)"
    )
    assert hint.endswith("use --map-prefix model.language_model.=model.")
    result = matched(base, lora, map_prefix=(("model.language_model.", "model."),))
    assert all(there == [name != NORM] for name, there in present(result).items())


def test_a_delta_of_another_shape_is_an_error() -> None:
    lines = refusal(BASE, adapter(delta(UP, (8, 16)), delta(EMBED, (40, 9))), vocab="base-rows")
    file = "lora/adapter_model.safetensors"
    assert lines[0].startswith(f"{file}: {EMBED} has shape (40, 9), the base has (40, 8); give an agent that")
    assert lines[1] == (
        f"{file}: {UP} has shape (8, 16), the base has (16, 8); its adapter_config.json is wrong about "
        f"fan_in_fan_out, or use --exclude {UP} to copy the base's"
    )


@pytest.mark.parametrize("make", [delta, lambda *a: delta(*a, transposed=True), scaled])
@pytest.mark.parametrize("rows", [37, 44])
def test_rows_of_the_vocabulary_may_differ_in_computed_tensors_too(make, rows: int) -> None:
    agent = checkpoint("agent", make(EMBED, (rows, 8)), plain(UP, (16, 8)), plain(NORM, (8,)))
    (line,) = refusal(BASE, agent)
    assert f"has shape ({rows}, 8), the base has (40, 8); use --vocab base-rows" in line
    result = matched(BASE, agent, vocab="base-rows")
    assert (
        f"agent: only the rows both have are merged: {EMBED} ({rows} rows, the base has 40)" in result.notes
    )


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F4_NEW"])
def test_a_delta_of_what_is_no_float_is_an_error(dtype: str) -> None:
    base = checkpoint("base", plain(UP, (16, 8), dtype), plain(EMBED, (40, 8)))
    (line,) = refusal(base, adapter(delta(UP, (16, 8))))
    assert line.endswith(
        f"{UP} is a delta, the base's is {dtype}, which takes none; use --exclude {UP} to copy the base's"
    )
    assert matched(base, adapter(delta(UP, (16, 8)), delta(EMBED, (40, 8))), exclude=(UP,))


def test_an_adapter_is_no_base() -> None:
    (line,) = refusal(adapter(delta(UP, (16, 8))), BASE)
    assert line == "lora is a LoRA adapter; give the model that it was trained on as the base"


@pytest.mark.parametrize("stored", [(EMBED,), (EMBED, HEAD)])
@pytest.mark.parametrize("target", [EMBED, HEAD])
def test_a_delta_of_one_of_two_tied_tensors_changes_both_and_is_said(
    stored: tuple[str, ...], target: str
) -> None:
    base = checkpoint("base", *(plain(name, (40, 8)) for name in stored), config=TIED)
    result = matched(base, adapter(delta(target, (40, 8))))
    assert present(result) == {name: [True] for name in stored}
    other = [name for name in stored if name != target]
    assert result.notes == [f"lora: {name} is tied to {target}, so its delta changes both" for name in other]


def test_a_delta_of_one_of_two_untied_tensors_changes_that_one() -> None:
    base = checkpoint(
        "base", plain(EMBED, (40, 8)), plain(HEAD, (40, 8)), config={"tie_word_embeddings": False}
    )
    assert present(matched(base, adapter(delta(HEAD, (40, 8))))) == {EMBED: [False], HEAD: [True]}


# --- tensors that may be one ---


SIDE, FAR = (40, 8), 10_000
COLUMNS = replace(plain(EMBED, SIDE), recipe=Strided((1, 40)))
COPIES = {
    "float8, scales and bytes alike": (scaled(EMBED, SIDE), scaled(HEAD, SIDE, offset=FAR), True, True),
    "float8, other bytes": (scaled(EMBED, SIDE), scaled(HEAD, SIDE, offset=FAR), False, False),
    "float8, other blocks": (scaled(EMBED, SIDE), scaled(HEAD, SIDE, (1, 8), FAR), True, False),
    "float8 and bf16": (scaled(EMBED, SIDE), plain(HEAD, SIDE, offset=FAR), True, False),
    "deltas alike": (delta(EMBED, SIDE), delta(HEAD, SIDE, FAR), True, True),
    "deltas, other factors": (delta(EMBED, SIDE), delta(HEAD, SIDE, FAR), False, False),
    "deltas, one transposed": (delta(EMBED, SIDE), delta(HEAD, SIDE, FAR, True), True, False),
    "one place": (COLUMNS, replace(COLUMNS, name=HEAD), False, True),
    "another order, elsewhere": (COLUMNS, replace(COLUMNS, name=HEAD, offset=FAR), True, False),
    "another order": (COLUMNS, plain(HEAD, SIDE), True, False),
}


@pytest.mark.parametrize(("embedding", "head", "bytes_alike", "alike"), COPIES.values(), ids=COPIES.keys())
def test_two_copies_of_a_tied_tensor_are_one_where_all_they_are_made_of_is(
    embedding: TensorInfo, head: TensorInfo, bytes_alike: bool, alike: bool
) -> None:
    def same_bytes(_: Checkpoint, one: TensorInfo, two: TensorInfo) -> bool:
        assert one.recipe is two.recipe is None
        return bytes_alike

    base, agent = checkpoint("base", plain(EMBED, SIDE), config=TIED), checkpoint("agent", embedding, head)
    if alike:
        notes = matched(base, agent, same_bytes=same_bytes).notes
        assert f"agent: {HEAD} repeats {EMBED}, tied in the base" in notes
    else:
        (line,) = refusal(base, agent, same_bytes=same_bytes)
        assert line.startswith(f"agent: {HEAD} differs from {EMBED}, but the base ties the two")


def test_bytes_in_another_order_are_not_compared() -> None:
    base = checkpoint("base", plain("ids", (4, 2), "I64"), plain("q", (4, 2), "F4_NEW"), plain(UP, (16, 8)))
    turned = [replace(base.tensors[name], recipe=Strided((1, 4))) for name in ("ids", "q")]
    (line,) = refusal(base, checkpoint("agent", *turned, plain(UP, (16, 8))))
    assert "q is F4_NEW (4, 2) of 8 bytes, not contiguous, the base's is F4_NEW (4, 2) of 8 bytes;" in line
    result = matched(base, checkpoint("agent", *turned, plain(UP, (16, 8))), exclude=("q",))
    assert any(
        "ids is I64 (4, 2) of 64 bytes, not contiguous, the base's is" in note for note in result.notes
    )
    assert result.entries[0].sources[1] is None


# --- how weights are rounded ---


def alarms(ours: TensorInfo, theirs: TensorInfo, compare: Dtype | None = None) -> list[str]:
    result = matched(checkpoint("base", ours), checkpoint("agent", theirs), compare_dtype=compare)
    return [text for _, text in result.mismatches]


SIZE = (256, 256)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (plain(UP, SIZE), delta(UP, SIZE)),
        (scaled(UP, SIZE), delta(UP, SIZE)),
        (scaled(UP, SIZE), scaled(UP, SIZE)),
        (scaled(UP, (64, 64)), scaled(UP, (64, 64), (64, 64))),
        (plain(UP, SIZE), replace(plain(UP, SIZE), recipe=Strided((1, 256)))),
    ],
)
def test_what_is_rounded_alike_or_not_at_all_is_no_alarm(ours: TensorInfo, theirs: TensorInfo) -> None:
    assert alarms(ours, theirs) == []


@pytest.mark.parametrize(
    ("block", "scales"),
    [((128, 128), "a scale for 128 × 128"), ((1, 256), "a scale a row"), ((256, 300), "one scale")],
)
def test_an_agent_quantised_after_training_differs_nearly_everywhere(
    block: tuple[int, int], scales: str
) -> None:
    (text,) = alarms(plain(UP, SIZE), scaled(UP, SIZE, block))
    assert text == (
        f"agent stores {UP} as F8_E4M3 with {scales} where base has BF16: rounding "
        "alone changes nearly every weight, and no --compare-dtype undoes that; give base and agent in one form"
    )
    (text,) = alarms(plain(UP, SIZE), scaled(UP, SIZE, block), Dtype.BF16)
    assert text.endswith("what changed is compared in BF16")


def test_blocks_of_another_size_differ_nearly_everywhere() -> None:
    (text,) = alarms(scaled(UP, SIZE), scaled(UP, SIZE, (1, 256)))
    assert "as F8_E4M3 with a scale a row where base has F8_E4M3 with a scale for 128 × 128: " in text
    assert "no --compare-dtype undoes that" in text


@pytest.mark.parametrize(
    ("dtype", "coarser"),
    [("BF16", "bf16"), ("F16", "f16"), ("F32", "bf16"), ("F64", "bf16"), ("F8_E4M3", "f8_e4m3")],
)
def test_an_agent_trained_from_a_dequantised_base_is_compared_in_its_dtype(dtype: str, coarser: str) -> None:
    (text,) = alarms(scaled(UP, SIZE), plain(UP, SIZE, dtype))
    assert f"as {dtype} where base has F8_E4M3 with a scale for 128 × 128: rounding alone counts" in text
    assert f"--compare-dtype {coarser} compares" in text


def test_scaled_vectors_have_a_form_too() -> None:
    assert "with one scale where" in alarms(plain(NORM, (8,)), scaled(NORM, (8,), (1, 8)))[0]
