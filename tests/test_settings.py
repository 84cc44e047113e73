"""Settings: their text form, how deep tensors lie, and the values that agents get for tensors."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramstream.errors import PlanError, UsageError
from ramstream.settings import EVERY, Rule, Setting, check, depths

numbers = st.floats(-1e6, 1e6)
points = st.lists(numbers, min_size=1, max_size=4).map(tuple)
words = st.text(min_size=1) | st.text("a.,;:@%* ", min_size=1)
rules = st.builds(Rule, points, words | st.just(EVERY))
settings = st.lists(st.lists(rules, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(
    lambda agents: Setting(tuple(agents))
)


def encodable(setting: Setting) -> bool:
    """Whether all filters are text that files and command lines can hold."""
    filters = (rule.filter for rules in setting.agents for rule in rules)
    return not any("\ud800" <= sign <= "\udfff" for word in filters for sign in word)


@given(settings.filter(encodable))
def test_the_text_form_gives_the_setting_back(setting: Setting) -> None:
    assert Setting.of(str(setting)) == setting
    assert Setting.of(setting.plain) == setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", [[Rule((0.5,))]]),
        ("1e-5,2", [[Rule((1e-5,))], [Rule((2.0,))]]),
        ("0:0.5:1", [[Rule((0.0, 0.5, 1.0))]]),
        ("self_attn@0.8; mlp@0:1;0.5", [[Rule((0.8,), "self_attn"), Rule((0.0, 1.0), "mlp"), Rule((0.5,))]]),
        ("*@3", [[Rule((3.0,))]]),
        ("a%2Cb%3Bc%3Ad%40e%25%20f@1", [[Rule((1.0,), "a,b;c:d@e% f")]]),
        ("a@b@1", [[Rule((1.0,), "a@b")]]),
    ],
)
def test_a_text_is_read(text: str, expected: list[list[Rule]]) -> None:
    assert Setting.of(text) == Setting(tuple(map(tuple, expected)))


@pytest.mark.parametrize(
    "text", ["", "x", "1,", ",1", "1;", "1:", "@1", " @1", "mlp@", "mlp@x", "1,,2", "1 2"]
)
def test_a_text_that_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Setting.of(text)


def test_one_number_is_plain_and_everything_else_is_its_text() -> None:
    assert Setting.of("0.50").plain == 0.5
    assert isinstance(Setting.of(1).plain, float)
    for text in ("0.5,0.5", "0.0:1.0", "mlp@0.5"):
        assert Setting.of(text).plain == text


def test_signs_of_the_text_form_are_written_as_in_urls() -> None:
    assert str(Setting(((Rule((1.0,), "a,b;c:d@e% f\n"),),))) == "a%2Cb%3Bc%3Ad%40e%25%20f%0A@1.0"
    assert str(Setting(((Rule((1.0,), "größe"),),))) == "größe@1.0"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.embed.weight", "model.norm.weight"], [0, 0]),
        ([f"model.layers.{i}.mlp.weight" for i in range(5)], [0, 0.25, 0.5, 0.75, 1]),
        (["layers.3.a.weight", "layers.0.a.weight", "layers.1.a.weight"], [1, 0, 1 / 3]),
        (["model.layers.0.mlp.weight", "lm_head.weight"], [1, 0]),
        (["encoder.0.a.w", "encoder.1.a.w", "decoder.0.a.w", "decoder.2.a.w"], [0, 1, 0, 1]),
        (["model.layers.1.experts.7.w", "model.layers.0.experts.9.w"], [1, 0]),
        (["0.auto_model.layer.0.w", "0.auto_model.layer.1.w", "0.auto_model.w"], [0, 1, 0]),
        (["layers.7", "w2.weight", "a.b2.c"], [0, 0, 0]),
    ],
    ids=["outside", "five", "unordered", "one layer", "two stacks", "experts", "number first", "no layers"],
)
def test_depth_goes_from_the_first_layer_to_the_last(names: list[str], expected: list[float]) -> None:
    assert depths(names) == expected


@given(points, st.integers(1, 12))
def test_a_gradient_is_linear_between_its_points(points: tuple[float, ...], layers: int) -> None:
    names = [f"h.{i}.w" for i in range(layers)]
    found = Setting(((Rule(points),),)).resolve("x", names, 1)[:, 0]
    depth = np.linspace(0, 1, layers) if layers > 1 else np.ones(1)
    expected = np.interp(depth, np.linspace(0, 1, len(points)) if len(points) > 1 else [0.5], points)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-6)
    assert found[-1] == points[-1]


def test_the_first_rule_whose_word_is_part_of_the_name_counts() -> None:
    names = ["h.0.self_attn.w", "h.0.mlp.w", "norm.w"]
    found = Setting.of("h.0@1;mlp@2;3").resolve("x", names, 2)
    assert found.tolist() == [[1, 1], [1, 1], [3, 3]]
    assert Setting.of("mlp@2;3,4;mlp@5").resolve("x", names, 2).tolist() == [[3, 4], [2, 4], [3, 4]]


def test_what_does_not_fit_the_agents_or_tensors_is_refused() -> None:
    with pytest.raises(PlanError, match="weight has 2 values for 3 models"):
        Setting.of("1,2").resolve("weight", ["a"], 3)
    with pytest.raises(PlanError, match=r"weight says nothing about norm\.w"):
        Setting.of("mlp@1").resolve("weight", ["mlp.w", "norm.w"], 3)


def test_a_setting_is_complete_where_every_agent_has_a_rule_for_every_tensor() -> None:
    assert Setting.of("mlp@1;2,3").complete
    assert not Setting.of("mlp@1,3").complete


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="x is nan; it must be a finite number"):
        check("x", Setting.of("1,mlp@nan;1"))
    with pytest.raises(UsageError, match="x is -1; it must be 0 or more"):
        check("x", Setting.of("0:-1"), 0)
    with pytest.raises(UsageError, match="x is 2; it must be between 0 and 1"):
        check("x", Setting.of("mlp@2;1"), 0, 1)
    check("x", Setting.of("0:1"), 0, 1)
    check("x", Setting.of(-5), -math.inf, math.inf)


def test_layers_are_counted_in_the_whole_model_where_only_some_tensors_are_merged() -> None:
    model = [f"model.layers.{n}.w" for n in range(5)]
    gradient = Setting.of("0:1")
    whole = gradient.resolve("weight", model, 1)
    assert whole[:, 0].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert gradient.resolve("weight", model[1:3], 1, model).tolist() == whole[1:3].tolist()
    assert gradient.resolve("weight", model[1:3], 1).tolist() == [[0.5], [1.0]]


def test_rules_that_hold_for_no_tensor_are_named() -> None:
    names = ["model.layers.0.self_attn.q", "model.layers.0.mlp.up", "lm_head"]
    assert Setting.of("self_attn@1;mlp@2;3").unused(names) == []
    assert [str(rule) for rule in Setting.of("self_atn@1;3").unused(names)] == ["self_atn@1.0"]
    assert [str(rule) for rule in Setting.of("3;mlp@2").unused(names)] == ["mlp@2.0"]
    assert Setting.of("model@1;lm@2;3").unused(names) == [], "a default may have nothing left to hold for"


def test_a_number_for_each_agent_may_be_a_list() -> None:
    assert Setting.of([0.5, 1]) == Setting.of("0.5,1") == Setting.of((0.5, 1.0))
    for odd in ([], [[1]], None, {"a": 1}):
        with pytest.raises(ValueError):
            Setting.of(odd)  # type: ignore[arg-type]
