"""Configuration files: mergekit's rules, what is refused, what is written, and the command line around them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ramstream import manual, methods
from ramstream.config import Recipe, read, render, write
from ramstream.config.document import MOST_BYTES
from ramstream.config.recipe import ABSENT_METHODS, MERGEKIT, NOT_HERE
from ramstream.errors import PlanError, UsageError

LAYERS = 3
NAMES = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{kind}.weight"
        for i in range(LAYERS)
        for kind in ("self_attn.q_proj", "mlp.up_proj")
    ),
    "model.norm.weight",
]

Write = Callable[[Any], Path]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes merge.yaml, from text or from data, into the current folder."""
    monkeypatch.chdir(tmp_path)
    return written


def written(content: Any) -> Path:
    path = Path("merge.yaml")
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def ties(**more: Any) -> dict[str, Any]:
    """A configuration that is right, with more keys or others."""
    return {"merge_method": "ties", "base_model": "base", "models": [{"model": "a"}, {"model": "b"}], **more}


def models(**parameters: Any) -> list[dict[str, Any]]:
    """Models by name with their own parameters."""
    return [{"model": name, "parameters": own} for name, own in parameters.items()]


def problem(content: Any) -> str:
    """What is said about a file that is refused."""
    with pytest.raises(UsageError) as error:
        read(written(content))
    return str(error.value)


# mergekit's rules, said once more


def depth(name: str) -> float:
    return int(name.split(".")[2]) / (LAYERS - 1) if ".layers." in name else 0.0


def value_at(setting: Any, name: str) -> float | None:
    """What mergekit makes of one parameter setting for a tensor; None where it says nothing."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return float(setting)
    if isinstance(setting[0], dict):
        for condition in setting:
            word = condition.get("filter")
            if word is None or word == "*" or word in name:
                return value_at(condition["value"], name)
        return None
    place = depth(name) * (len(setting) - 1)
    left = int(place)
    right = min(left + 1, len(setting) - 1)
    return (1 - (place - left)) * float(setting[left]) + (place - left) * float(setting[right])


def first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


scalars = st.floats(0, 1) | st.sampled_from([0, 1, "1e-1", "0.5", " 2.5e-1 "])
gradients = scalars | st.lists(scalars, min_size=1, max_size=4)
conditions = st.builds(
    lambda value, word: {"value": value} if word is ... else {"filter": word, "value": value},
    gradients,
    st.sampled_from([..., None, "*", "mlp", "self_attn", "layers.1.", "norm", ""]),
)
mergekit_settings = gradients | conditions | st.lists(conditions, min_size=1, max_size=3)
maybe = st.none() | mergekit_settings


@hypothesis_settings(max_examples=60, deadline=None)
@given(own=st.tuples(maybe, maybe), common=maybe, scale=maybe)
def test_a_models_own_parameter_comes_before_that_for_all_and_that_before_the_default(
    tmp_path_factory: pytest.TempPathFactory, own: tuple[Any, Any], common: Any, scale: Any
) -> None:
    given = {name: {} if value is None else {"density": value} for name, value in zip("ab", own, strict=True)}
    shared = {"density": common, "lambda": scale, "weight": 1}
    shared = {key: value for key, value in shared.items() if value is not None}
    path = tmp_path_factory.mktemp("x") / "merge.yaml"
    path.write_text(yaml.safe_dump(ties(models=models(**given), parameters=shared)))
    recipe = read(path)
    method = methods.create(recipe.method, recipe.parameters)
    found = method.settings(NAMES, 2)
    for i, name in enumerate(NAMES):
        everywhere = None if common is None else value_at(common, name)
        for t, setting in enumerate(own):
            expected = first(None if setting is None else value_at(setting, name), everywhere, 1.0)
            assert found["density"][i, t] == expected
        assert found["scale"][i, 0] == first(None if scale is None else value_at(scale, name), 1.0)
    path.unlink()
    write(path, recipe)
    again = read(path)
    assert methods.create(again.method, again.parameters) == method


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (0.5, "0.5"),
        ("1e-5", "1e-05"),
        (True, "1.0"),
        ([0, 0.5, 1], "0.0:0.5:1.0"),
        ([{"filter": "mlp", "value": [1, 0]}, {"value": 3}], "mlp@1.0:0.0;3.0"),
        ([{"filter": "mlp", "value": 1}], "mlp@1.0;1.0"),
        ({"filter": "a,b:c", "value": 2}, "a%2Cb%3Ac@2.0;1.0"),
        ([{"filter": "*", "value": 2}, {"filter": "mlp", "value": 1}], "2.0"),
    ],
)
def test_a_parameter_becomes_the_text_of_the_command_line(file: Write, weight: Any, text: str) -> None:
    assert read(file(ties(parameters={"weight": weight}))).parameters == {"weight": text}


def test_one_value_of_its_own_makes_an_entry_for_every_model(file: Write) -> None:
    recipe = read(file(ties(models=models(a={"weight": 2}, b={}), parameters={"weight": [0, 1]})))
    assert recipe.parameters == {"weight": "2.0,0.0:1.0"}


def test_numbers_words_and_switches_are_read_as_mergekit_reads_them(file: Write) -> None:
    recipe = read(file(ties(parameters={"normalize": "No", "weight": 1}, ramstream={"scope": "model"})))
    assert recipe.parameters == {"normalize": "false", "weight": "1.0", "scope": "model"}
    ram = ties(merge_method="ramplus_tl", parameters={"r": "1e-3", "alpha": [{"value": [2]}], "epsilon": 0})
    method = methods.create("ramplus_tl", read(file(ram)).parameters)
    assert (method.r, method.alpha, method.epsilon, method.scope) == (1e-3, 2.0, 0.0, "tensor")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("config", "base", "agents"),
    [
        (ties(), "base", ("a", "b")),
        (ties(models=[{"model": "a"}, {"model": "base"}, {"model": "b"}]), "base", ("a", "b")),
        (ties(merge_method="linear"), "base", ("a", "b")),
        (ties(merge_method="linear", base_model=None), "a", ("b",)),
        (ties(merge_method="linear", base_model="b"), "b", ("a",)),
    ],
    ids=["delta", "delta, base listed", "linear", "linear without base", "linear, base listed"],
)
def test_the_base_is_no_agent_and_linear_needs_none(
    file: Write, config: dict[str, Any], base: str, agents: tuple[str, ...]
) -> None:
    recipe = read(file(config))
    assert (recipe.base, recipe.agents) == (base, agents)


def test_the_base_has_a_weight_of_its_own_where_it_is_one_of_the_models(file: Write) -> None:
    listed = models(a={"weight": 2}, base={"weight": 3}, b={"weight": 4})
    recipe = read(file(ties(merge_method="linear", models=listed)))
    assert recipe.parameters == {"weight": "3.0,2.0,4.0"}
    assert read(file(ties(merge_method="linear", base_model=None, models=listed))).base == "a"
    config = ties(merge_method="linear", models=models(a={"weight": 2}), parameters={"weight": 5})
    assert read(file(config)).parameters == {"weight": "5.0,2.0"}


def test_parameters_of_a_base_that_is_no_agent_are_checked_and_noted(file: Write) -> None:
    config = ties(models=models(base={"weight": 2}, a={"weight": 1}))
    recipe = read(file(config))
    assert recipe.parameters == {"weight": "1.0"}
    assert recipe.notes == ("base is the base, so its parameters among models count for nothing",)
    config["models"][0]["parameters"] = {"wieght": 2}
    assert "models[0].parameters.wieght is no parameter of ties; did you mean weight?" in problem(config)


@pytest.mark.parametrize(
    ("keys", "dtype", "note"),
    [
        ({}, None, None),
        ({"dtype": "float32"}, "f32", None),
        ({"dtype": "bfloat16"}, "bf16", "mergekit would compute in bfloat16"),
        ({"dtype": "torch.float16", "out_dtype": "float32"}, "f32", "mergekit would compute in float16"),
        ({"dtype": "float64"}, "f64", "mergekit would compute in float64"),
        ({"dtype": "float32", "out_dtype": "bfloat16"}, "bf16", None),
        ({"out_dtype": "float16"}, "f16", None),
        ({"out_dtype": "float16", "ramstream": {"dtype": "f8_e4m3"}}, "f8_e4m3", None),
    ],
)
def test_the_output_has_out_dtype_else_dtype_else_the_bases(
    file: Write, keys: dict[str, Any], dtype: str | None, note: str | None
) -> None:
    recipe = read(file(ties(parameters={"weight": 1}, **keys)))
    assert recipe.dtype == dtype
    assert len(recipe.notes) == (note is not None)
    assert note is None or note in recipe.notes[0]


@pytest.mark.parametrize("source", [None, "base", "org/base"])
def test_the_bases_tokenizer_may_be_named(file: Write, source: str | None) -> None:
    assert read(file(ties(base_model="org/base", tokenizer_source=source))).base == "org/base"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/a@main", "org/a@main"),
        ({"model": "org/a@main"}, "org/a@main"),
        ({"model": {"path": "org/a", "revision": "main"}}, "org/a@main"),
        ({"model": {"path": "org/a"}}, "org/a"),
        ({"model": {"path": "x+y@z"}}, "x+y@z"),
        ({"model": "x+y"}, "x+y"),
        ("./models/x", "./models/x"),
    ],
)
def test_a_model_is_named_by_a_string_or_mapping(file: Write, reference: Any, name: str) -> None:
    assert read(file(ties(models=[{"model": reference}]))).agents == (name,)


@pytest.mark.parametrize("reference", ["here@main", {"model": {"path": "here", "revision": "main"}}])
def test_a_path_that_is_there_has_no_revision(file: Write, reference: Any) -> None:
    Path("here").mkdir()
    recipe = read(file(ties(models=[{"model": reference}], parameters={"weight": 1})))
    assert recipe.agents == ("here",)
    assert recipe.notes == ("here is a path, so its revision main counts for nothing",)
    Path("here@main").mkdir()
    if isinstance(reference, str):
        assert read(Path("merge.yaml")).agents == ("here@main",)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"parameters": {"weight": 1, "int8_mask": True}}, "int8_mask changes nothing"),
        ({"merge_method": "task_arithmetic", "parameters": {"weight": 1, "rescale": 0}}, "rescale changes nothing"),
        ({"merge_method": "ram", "parameters": {"weight": 2}}, "weight counts here; mergekit's ram ignores it"),
        ({"parameters": {"weight": 1, "scope": "model"}}, "scope counts here; mergekit's ties ignores it"),
        ({"models": models(a={"weight": 1}, b={})}, "not given for every tensor of b, where mergekit stops"),
        ({"parameters": {"weight": {"filter": "x", "value": 1}}}, "every tensor of a, b, where mergekit stops"),
    ],
)  # fmt: skip
def test_what_mergekit_would_do_otherwise_is_noted(file: Write, more: dict[str, Any], note: str) -> None:
    (found,) = read(file(ties(**more))).notes
    assert note in found


def test_what_is_as_in_mergekit_needs_no_note(file: Write) -> None:
    config = ties(parameters={"weight": 1, "lambda": 2, "density": 0.5}, ramstream={"max_norm": "mean"})
    recipe = read(file(config))
    assert recipe.notes == ()
    assert recipe.parameters == {"scale": "2.0", "weight": "1.0", "density": "0.5", "max_norm": "mean"}


# What mergekit has no word for


def test_the_key_of_our_own_holds_options_and_parameters(file: Write) -> None:
    ours = {
        "include": "*.mlp.*",
        "exclude": ["a*", "b*"],
        "missing": "base",
        "map_prefix": ["x.=y.", "=z."],
        "compare_dtype": "bfloat16",
        "shard_size": 5000,
        "weight": "mlp@0.5,0.3",
        "scale": [{"filter": "mlp", "value": 2}],
    }
    recipe = read(file(ties(ramstream=ours)))
    assert recipe.options == {
        "include": ("*.mlp.*",),
        "exclude": ("a*", "b*"),
        "missing": "base",
        "map_prefix": ("x.=y.", "=z."),
        "compare_dtype": "bf16",
        "shard_size": "5000",
    }
    assert recipe.parameters == {"weight": "mlp@0.5,0.3", "scale": "mlp@2.0;1.0"}


# What is refused


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"merge_methd": "x"}, "line 6: merge_methd is unknown; did you mean merge_method?"),
        ({"merge_method": "tise"}, "merge_method is unknown: there is no method 'tise'; did you mean ties?"),
        ({"merge_method": None}, "has no merge_method"),
        ({"merge_method": 5}, "merge_method is 5, not a name; put it in quotes"),
        ({"base_model": None}, "has no base_model, which ties needs"),
        ({"models": None}, "has no models"),
        ({"models": []}, "models is empty"),
        ({"models": "a"}, "models is a, not a list"),
        ({"models": ["a"]}, "models[0] is a; write it as  - model: NAME"),
        ({"models": [{"modle": "a"}]}, "line 4: models[0].modle is unknown; did you mean model?"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "models[1].model is a, which is listed twice"),
        ({"models": [{"model": "base"}]}, "models holds only the base"),
        ({"models": [{"model": 7}]}, "models[0].model is 7, not a name; put it in quotes"),
        ({"models": [{"model": "a", "layer_range": [0, 3]}]}, "models[0].layer_range is unknown"),
        ({"models": [{"model": "a+b"}]}, "models[0].model is a+b, which mergekit reads as a model + LoRA"),
        ({"models": [{"model": {"model": "a", "lora": "b"}}]}, "model.lora is refused: list the adapter's folder"),
        ({"models": [{"model": {"model": "a", "override_architecture": "b"}}]}, "architectures are not looked at"),
        ({"models": [{"model": {"path": "a"}}]}, "models[0].model.path is unknown; use one of model"),
        ({"models": [{"model": {"model": {"revision": "b"}}}]}, "models[0].model.model.path is empty, not a name"),
        ({"dtype": "bfloat61"}, "dtype is bfloat61, not a float dtype; did you mean bfloat16?"),
        ({"out_dtype": "int64"}, "out_dtype is int64, not a float dtype"),
        ({"tokenizer_source": "union"}, "tokenizer_source is union, but no tokenizer is built here"),
        ({"tokenizer_source": "a"}, "tokenizer_source is a, but no tokenizer is built here"),
        ({"parameters": [1]}, "parameters is a list, not a mapping"),
        ({"ramstream": {"includ": "x"}}, "ramstream.includ is no parameter of ties; did you mean include?"),
        ({"ramstream": {"missing": "skip"}}, "ramstream.missing is skip; use one of error, base"),
        ({"ramstream": {"vocab": "base_rows"}}, "ramstream.vocab is base_rows; did you mean base-rows?"),
        ({"ramstream": {"scope": "tensr"}}, "ramstream.scope is tensr; did you mean tensor?"),
        ({"ramstream": {"include": [3]}}, "ramstream.include[0] is 3, not a name; put it in quotes"),
        ({"ramstream": {"weight": "1,x"}}, "ramstream.weight is 1,x, which is no number or setting"),
        ({"ramstream": {"dtype": "f9"}}, "ramstream.dtype is f9, not a float dtype"),
        ({"ramstream": {"density": 1}, "parameters": {"density": 1}}, "ramstream.density is given a second time"),
        ({"ramstream": {"weight": "1,2"}, "models": models(a={"weight": 1})}, "weight is given a second time"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused_with_the_nearest_that_does(
    file: Write, more: dict[str, Any], said: str
) -> None:
    config = {key: value for key, value in ties(**more).items() if value is not None}
    assert said in problem(config)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"wieght": 1}, "parameters.wieght is no parameter of ties; did you mean weight?"),
        ({"scale": 1, "lambda": 1}, "parameters.lambda is given a second time; first parameters.scale"),
        ({"rescale": True}, "parameters.rescale is not done by ties here"),
        ({"weight": "much"}, "parameters.weight is much, not a number"),
        ({"weight": None}, "parameters.weight is empty, not a number"),
        ({"weight": []}, "parameters.weight is empty"),
        ({"weight": [1, "x"]}, "parameters.weight[1] is x, not a number"),
        ({"weight": [1, {"value": 1}]}, "parameters.weight mixes values with filters and plain numbers"),
        ({"weight": [[1]]}, "parameters.weight[0] is a list, not a number"),
        ({"weight": {"valeu": 1}}, "parameters.weight.valeu is unknown; did you mean value?"),
        ({"weight": {"filter": "mlp"}}, "parameters.weight has no value"),
        ({"weight": {"filter": 3, "value": 1}}, "parameters.weight.filter is 3, not a string; put it in quotes"),
        ({"weight": {"value": {"value": 1}}}, "parameters.weight.value holds a filter in a filter"),
        ({"weight": {"value": [{"value": 1}]}}, "parameters.weight.value holds a filter in a filter"),
        ({"weight": 10**400}, "not a number"),
        ({"weight": float("nan")}, "ties: weight is nan; it must be a finite number"),
        ({"density": [0, 2]}, "ties: density is 2; it must be between 0 and 1"),
        ({"normalize": "perhaps"}, "parameters.normalize is perhaps; use true or false"),
        ({"normalize": [True, False]}, "parameters.normalize takes one value, no gradient and no filter"),
        ({"epsilon": {"filter": "mlp", "value": 1}}, "epsilon takes one value, no gradient and no filter"),
    ],
)  # fmt: skip
def test_a_parameter_that_is_none_is_refused(file: Write, parameters: dict[str, Any], said: str) -> None:
    assert said in problem(ties(parameters=parameters))


def test_a_parameter_for_all_models_is_refused_for_one(file: Write) -> None:
    text = problem(ties(merge_method="ram_plus", models=models(a={"r": 1, "lambda": 2}, b={"weight": 1})))
    assert "models[0].parameters.r holds for all models" in text
    assert "models[0].parameters.lambda holds for all models" in text


def test_an_agent_that_there_is_not_is_refused(file: Write) -> None:
    config = ties(merge_method="ram-unique", ramstream={"agent": 3})
    assert problem(config).startswith("merge.yaml: ram-unique: agent is 3 and there are 2")
    config["ramstream"]["agent"] = 1.5
    assert "ramstream.agent is 1.5, not a whole number" in problem(config)


@pytest.mark.parametrize("key", NOT_HERE)
def test_what_only_mergekit_does_is_refused_by_name(file: Write, key: str) -> None:
    assert f"line 6: {key} is refused: {NOT_HERE[key]}" in problem(ties(**{key: "x"}))
    assert read(file(ties(**{key: None}))).base == "base"


@pytest.mark.parametrize("name", sorted(ABSENT_METHODS))
def test_mergekits_other_methods_are_refused_by_name(file: Write, name: str) -> None:
    name = name.replace("-", "_")
    assert f"merge_method is mergekit's {name}, which is not here; use one of" in problem(
        ties(merge_method=name)
    )


def test_all_problems_are_said_at_once_with_their_lines(file: Write) -> None:
    text = problem(
        "merge_method: ties\nmodels:\n- model: a\n  parameters:\n    wieght: 1\ndtype: x\nslices: [1]\n"
    )
    lines = [
        line.removeprefix("merge.yaml, line ").partition(" ")[0].rstrip(":") for line in text.splitlines()
    ]
    assert sorted(lines) == ["1", "5", "6", "7"]


# YAML that is none, or meant to harm

DAG = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
BOMB = DAG + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{', '.join(['*' + chr(97 + i)] * 9)}]}}\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "merge.yaml, line 1 is empty; give a mapping"),
        ("- ties\n", "merge.yaml, line 1 is a list; give a mapping"),
        ("ties\n", "merge.yaml, line 1 is ties; give a mapping"),
        ("a: 1\n---\nb: 2\n", "merge.yaml, line 2: no YAML: several documents in one file"),
        ("a: 1\nb: 2\na: 3\n", "merge.yaml, line 3: the key a occurs twice, first in line 1"),
        ("a: {b: 1, 'b': 2}\n", "merge.yaml, line 1: the key b occurs twice"),
        ("<<: {a: 1}\n<<: {b: 1}\n", "merge.yaml, line 2: the key << occurs twice"),
        ("a:\n\t- b\n", "merge.yaml, line 2: no YAML: found character"),
        ("a: b: c\n", "merge.yaml, line 1: no YAML: mapping values are not allowed here"),
        ("a: [1\nb: 2\n", "merge.yaml, line 2: no YAML: expected ',' or ']'"),
        ("a: *b\n", "merge.yaml, line 1: no YAML: found undefined alias 'b'"),
        ("a: \0\n", "merge.yaml, line 1: no YAML: the character U+0000 is not allowed"),
        (b"a: 1\nb: \xff\n", "merge.yaml, line 2: is not UTF-8 text (byte 8)"),
        ('a: "\\ud800"\n', "merge.yaml, line 1: a string holds half of a character"),
        ('a: "\\U00110000"\n', "merge.yaml: no YAML"),
        ("1: 2\n", "merge.yaml, line 1: the key 1 is not a string; put it in quotes"),
        ("on: 2\n", "merge.yaml, line 1: the key on is not a string; put it in quotes"),
        ("? [a]\n: 2\n", "merge.yaml, line 1: the key a list or mapping is not a string"),
        ("a: 2024-01-01\n", "merge.yaml, line 1: 2024-01-01 is read by YAML as timestamp; put it in quotes"),
        ("a: !!python/object/apply:os.system [x]\n", "the tag python/object/apply:os.system is not read"),
        ("a: !!python/name:os.system x\n", "python/name:os.system; put it in quotes"),
        ("a: !!set {x}\n", "merge.yaml, line 1: the tag set is not read"),
        ("a: !!int x\n", "merge.yaml, line 1: x is no int"),
        ("a: !!bool x\n", "merge.yaml, line 1: x is no bool"),
        (f"a: {'9' * 5000}\n", "is no int"),
        ("a: {<<: 3}\n", "merge.yaml, line 1: << takes a mapping"),
        ("a: &a [*a]\n", "merge.yaml: nested too deeply"),
        ("a: &a {<<: *a}\n", "merge.yaml: nested too deeply"),
        ("[" * 5000, "merge.yaml: nested too deeply"),
        (BOMB, "more than 50,000 values, aliases expanded"),
        (MERGES, "more than 50,000 values, aliases expanded"),
        (b"#" * (MOST_BYTES + 1), f"merge.yaml has more than {MOST_BYTES:,} bytes"),
    ],
)  # fmt: skip
def test_what_is_no_yaml_of_ours_is_one_clear_error(file: Write, text: str | bytes, said: str) -> None:
    Path("merge.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.monotonic()
    with pytest.raises(UsageError) as error:
        read(Path("merge.yaml"))
    assert said in str(error.value)
    assert len(str(error.value)) < 1000
    assert time.monotonic() - began < 10


@hypothesis_settings(max_examples=150, deadline=None)
@given(st.text("abmodels_e:-[]{}&*<!#'\"\n 01.,?|>%@", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("x") / "merge.yaml"
    path.write_text(f"merge_method: ties\nbase_model: b\nmodels:\n- model: a\n  parameters:\n    {text}")
    said = ""
    try:
        agents: tuple[str, ...] = read(path).agents
    except UsageError as error:
        agents, said = ("a",), str(error)
    assert agents[0] == "a"
    assert all(line.startswith(str(path.parent)) for line in said.splitlines())


def test_a_file_that_is_not_there_cannot_be_read(file: Write) -> None:
    with pytest.raises(PlanError, match=r"none\.yaml cannot be read: No such file"):
        read(Path("none.yaml"))
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        read(Path())


def test_anchors_and_merge_keys_are_read_as_yaml_means_them(file: Write) -> None:
    text = (
        "merge_method: ties\nbase_model: base\nmodels:\n- model: a\n  parameters: &a {weight: 1, density: 0.5}\n"
        "- model: b\n  parameters: {<<: *a, weight: 2}\n- model: c\n  parameters: {<<: [{density: 0.1}, *a]}\n"
    )
    assert read(file(text)).parameters == {"weight": "1.0,2.0,1.0", "density": "0.5,0.5,0.1"}


# Writing


def other(parameter: manual.Parameter, entries: int) -> str:
    """A value that is not the default."""
    if parameter.kind == "choice":
        return next(choice for choice in parameter.choices if choice != parameter.default)
    by_kind = {
        "by agent": ",".join(["mlp%2C@0.5:0.25;0.75", "0.5", "0:1", "norm@1;0.3"][:entries]),
        "by tensor": "mlp@0.5:0.25;0.75",
        "switch": "false" if parameter.default == "true" else "true",
        "whole number": "2",
        "number": "0.3",
    }
    return by_kind[parameter.kind]


EVERY = sorted((*methods.available(), "ramplus-tl"))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("changed", ["nothing", "each", "all"])
def test_what_is_written_reads_as_the_same_merge(tmp_path: Path, name: str, changed: str) -> None:
    entries = 2 + methods.find(name)[0].base_is_model
    values = {key: other(parameter, entries) for key, parameter in manual.parameters(name).items()}
    cases = {"nothing": [{}], "each": [{key: value} for key, value in values.items()], "all": [values]}
    for i, parameters in enumerate(cases[changed]):
        recipe = Recipe(
            "org/base", ("a b", "c+d@e"), name, parameters, "bf16", {"include": ("x*",), "missing": "base"}
        )
        path = tmp_path / f"{i}.yaml"
        write(path, recipe)
        again = read(path)
        assert methods.create(again.method, again.parameters) == methods.create(name, parameters)
        assert (again.base, again.agents, again.dtype) == (recipe.base, recipe.agents, recipe.dtype)
        assert again.options == recipe.options
        if changed == "nothing":
            assert again.notes == ()


@pytest.mark.parametrize("name", ["weight", "density", "scale"])
def test_a_setting_with_a_gap_is_written_as_it_is(tmp_path: Path, name: str) -> None:
    recipe = Recipe("base", ("a", "b"), "ties", {name: "mlp@0.5;attn@0.25"})
    write(tmp_path / "x.yaml", recipe)
    again = read(tmp_path / "x.yaml")
    assert methods.create("ties", again.parameters) == methods.create("ties", recipe.parameters)


def test_the_written_file_is_mergekits_where_it_has_the_words() -> None:
    recipe = Recipe("base", ("a", "b"), "dare-ties", {"weight": "0:1,2", "scale": "0.5", "seed": "7"}, "bf16")
    assert yaml.safe_load(render(recipe)) == {
        "merge_method": "dare_ties",
        "base_model": "base",
        "models": [
            {"model": "a", "parameters": {"weight": [0.0, 1.0]}},
            {"model": "b", "parameters": {"weight": 2.0}},
        ],
        "parameters": {"lambda": 0.5, "density": 1.0, "rescale": True, "normalize": False},
        "dtype": "float32",
        "out_dtype": "bfloat16",
        "ramstream": {"seed": 7},
    }
    linear = yaml.safe_load(render(Recipe("base", ("a",), "linear", {"weight": "1,2"}, "f8_e5m2")))
    assert linear["models"][0] == {"model": "base", "parameters": {"weight": 1.0}}
    assert (linear["dtype"], linear["ramstream"]) == ("float32", {"dtype": "f8_e5m2"})
    local = {"scope": "tensor", "alpha": "0.3"}
    assert yaml.safe_load(render(Recipe("base", ("a",), "ram-plus", local)))["merge_method"] == "ramplus_tl"
    assert yaml.safe_load(render(Recipe("base", ("a",), "ram-plus", {})))["merge_method"] == "ram_plus"


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGEKIT)
def test_mergekit_takes_the_written_file(name: str) -> None:
    mergekit = pytest.importorskip("mergekit.config")
    registered = pytest.importorskip("mergekit.merge_methods")
    entries = 2 + methods.find(name)[0].base_is_model
    parameters = {key: other(parameter, entries) for key, parameter in manual.parameters(name).items()}
    parameters |= {"scope": "tensor"} if name.startswith("ramplus") else {}
    text = render(Recipe("base", ("a", "b"), name, parameters, "bf16", {"missing": "base"}))
    config = mergekit.MergeConfiguration.model_validate(yaml.safe_load(text))
    known = {parameter.name for parameter in registered.get(config.merge_method).spec.parameters}
    assert known == MERGEKIT[name]
    assert set(config.parameters or {}) <= known


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("base", "a", "a"), "a is given twice"),
        (("a", "a"), "a is given twice"),
        (("base", "\udcff"), "is not UTF-8"),
    ],
)
def test_models_that_a_file_cannot_hold_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        render(Recipe(names[0], names[1:], "ram"))


def test_a_revision_stays_one_where_a_folder_has_the_models_name(file: Write) -> None:
    Path("org").mkdir()
    recipe = Recipe("base", ("org@main",), "ram")
    write(Path("x.yaml"), recipe)
    assert read(Path("x.yaml")).agents == ("org@main",)


def test_a_file_that_says_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for _ in range(2):
        write(path, Recipe("base", ("a",), "ram"))
    before = path.read_bytes()
    with pytest.raises(PlanError, match="exists and says something else"):
        write(path, Recipe("base", ("b",), "ram"))
    assert path.read_bytes() == before
    with pytest.raises(PlanError, match="cannot be written: No such file"):
        write(tmp_path / "no" / "x.yaml", Recipe("base", ("b",), "ram"))


# The command line

MODEL = dict.fromkeys(NAMES, ("F32", (4, 8)))


@pytest.fixture
def family(file: Write) -> None:
    """base, agent-1 and agent-2 in the current folder."""
    runs.write_family(Path(), *runs.family(MODEL, agents=2))


@pytest.fixture
def dry(family: None, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The plan that `merge WORDS` prints."""

    def run(*words: object) -> dict[str, Any]:
        capsys.readouterr()
        assert runs.cli("merge", *words, "-o", "out", "--dry-run", "--json") == 0, capsys.readouterr().err
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        return plan

    return run


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    capsys.readouterr()
    assert runs.cli("merge", *words, "-o", "out") == code
    assert not Path("out").exists()
    return capsys.readouterr().err


def other_words(name: str) -> list[str]:
    entries = 2 + methods.find(name)[0].base_is_model
    parameters = manual.parameters(name)
    return [word for key, p in parameters.items() for word in ("-p", f"{key}={other(p, entries)}")]


@pytest.mark.parametrize("name", EVERY)
def test_config_out_writes_the_same_merge(dry: Callable[..., dict[str, Any]], name: str) -> None:
    words = [
        "base",
        "agent-1",
        "agent-2",
        "-m",
        name,
        *other_words(name),
        "--exclude",
        "*norm*",
        "--shard-size",
        "500",
    ]
    typed = dry(*words, "--dtype", "f16", "--compare-dtype", "bf16", "--config-out", "x.yaml")
    read_back = dry("x.yaml")
    assert typed["merge_digest"] == read_back["merge_digest"]
    assert typed["method"] == read_back["method"]


def test_the_command_line_wins_over_the_file(dry: Callable[..., dict[str, Any]]) -> None:
    written({
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": "agent-1"}, {"model": "agent-2"}],
        "parameters": {"weight": 0.5, "normalize": False},
        "dtype": "bfloat16",
        "ramstream": {"exclude": "*norm*", "missing": "base"},
    })  # fmt: skip
    models = "base agent-1 agent-2 -m ties -p normalize=false"
    kept = "--exclude *norm* --missing base"
    asked = {
        "": f"-p weight=0.5 --dtype bf16 {kept}",
        "-p weight=0.3": f"-p weight=0.3 --dtype bf16 {kept}",
        "--dtype f16": f"-p weight=0.5 --dtype f16 {kept}",
        "--exclude *mlp* --missing error": "-p weight=0.5 --dtype bf16 --exclude *mlp*",
        "--scale 2": f"-p scale=2 -p weight=0.5 --dtype bf16 {kept}",
    }
    for words, same in asked.items():
        found = dry(*f"merge.yaml {words}".split())["merge_digest"]
        assert found == dry(*f"{models} {same}".split())["merge_digest"], words


def test_notes_of_the_file_are_shown_first(dry: Callable[..., dict[str, Any]]) -> None:
    written(
        ties(models=[{"model": "agent-1"}], dtype="bfloat16", parameters={"weight": 1, "int8_mask": True})
    )
    assert [note.partition(":")[0] for note in dry("merge.yaml")["notes"]] == [
        "dtype bfloat16",
        "int8_mask changes nothing",
    ]


def test_strength_has_options_of_its_own(
    dry: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["base", "agent-1", "agent-2"]
    short = dry(*models, "--scale", "0.5", "--max-norm", "mean", "--norm-scope", "tensor")
    long = dry(*models, "-p", "scale=0.5", "-p", "max_norm=mean", "-p", "norm_scope=tensor")
    assert short["merge_digest"] == long["merge_digest"] != dry(*models)["merge_digest"]
    for option, value in (("--scale", "1.0"), ("--max-norm", "mean"), ("--norm-scope", "model")):
        name = option.removeprefix("--").replace("-", "_")
        error = refused(capsys, 2, *models, option, value, "-p", f"{name}={value}")
        assert f"{option} {value} and -p {name}={value}: give one" in error
    assert "scale is nan; it must be a finite number" in refused(capsys, 2, *models, "--scale", "nan")


def test_targets_that_are_neither_models_nor_a_file_are_usage_errors(
    family: None, capsys: pytest.CaptureFixture[str]
) -> None:
    written(ties(models=[{"model": "agent-1"}]))
    assert "base is one checkpoint; give BASE AGENT..." in refused(capsys, 2, "base")
    assert "which names its models; leave out agent-1" in refused(capsys, 2, "merge.yaml", "agent-1")
    assert "leave out --method" in refused(capsys, 2, "merge.yaml", "-m", "ram-plus")
    assert "none.yaml cannot be read" in refused(capsys, 3, "none.yaml")
    assert "ends in .yaml or .yml" in refused(capsys, 2, "merge.yaml", "--config-out", "x.txt")
    assert "exists and says something else" in refused(capsys, 3, "merge.yaml", "--config-out", "merge.yaml")
    Path("odd.yaml").mkdir()
    assert "odd.yaml is one checkpoint" in refused(capsys, 2, "odd.yaml")
    assert "Missing argument" in refused(capsys, 2)


def test_a_merge_from_a_file_is_the_merge_of_its_words(family: None) -> None:
    assert (
        runs.cli(
            "merge", "base", "agent-1", "agent-2", "-o", "one", "-m", "ram", "-q", "--config-out", "x.yml"
        )
        == 0
    )
    assert runs.cli("merge", "x.yml", "-o", "two", "-q") == 0
    assert runs.read_weights(Path("one")) == runs.read_weights(Path("two"))
    assert runs.cli("merge", "x.yml", "-o", "two", "-q") == 0


# Methods about themselves


def test_methods_lists_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.cli("methods") == 0
    listed = capsys.readouterr().out
    for name, cls in methods.available().items():
        assert any(line.startswith(name) for line in listed.splitlines()), name
        assert set(cls.aliases) <= set(listed.replace(",", " ").split())
    assert runs.cli("methods", "--json") == 0
    described = json.loads(capsys.readouterr().out)
    assert [method["name"] for method in described] == sorted(methods.available())


@pytest.mark.parametrize("name", EVERY)
def test_a_method_describes_its_parameters(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.cli("methods", name) == 0
    text = capsys.readouterr().out
    assert runs.cli("methods", name, "--json") == 0
    (cls, _), described = methods.find(name), json.loads(capsys.readouterr().out)
    plain = {key: str(value) for key, value in cls().parameters().items()}
    assert {p["name"]: p["default"] for p in described["parameters"]} == {
        key: value.lower() if value in ("True", "False") else value for key, value in plain.items()
    }
    for parameter in described["parameters"]:
        assert f"-p {parameter['name']}={parameter['default']}   ({parameter['type']})" in text
        assert parameter["doc"] in text


def test_types_ranges_and_documentation_of_parameters_are_told() -> None:
    (described,) = manual.describe("dare_ties")
    told = {parameter["name"]: (parameter["type"], parameter["doc"]) for parameter in described["parameters"]}
    assert told["density"][0] == "number from 0 to 1; by agent, tensor and layer"
    assert told["scale"][0] == "number; by tensor and layer"
    assert told["seed"][0] == "whole number"
    assert told["rescale"][0] == "true or false"
    assert told["max_norm"][0] == "none or largest or mean"
    assert told["weight"][1] == "w: what an agent's deltas are multiplied by."
    assert manual.parameters("ramplus_tl")["alpha"].default == "0.2"


def test_a_method_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.cli("methods", "tise") == 2
    assert "did you mean ties?" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1:30", "-1:30.5", "190:20:30"])
def test_numbers_of_base_sixty_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(
        f"merge_method: ram\nbase_model: b\nmodels: [{{model: a}}]\nparameters: {{weight: {text}}}\n"
    )
    with pytest.raises(
        UsageError, match=f"line 4: {text} is read by YAML as a number of base 60; put it in quotes"
    ):
        read(tmp_path / "m.yaml")


@pytest.mark.parametrize("text", ['!!int ""', '!!int "-"', '!!float "x"', '!!bool "7"'])
def test_a_tag_that_its_text_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(f"merge_method: {text}\n")
    with pytest.raises(UsageError, match="line 1: "):
        read(tmp_path / "m.yaml")
