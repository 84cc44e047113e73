"""What else is in a YAML document: parameters that vary, the base among the models, dtypes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folders
import llamas
import numpy as np
import pytest
import reference
from llamas import Family
from numpy.typing import NDArray
from sides import MergekitError, Sides, document, floats, ulps

FILTERS = [{"filter": "self_attn", "value": 0.3}, {"filter": "mlp", "value": [0.1, 1.0]}, {"value": 0.6}]

VARYING: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gradient": ([{"weight": [0.2, 0.9, 0.4]}, {"weight": [1, 0]}, {"weight": 0.5}], {}),
    "long gradient": ([{"weight": [0, 0.1, 0.4, 0.2, 0.9, 0.3]}, {"weight": [0.7]}, {"weight": 0.5}], {}),
    "filters": ([{"weight": FILTERS}, {"weight": 0.5}, {"weight": FILTERS[1:]}], {}),
    "one condition": ([{"weight": {"filter": "*", "value": 0.4}}, {"weight": 0.5}, {"weight": 1}], {}),
    "for all models": ([{}, {"weight": 0.9}, {}], {"weight": 0.5}),
    "filters for all models": ([{}, {"weight": 0.9}, {}], {"weight": FILTERS}),
    "filters, the rest for all models": ([{"weight": FILTERS[:2]}, {}, {"weight": [0, 1]}], {"weight": 0.8}),
    "scientific notation": ([{"weight": "5e-1"}, {"weight": 1}, {"weight": "1e0"}], {}),
    "gradient of lambda": ([{"weight": 0.5}, {"weight": 0.2}, {"weight": 0.9}], {"lambda": [0.5, 1.5]}),
    "filters of lambda": ([{"weight": 0.5}, {"weight": 0.2}, {"weight": 0.9}], {"lambda": FILTERS}),
}


def listed(family: Family, own: list[dict[str, Any]]) -> dict[Path, dict[str, Any]]:
    return dict(zip(family.paths, own, strict=True))


@pytest.mark.parametrize("case", VARYING)
def test_parameters_that_vary_mean_what_they_mean_in_mergekit(both: Sides, sparse: Family, case: str) -> None:
    own, parameters = VARYING[case]
    text = document("task_arithmetic", listed(sparse, own), sparse.base_path, parameters)
    ours, theirs = both.both(text)
    assert ulps(ours, theirs) == 0


def test_densities_vary_as_in_mergekit(both: Sides, dense: Family) -> None:
    own = [{"density": [0.2, 0.9]}, {"density": FILTERS}, {}]
    text = document("ties", listed(dense, own), dense.base_path, {"weight": [0.3, 0.6], "density": 0.5})
    ours, theirs = both.both(text)
    assert ulps(ours, theirs) == 0


def test_a_single_layer_is_the_end_of_a_gradient(both: Sides, tmp_path: Path) -> None:
    family = llamas.family(tmp_path, 0.4, 1e-3, 3, layers=1)
    text = document("task_arithmetic", listed(family, [{"weight": [0, 0.25, 1]}] * 3), family.base_path)
    ours, theirs = both.both(text)
    assert ulps(ours, theirs) == 0
    assert np.array_equal(ours["lm_head.weight"], family.base["lm_head.weight"])


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "ram"])
def test_the_base_may_be_listed_among_the_models(both: Sides, sparse: Family, method: str) -> None:
    own = [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.7}] if method != "ram" else [{}, {}, {}]
    alone = listed(sparse, own)
    first, *others = alone.items()
    among = dict([first, (sparse.base_path, {}), *others])
    parts = [document(method, models, sparse.base_path) for models in (alone, among)]
    ours, theirs = both.both(parts[1])
    assert ulps(ours, floats(both.ours(parts[0]))) == 0
    assert ulps(theirs, floats(both.theirs(parts[0]))) == 0
    assert method == "ram" or ulps(ours, theirs) == 0


def stored(root: Path, family: Family, dtype: str) -> Family:
    """The family in files of another dtype, and so rounded to it."""
    models = [{n: w.reshape(llamas.shapes()[n]) for n, w in m.items()} for m in (family.base, *family.agents)]
    return llamas.written(root, models[0], models[1:], dtype)


def ties(family: Family, **keys: Any) -> str:
    own = [{"weight": 0.5, "density": 0.4}, {"weight": 0.3, "density": 0.6}, {"weight": 0.7, "density": 0.9}]
    return document("ties", listed(family, own), family.base_path, **keys)


def summed(family: Family, **keys: Any) -> str:
    """No trimming: among the deltas of bf16 files many are equal, and mergekit trims some of these."""
    own = [{"weight": 0.5}, {"weight": 0.3}, {"weight": 0.7}]
    return document("task_arithmetic", listed(family, own), family.base_path, **keys)


def bits(model: folders.Model, dtype: str) -> NDArray[Any]:
    """All codes of a model whose tensors have this dtype."""
    assert {tensor.dtype for tensor in model.values()} == {dtype}
    return np.concatenate([tensor.source.bits for _, tensor in sorted(model.items())])


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_out_dtype_is_what_is_written(both: Sides, sparse: Family, name: str, dtype: str) -> None:
    text = ties(sparse, dtype="float32", out_dtype=name)
    assert np.array_equal(bits(both.ours(text), dtype), bits(both.theirs(text), dtype))


def test_dtype_float32_computes_and_writes_bf16_files_in_float32(
    both: Sides, sparse: Family, tmp_path: Path
) -> None:
    text = summed(stored(tmp_path, sparse, "BF16"), dtype="float32")
    ours, theirs = both.both(text)
    assert ulps(ours, theirs) == 0


# Without `dtype: float32` mergekit rounds every step to bf16; ours computes in float32 and rounds once, at the end.
def test_bf16_files_are_merged_in_float32_and_rounded_once(
    both: Sides, sparse: Family, tmp_path: Path
) -> None:
    family = stored(tmp_path, sparse, "BF16")
    ours = bits(both.ours(summed(family)), "BF16")
    exact = bits(both.theirs(summed(family, dtype="float32", out_dtype="bfloat16")), "BF16")
    coarse = bits(both.theirs(summed(family)), "BF16")
    assert np.array_equal(ours, exact)
    assert 0.001 < np.mean(ours != coarse) < 0.5
    one, two = (reference.widen(codes, "BF16", "F32") for codes in (ours, coarse))
    assert np.max(np.abs(one - two)) < 1e-3


def test_dtype_bfloat16_says_what_is_written_and_arithmetic_stays_float32(
    both: Sides, sparse: Family
) -> None:
    ours = bits(both.ours(summed(sparse, dtype="bfloat16")), "BF16")
    theirs = bits(both.theirs(summed(sparse, dtype="bfloat16")), "BF16")
    exact = bits(both.theirs(summed(sparse, dtype="float32", out_dtype="bfloat16")), "BF16")
    assert np.array_equal(ours, exact)
    assert np.mean(theirs != exact) > 0.01


def broken(tmp_path: Path, family: Family, how: str) -> Path:
    shapes = llamas.shapes()
    model = {name: weights.reshape(shapes[name]) for name, weights in family.agents[0].items()}
    if how == "more rows":
        rows = np.zeros((2, llamas.HIDDEN), np.float32)
        model["model.embed_tokens.weight"] = np.concatenate([model["model.embed_tokens.weight"], rows])
    else:
        del model["model.layers.1.mlp.up_proj.weight"]
    return llamas.write(tmp_path / "broken", model)


@pytest.mark.parametrize(("how", "word"), [("more rows", "embed_tokens"), ("a tensor less", "up_proj")])
def test_agents_that_do_not_fit_are_refused_by_both(
    both: Sides, sparse: Family, tmp_path: Path, how: str, word: str
) -> None:
    models: dict[Path, dict[str, Any]] = {sparse.paths[1]: {}, broken(tmp_path, sparse, how): {}}
    text = document("task_arithmetic", models, sparse.base_path, {"weight": 0.5})
    with pytest.raises(MergekitError, match=word):
        both.theirs(text)
    assert both.ours(text, code=5) == {}


def test_a_weight_that_is_not_given_is_refused_by_mergekit_and_is_1_here(both: Sides, sparse: Family) -> None:
    models: dict[Path, dict[str, Any]] = {path: {} for path in sparse.paths}
    with pytest.raises(MergekitError, match="Missing required parameter weight"):
        both.theirs(document("task_arithmetic", models, sparse.base_path))
    ours = floats(both.ours(document("task_arithmetic", models, sparse.base_path)))
    given = document("task_arithmetic", models, sparse.base_path, {"weight": 1})
    assert ulps(ours, floats(both.theirs(given))) == 0


def test_tied_embeddings_stay_tied(both: Sides, sparse: Family, tmp_path: Path) -> None:
    models = []
    for model in (sparse.base, *sparse.agents):
        models.append({n: w.reshape(llamas.shapes()[n]) for n, w in model.items() if n != "lm_head.weight"})
    family = llamas.written(tmp_path, models[0], models[1:], tie_word_embeddings=True)
    ours, theirs = (floats(side(ties(family))) for side in (both.ours, both.theirs))
    theirs.pop("lm_head.weight", None)
    assert ulps(ours, theirs) == 0
