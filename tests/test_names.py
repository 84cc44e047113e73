"""Names that do not meet: prefixes renamed on request, hints that can be followed, few words for many tensors."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from folders import Model, agents_of, folder, merged, normal, read
from hypothesis import given
from hypothesis import strategies as st
from runs import cli

from ramstream.checkpoint import Checkpoint
from ramstream.errors import CheckpointError, PlanError, UsageError
from ramstream.plan import MatchOptions, differences
from ramstream.plan.matching import match
from ramstream.plan.names import Remarks, list_names, name_pattern
from ramstream.plan.prefixes import beginnings, hints, renamed
from ramstream.planning import plan_counts
from ramstream.types import TensorInfo

BASE: Model = {
    "model.embed_tokens.weight": normal(1, 12, 8),
    **{f"model.layers.{i}.mlp.up_proj.weight": normal(2 + i, 16, 8) for i in range(11)},
    "lm_head.weight": normal(30, 12, 8),
}
AGENTS = agents_of(BASE, 2)


def info(name: str, shape: tuple[int, ...] = (2, 3), file: str = "model.safetensors") -> TensorInfo:
    return TensorInfo(name, "BF16", shape, file, 0, 0)


def checkpoint(label: str, names: Sequence[str] | Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """A checkpoint of headers alone."""
    shapes = names if isinstance(names, Mapping) else dict.fromkeys(names, (2, 3))
    tensors = {name: info(name, shape) for name, shape in shapes.items()}
    return Checkpoint(label, Path(label), {}, tensors, None, False)


def refusal(base: Checkpoint, *agents: Checkpoint, options: MatchOptions | None = None) -> str:
    with pytest.raises((CheckpointError, PlanError)) as caught:
        match(base, agents, options or MatchOptions())
    return str(caught.value)


def suggested(message: str) -> tuple[tuple[str, str], ...]:
    """The prefixes that a message says to map, as a shell would hand them over."""
    commands = [
        shlex.split(line.split("; use ")[1]) for line in message.splitlines() if "; use --map-" in line
    ]
    pairs = [word.partition("=") for words in commands for word in words[1::2]]
    return tuple((old, new) for old, _, new in dict.fromkeys(pairs))


# --- renaming ---

words = st.text("ab.", max_size=4)


@given(st.text("ab.", max_size=9), st.dictionaries(words, words, max_size=4))
def test_the_longest_prefix_counts_once(name: str, table: dict[str, str]) -> None:
    new = renamed(name, list(table.items()))
    for length in range(len(name), -1, -1):
        if name[:length] in table:
            assert new == table[name[:length]] + name[length:]
            return
    assert new == name


def test_prefixes_are_taken_as_they_are_written() -> None:
    assert renamed("model_ema.x", [("model", "base")]) == "base_ema.x"
    assert renamed("model_ema.x", [("model.", "base.")]) == "model_ema.x"
    assert renamed("x", [("", "model.")]) == "model.x"


def prefixed(model: Model, old: str, new: str) -> Model:
    return {new + name[len(old) :] if name.startswith(old) else name: t for name, t in model.items()}


RENAMED = {
    "another": (("model.language_model.=model.",), lambda m: prefixed(m, "model.", "model.language_model.")),
    "more": (("_orig_mod.=",), lambda m: prefixed(m, "", "_orig_mod.")),
    "less": (("=model.", "lm_head.=lm_head."), lambda m: prefixed(m, "model.", "")),
    "two": (("a.=model.", "head.=lm_head."), lambda m: prefixed(prefixed(m, "model.", "a."), "lm_head.", "head.")),
}  # fmt: skip


@pytest.mark.parametrize(("options", "change"), RENAMED.values(), ids=RENAMED.keys())
def test_agents_of_other_prefixes_merge_and_count_as_if_they_had_the_bases(
    options: tuple[str, ...], change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [folder(tmp_path / "base", BASE)]
    sources += [folder(tmp_path / f"agent-{t}", change(agent)) for t, agent in enumerate(AGENTS)]
    plain = [folder(tmp_path / f"plain-{t}", agent) for t, agent in enumerate(AGENTS)]
    renaming = [word for option in options for word in ("--map-prefix", option)]
    assert cli("merge", *sources, "-o", tmp_path / "out", "-q", *renaming) == 0
    assert read(tmp_path / "out") == merged(BASE, AGENTS)
    capsys.readouterr()
    numbers = []
    for words in ([*sources, *renaming], [sources[0], *plain]):
        assert cli("stats", *words, "--json", "-q") == 0
        numbers.append(json.loads(capsys.readouterr().out))
    assert numbers[0]["counts"] == numbers[1]["counts"]
    assert numbers[0]["lambda"] == numbers[1]["lambda"]


def test_globs_are_about_the_bases_names() -> None:
    base, agent = checkpoint("base", ["m.a", "m.b"]), checkpoint("agent", ["x.a", "x.c"])
    options = MatchOptions(include=("m.*",), exclude=("m.[bc]",), map_prefix=(("x.", "m."),))
    entries = match(base, [agent], options).entries
    assert [(entry.reason, entry.sources[1] is None) for entry in entries] == [
        ("", False),
        ("excluded", True),
    ]


def test_two_tensors_that_would_get_one_name_are_an_error_that_names_both() -> None:
    base = checkpoint("base", ["m.a", "m.b"])
    clash = checkpoint("agent", ["m.a", "ema.a", "m.b", "ema.b", "x"])
    text = refusal(base, clash, clash, options=MatchOptions(map_prefix=(("ema.", "m."),)))
    assert "agent: --map-prefix makes m.a of both m.a, ema.a, and 1 more such" in text
    away = MatchOptions(map_prefix=(("ema.", "m."), ("m.", "old.")), extra="ignore")
    (note,) = match(base, [clash], away).notes
    assert note == "agent has old.a, old.b, x that the base lacks; left out"


def test_a_prefix_no_agent_has_is_an_error_that_says_which_there_are() -> None:
    base = checkpoint("base", ["m.a"])
    agents = checkpoint("one", ["m.a", *(f"n.layers.{i}.b" for i in range(99))]), checkpoint("two", ["head"])
    options = MatchOptions(map_prefix=(("x.", ""), ("m.", "y."), ("z.", "m.")))
    for line, old in zip(refusal(base, *agents, options=options).splitlines(), ("x.=", "z.=m."), strict=True):
        start, _, found = line.partition("; they begin with ")
        assert start == f"--map-prefix {old}: no tensor of an agent begins with {old[:2]!r}"
        assert sorted(found.split(", ")) == ["head", "m.", "n.layers. × 99"]


@given(st.sets(st.text("ab.0", min_size=1, max_size=9), max_size=40))
def test_beginnings_are_what_names_begin_with(names: set[str]) -> None:
    text = beginnings(names)
    for part in filter(None, text.split(" and ")[0].split(", ")):
        assert any(name.startswith(part.partition(" × ")[0].replace("''", "")) for name in names)
    assert len(text) < 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model."], "--map-prefix 'model.': write FROM=TO"),
        (["a.=b.", "a.=c."], "'a.' is to become 'b.' and 'c.'; give it once"),
        (["=b.", "=c."], "'' is to become 'b.' and 'c.'"),
    ],
)
@pytest.mark.parametrize("command", ["merge", "stats"])
def test_prefixes_that_mean_nothing_are_usage_errors(
    command: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [folder(tmp_path / name, BASE) for name in ("base", "agent")]
    out = ["-o", tmp_path / "out"] if command == "merge" else []
    assert cli(command, *sources, *out, *(w for word in words for w in ("--map-prefix", word))) == 2
    assert message in capsys.readouterr().err


def test_one_prefix_given_twice_alike_is_fine() -> None:
    assert MatchOptions(map_prefix=(("a.", "b."), ("a.", "b."))).identity()["map_prefix"] == [["a.", "b."]]
    with pytest.raises(UsageError):
        MatchOptions(map_prefix=(("a.", "b."), ("a.", "c.")))


def test_prefixes_decide_the_count_digest_and_their_order_does_not(tmp_path: Path) -> None:
    both = {f"a.{name}": t for name, t in BASE.items()} | {f"b.{name}": t for name, t in AGENTS[0].items()}
    paths = [folder(tmp_path / "base", BASE), folder(tmp_path / "agent", both)]
    base, agent = map(Checkpoint.open, paths)

    def digest_of(*pairs: tuple[str, str]) -> tuple[str, dict[str, object]]:
        plan = plan_counts(base, [agent], options=MatchOptions(map_prefix=pairs, extra="ignore"))
        return plan.digest, plan.identity

    one, other = digest_of(("a.", ""), ("b.", "c.")), digest_of(("a.", "c."), ("b.", ""))
    assert digest_of(("b.", "c."), ("a.", "")) == one
    assert one[0] != other[0]
    assert "map_prefix" in differences(one[1], other[1])


def test_a_store_is_not_asked_with_prefixes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("stats", tmp_path / "store", "--map-prefix", "a=b") == 2
    assert "options of counting go with a base and its agents" in capsys.readouterr().err


# --- hints ---

LAYERS = [f"layers.{i}.{part}.weight" for i in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")]
TEXT = [*LAYERS, "embed_tokens.weight", "norm.weight"]
VISION = [f"blocks.{i}.attn.qkv.weight" for i in range(6)] + ["merger.ln_q.weight"]


def of(prefix: str, names: Sequence[str]) -> list[str]:
    return [prefix + name for name in names]


FAMILIES = {
    "a part more": (of("model.", TEXT), [of("model.language_model.", TEXT)]),
    "a part less": (of("model.language_model.", TEXT), [of("model.", TEXT)]),
    "compiled": (of("model.", TEXT), [of("_orig_mod.model.", TEXT)]),
    "without the head's model": ([*of("model.", TEXT), "lm_head.weight"], [[*TEXT, "lm_head.weight"]]),
    "one agent of two": (of("model.", TEXT), [of("model.", TEXT), TEXT]),
    "agents each in its own way": (of("model.", TEXT), [of("x.", TEXT), of("y.z.", TEXT)]),
    "two parts at once": (
        of("model.language_model.", TEXT) + of("model.visual.", VISION) + ["lm_head.weight"],
        [of("model.", TEXT) + of("visual.", VISION) + ["lm_head.weight"]],
    ),
    "an old and a new agent": (
        of("model.language_model.", TEXT) + of("model.visual.", VISION) + ["lm_head.weight"],
        [
            of("model.language_model.", TEXT) + of("model.visual.", VISION) + ["lm_head.weight"],
            of("model.", TEXT) + of("visual.", VISION) + ["lm_head.weight"],
        ],
    ),
    "the words of a shell": (of("model.", TEXT), [of("my model's; $x.", TEXT)]),
}


@pytest.mark.parametrize(("ours", "theirs"), FAMILIES.values(), ids=FAMILIES.keys())
def test_the_option_that_a_hint_names_makes_the_names_meet(ours: list[str], theirs: list[list[str]]) -> None:
    base = checkpoint("base", ours)
    agents = [checkpoint(f"agent-{t}", names) for t, names in enumerate(theirs)]
    text = refusal(base, *agents)
    assert "the prefix differs; use --map-prefix" in text
    pairs = suggested(text)
    done = match(base, agents, MatchOptions(map_prefix=pairs))
    assert all(all(entry.sources) and not entry.reason for entry in done.entries)
    assert not done.notes


components = st.lists(st.sampled_from(["model", "base", "language_model", "x_1"]), max_size=3)


@given(components, components)
def test_any_two_prefixes_are_found(ours: list[str], theirs: list[str]) -> None:
    base = checkpoint("base", of("".join(f"{part}." for part in ours), TEXT))
    agent = checkpoint("agent", of("".join(f"{part}." for part in theirs), TEXT))
    if ours == theirs:
        match(base, [agent], MatchOptions())
        return
    match(base, [agent], MatchOptions(map_prefix=suggested(refusal(base, agent))))


def test_a_hint_goes_on_from_the_prefixes_that_were_given() -> None:
    base, agent = checkpoint("base", of("model.", TEXT)), checkpoint("agent", of("_orig_mod.net.", TEXT))
    given = (("_orig_mod.", ""),)
    pairs = suggested(refusal(base, agent, options=MatchOptions(map_prefix=given)))
    assert pairs == (("_orig_mod.net.", "model."),)
    match(base, [agent], MatchOptions(map_prefix=given + pairs))


def test_tensors_that_end_alike_but_have_other_shapes_suggest_nothing() -> None:
    base = checkpoint("base", {f"a.{i}.weight": (2, 3) for i in range(5)})
    agent = checkpoint("agent", {f"b.{i}.weight": (3, 2) for i in range(5)})
    assert "prefix" not in refusal(base, agent)


def test_prefixes_no_terminal_should_see_are_shown_escaped_and_in_no_option() -> None:
    for prefix in ("\x1b[2J.", "x" * 10_000 + ".", "x=y."):
        text = refusal(checkpoint("base", of("m.", TEXT)), checkpoint("agent", of(prefix, TEXT)))
        assert "the prefix differs; rename the tensors" in text
        assert "\x1b" not in text
        assert len(text) < 4000


def test_a_few_names_alike_among_many_suggest_nothing() -> None:
    base = checkpoint("base", [*of("model.", TEXT), "model.a.weight"])
    agent = checkpoint("agent", [f"other.{i}.bias" for i in range(40)] + ["value.a.weight"])
    assert "prefix" not in refusal(base, agent)


def test_prefixes_that_cannot_be_told_apart_are_said_without_an_option() -> None:
    (line,) = hints([info(n) for n in of("m.", TEXT)], [info(n) for n in TEXT], {"layers.x": "layers.x"})
    assert (
        line
        == "its names match where '' stands for 'm.': the prefix differs; rename the tensors of one of them"
    )


def test_a_hint_is_given_where_mismatches_are_let_through() -> None:
    base, agent = checkpoint("base", [*of("model.", TEXT), "x"]), checkpoint("agent", [*TEXT, "x"])
    notes = match(base, [agent], MatchOptions(missing="base", extra="ignore")).notes
    assert any("use --map-prefix =model. --map-prefix x=x" in note for note in notes)


FUSED = {
    "qkv": (["q_proj", "k_proj", "v_proj"], ["qkv_proj"], "stores qkv_proj", "q_proj, k_proj, v_proj apart"),
    "bert": (["query", "key", "value"], ["Wqkv"], "stores Wqkv", "query, key, value apart"),
    "neox": (["q_proj", "k_proj", "v_proj"], ["query_key_value"], "stores query_key_value", "q_proj, k"),
    "mlp": (["gate_proj", "up_proj"], ["gate_up_proj"], "stores gate_up_proj", "gate_proj, up_proj apart"),
    "experts": (
        ["experts.0.gate_proj", "experts.0.up_proj", "experts.1.gate_proj", "experts.1.up_proj"],
        ["experts.gate_up_proj"],
        "experts fused",
        "separate",
    ),
}


@pytest.mark.parametrize(("apart", "fused", "one", "other"), FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("turned", [False, True])
def test_what_one_side_stores_in_one_matrix_is_said(
    apart: list[str], fused: list[str], one: str, other: str, turned: bool
) -> None:
    sides = [[f"layers.{i}.{name}.weight" for i in range(3) for name in names] for names in (apart, fused)]
    ours, theirs = reversed(sides) if turned else sides
    text = refusal(checkpoint("base", [*ours, "x"]), checkpoint("agent", [*theirs, "x"]))
    (hint,) = [line for line in text.splitlines() if "convert one of them with transformers" in line]
    assert one in hint or (one, turned) == ("experts fused", False)
    assert other in hint
    first, second = (one, other) if turned else (other, one)
    if "experts" not in one:
        assert f"the base {first}" in hint or f"the agent {second}" in hint
    assert "ramstream does not" in hint


def test_shared_experts_are_no_fused_ones() -> None:
    base = checkpoint("base", ["m.experts.0.up.weight", "m.norm.bias"])
    assert "convert" not in refusal(base, checkpoint("agent", ["m.shared_experts.up.weight", "m.norm.bias"]))


# --- many names, few words ---


def test_all_problems_of_all_agents_are_one_short_error() -> None:
    base = checkpoint("base", {f"layers.{i}.{p}": (4, 8) for i in range(5000) for p in ("a", "b", "c")})
    agents = [
        checkpoint(f"agent-{t}", {f"layers.{i}.{p}": (4, 8 + t) for i in range(5000) for p in parts})
        for t, parts in enumerate(("abcd", "abd", "abd"))
    ]
    lines = refusal(base, *agents).splitlines()
    assert sorted(lines) == sorted(
        [
            f"agent-{t}/model.safetensors: layers.*.{p} × 5000 has shape (4, {8 + t}), the base has (4, 8); give "
            f"an agent that was trained from this base, or use --exclude 'layers.*.{p}' to copy the base's"
            for t in (1, 2)
            for p in "ab"
        ]
        + [
            f"agent-{t} lacks 5000 tensors (layers.*.c × 5000) that the base has; use --missing base to treat "
            "them as unchanged there"
            for t in (1, 2)
        ]
        + [
            f"agent-{t} has 5000 tensors (layers.*.d × 5000) that the base lacks; use --extra ignore to leave "
            "them out"
            for t in range(3)
        ]
    )


def test_ten_thousand_names_of_ten_thousand_patterns_are_a_short_error() -> None:
    base = checkpoint("base", [f"a{i}x.w{i}" for i in range(10_000)])
    shapes = {f"a{i}x.w{i}": (2, 4) for i in range(5000)} | {f"b{i}x.w{i}": (2, 3) for i in range(5000)}
    text = refusal(base, checkpoint("agent", shapes))
    assert len(text) < 5000
    assert "agent: 4988 more patterns of tensors like these" in text


def test_the_glob_of_a_remark_can_be_followed() -> None:
    base = checkpoint("base", {f"layers.{i}.a": (4, 8) for i in range(5)} | {"x": (1,)})
    agent = checkpoint("agent", {f"layers.{i}.a": (4, 9) for i in range(5)} | {"x": (1,)})
    (glob,) = re.findall(r"--exclude (\S+)", refusal(base, agent))
    match(base, [agent], MatchOptions(exclude=tuple(shlex.split(glob))))


def test_remarks_name_the_file_where_there_is_one() -> None:
    for files, single, where in (
        (("f", "f"), False, "agent/f"),
        (("f", "g"), False, "agent"),
        (("f", "f"), True, "agent"),
    ):
        remarks = Remarks("agent", single)
        for i, file in enumerate(files):
            remarks.add(info(f"a.{i}", file=file), "is odd; ", "use {}")
        assert remarks.lines() == [f"{where}: a.* × 2 is odd; use 'a.*'"]


def test_patterns_replace_whole_numbers_only() -> None:
    assert name_pattern("h.10.conv1d.2") == "h.*.conv1d.*"
    assert list_names([info("a.1"), info("b")]) == "a.1, b"
    assert list_names([info(f"a.{i}") for i in range(4)]) == "4 tensors (a.* × 4)"
