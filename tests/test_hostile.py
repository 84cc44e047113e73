"""Hostile checkpoints: each fault is refused by a line that names it, at once, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import folders
import fuzz
import hostile
import pytest
from hostile import adapters, amplified, archives, beside, headers, places

from ramstream import Checkpoint, Limits, RamPlus, merge, plan_merge
from ramstream.checkpoint.folder import _what_else
from ramstream.checkpoint.patterns import Patterns
from ramstream.errors import CheckpointError
from ramstream.verify import verify_output

Make = Callable[[Path], object]
SECONDS = 10


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An empty folder `agent` beside a good file that nothing in it may lead to."""
    folder = tmp_path / "agent"
    folder.mkdir()
    places.secret(folder)
    return folder


def refusal(source: Path) -> str:
    """The message that a source is refused with; nothing outside it was touched meanwhile."""
    with fuzz.within(SECONDS, source.name), fuzz.watched(reads=source, text=source.name) as refused:
        Checkpoint.open(source)
    assert refused, "it was opened"
    return refused[0]


def table(*tables: dict[str, tuple[Make, str]]) -> pytest.MarkDecorator:
    cases = {name: case for table in tables for name, case in table.items()}
    return pytest.mark.parametrize(("make", "message"), cases.values(), ids=cases.keys())


# --- files, names, numbers ---


@table(places.PLACES, headers.HEADERS, archives.ARCHIVES, archives.PICKLES, adapters.ADAPTERS)
def test_a_fault_is_named_on_lines_that_begin_with_the_checkpoint(
    make: Make, message: str, agent: Path
) -> None:
    make(agent)
    said = refusal(agent)
    assert re.search(message, said), said
    assert all(line.startswith("agent") for line in said.splitlines())


@pytest.mark.parametrize("make", places.LINKS.values(), ids=places.LINKS.keys())
def test_links_that_lead_to_files_are_followed(make: Make, agent: Path) -> None:
    make(agent)
    assert sorted(Checkpoint.open(agent).tensors) == ["x", "y"]


@pytest.mark.parametrize("put", [places.pipe, places.ring, Path.mkdir, places.link("/dev/zero")])
def test_a_single_file_that_is_none_is_refused(put: Make, agent: Path) -> None:
    path = agent / "model.safetensors"
    put(path)
    with (
        fuzz.within(SECONDS, "open"),
        pytest.raises(CheckpointError, match=r"^model.safetensors|^/.*cannot be read"),
    ):
        Checkpoint.open(path)


def test_names_in_an_adapters_config_are_never_paths(agent: Path) -> None:
    secret = os.fspath(places.secret(agent))
    names = {
        "base_model_name_or_path": secret,
        "auto_mapping": {"parent_library": "../x"},
        "revision": "../../x",
    }
    adapters.adapter(agent, module="../../secret", target_modules=[secret], **names)
    with fuzz.watched(reads=agent, text="agent") as refused:
        opened = Checkpoint.open(agent)
    assert not refused
    assert list(opened.tensors) == ["../../secret.weight"]


def test_keys_that_occur_twice_in_a_config_count_as_they_do_for_transformers(agent: Path) -> None:
    adapters.adapter(agent)
    (agent / adapters.CONFIG).write_text(
        '{"peft_type": "IA3", "r": 9, "lora_alpha": 1, "peft_type": "LORA", "r": 1}'
    )
    assert Checkpoint.open(agent).tensors[f"{adapters.MODULE}.weight"].recipe is not None


# --- time and memory ---


@contextmanager
def bounded(memory: int = 1 << 30, seconds: float = 30) -> Iterator[None]:
    """The block takes so much memory and time at most."""
    with fuzz.within(seconds, "the case"), fuzz.bounded_memory(memory):
        yield


QUICK = (
    *("a text of 100 MB in wide letters", "four million values", "a million names of wide letters"),
    "a thousand links to 90 MB of metadata",
)
"""Large faults that are tried in every check."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.soak)
        for name, case in (headers.HUGE | archives.HUGE | adapters.HUGE).items()
    ],
)
def test_a_large_fault_takes_a_gigabyte_and_a_minute_at_most(make: Make, message: str, agent: Path) -> None:
    make(agent)
    with bounded(seconds=60), pytest.raises(CheckpointError) as caught:
        Checkpoint.open(agent)
    assert re.search(message, str(caught.value)), str(caught.value)[:500]
    assert len(str(caught.value)) < fuzz.LONGEST


@pytest.mark.soak
def test_half_a_million_tensors_open(agent: Path) -> None:
    headers.honest(agent)
    with bounded(seconds=60):
        assert len(Checkpoint.open(agent).tensors) == 500_000


@pytest.mark.soak
def test_an_index_of_a_million_names_is_read(agent: Path) -> None:
    hostile.good(agent / "a.safetensors")
    headers.million_names(agent)
    with bounded(), pytest.raises(CheckpointError) as caught:
        Checkpoint.open(agent)
    lacks, unnamed = str(caught.value).splitlines()
    assert re.fullmatch(
        r"agent/a.safetensors: lacks tensors .*: model.layers.0.weight, .* and 999,995 more; .*", lacks
    )
    assert "holds tensors the index does not name: w;" in unnamed


@pytest.mark.soak
def test_an_index_of_a_million_files_is_not_looked_for_to_its_end(agent: Path) -> None:
    headers.million_names(agent, lambda i: f"{i}.safetensors")
    with bounded(), pytest.raises(CheckpointError) as caught:
        Checkpoint.open(agent)
    lines = str(caught.value).splitlines()
    assert len(lines) == 501
    assert "the others were not looked for" in lines[-1]


SHARED = {
    ("a dict", "an entry"): (10_000, 10_000),
    ("a chain of parameters", "an entry"): (10_000, 10_000),
    ("a chain of subclasses", "an entry"): (10_000, 10_000),
    ("numbers", "a shape"): (300_000, 1_000),
    ("a view and nothings", "arguments"): (300_000, 1_500),
    ("a wide text", "a name"): (10_000_000, 1_000),
    ("a word of wide letters", "a module and a class"): (1, 200_000),
    ("a tensor", "nothing, at a place with a hash like others'"): (1, 30_000),
}
"""What is shared, as what; its parts, and its uses."""


@pytest.mark.parametrize(("case", "size"), SHARED.items(), ids=map(" as ".join, SHARED))
def test_what_many_entries_share_is_looked_at_once(
    case: tuple[str, str], size: tuple[int, int], agent: Path
) -> None:
    archives.pickle_of(amplified.pickled(*case, *size))(agent)
    with (
        fuzz.bounded_memory(fuzz.GROWN_ADDRESSES),
        fuzz.watched(reads=agent, text="agent"),
        fuzz.within(3, "open", processor=True),
    ):
        Checkpoint.open(agent)


def test_only_so_many_tensors_are_read_of_all_files_together(
    agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers.honest(agent, 10)
    headers.links(agent, 5)
    monkeypatch.setattr("ramstream.checkpoint.opening._MOST_TENSORS", 20)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(agent)
    said = str(caught.value)
    assert "agent: holds more than 20 tensors; save it in fewer, stacked ones" in said
    assert "3.safetensors" not in said


def test_forty_thousand_files_that_are_no_weights_are_told_at_once(agent: Path) -> None:
    names = [f"{i}.{ending}" for i in range(20_000) for ending in ("gguf", "h5")]
    with fuzz.within(3, "40,000 names", processor=True):
        said = _what_else(agent, names)
    assert "holds GGUF" in said
    assert "weights of another framework" in said
    assert said.count("and 19,997 more") == 2


@pytest.mark.parametrize("make", adapters.TRAPS.values(), ids=adapters.TRAPS.keys())
def test_patterns_that_would_never_be_done_are(make: Make, agent: Path) -> None:
    make(agent)
    with fuzz.within(SECONDS, "open"):
        assert Checkpoint.open(agent).adapter


# --- patterns ---

_ATOMS = (
    *"ab.0",
    "[a-c]",
    "[^b]",
    r"\d",
    r"\.",
    r"\w",
    "a",
    "b",
    "^",
    "$",
    "(a)",
    "(?:b|a)",
    "(?P<x>a|)",
    "()",
)


def _expression(rng: random.Random, depth: int = 2) -> str:
    parts = []
    for _ in range(rng.randint(0, 3)):
        part = f"({_expression(rng, depth - 1)})" if depth and rng.random() < 0.3 else rng.choice(_ATOMS)
        part += rng.choice(("", "", "*", "+", "?", "*?", "{2}", "{1,2}", "{,2}", "{1,}", "{x}", "{}"))
        parts.append(part)
    return ("|" if rng.random() < 0.2 else "").join(parts)


def test_patterns_match_as_pythons_do() -> None:
    """As PEFT asks: the whole of a module's name, or its end after a dot."""
    rng, matched, compared = random.Random(1), 0, 0
    while compared < 8_000:
        text = _expression(rng).replace("?P<x>", "") if rng.random() < 0.9 else _expression(rng)
        try:
            theirs = re.compile(rf"(.*\.)?({text})$")
            ours = Patterns()
            ours.add(text)
        except (re.error, ValueError):
            continue
        for _ in range(4):
            module = "".join(rng.choice("aabbc.0") for _ in range(rng.randint(0, 6)))
            compared += 1
            matched += theirs.match(module) is not None
            assert (ours.first(module) is not None) == (theirs.match(module) is not None), (text, module)
    assert 0.2 < matched / compared < 0.8


def test_the_first_pattern_in_order_counts_whatever_its_kind() -> None:
    patterns = Patterns()
    for key in ("up.proj", "a.*", "up_proj", "layers.0.up_proj", "[x]", "x"):
        patterns.add(key)
    names = ("up_proj", "x.layers.0.up_proj", "layers.0.up_proj", "abc", "b.x", "b", "xup_proj", "up-proj")
    assert [patterns.first(name) for name in names] == [0, 0, 0, 1, 4, None, None, 0]


# --- what lies beside ---


def family(tmp_path: Path) -> tuple[Path, Path]:
    """A base and an agent that merge."""
    model = {"a": folders.normal(1, 8)}
    files = {"generation_config.json": "{}"}
    base = folders.folder(tmp_path / "base", model, config={"model_type": "x"}, files=files)
    return base, folders.folder(
        tmp_path / "agent", folders.agents_of(model, 1)[0], config={"model_type": "x"}
    )


def merged(base: Path, agent: Path, out: Path) -> str:
    """A plan's text, after the merge was done and touched nothing but `out`."""
    with bounded(), fuzz.watched(writes=out.parent, text="") as refused:
        plan = plan_merge(Checkpoint.open(base), [Checkpoint.open(agent)], RamPlus())
        fuzz.fit_for_a_terminal(str(plan))
        merge(plan, out, Limits(workers=1, device="cpu", memory="2GB"))
        assert not verify_output(out).problems
    assert not refused, refused
    return "\n".join(plan.left_behind)


@pytest.mark.parametrize("role", ["base", "agent"])
@pytest.mark.parametrize("make", beside.IGNORED.values(), ids=beside.IGNORED.keys())
def test_what_is_no_file_of_a_model_is_left_behind(make: Make, role: str, tmp_path: Path) -> None:
    sources = dict(zip(("base", "agent"), family(tmp_path), strict=True))
    before = set(os.listdir(sources["base"]))
    make(sources[role])
    left = merged(*sources.values(), tmp_path / "made" / "out")
    new = {name for name in set(os.listdir(sources["base"])) - before if name != "README.md"}
    assert all(name in left for name in new), left
    assert not [name for name in new if (tmp_path / "made" / "out" / name).exists()]


@pytest.mark.parametrize("role", ["base", "agent"])
@pytest.mark.parametrize("make", beside.READ.values(), ids=beside.READ.keys())
def test_odd_side_files_go_along_as_they_are(make: Make, role: str, tmp_path: Path) -> None:
    sources = dict(zip(("base", "agent"), family(tmp_path), strict=True))
    make(sources[role])
    merged(*sources.values(), tmp_path / "made" / "out")


def test_side_files_that_links_make_endless_are_refused(tmp_path: Path) -> None:
    base, agent = family(tmp_path)
    beside.many_paths(base)
    with bounded(seconds=SECONDS), pytest.raises(CheckpointError, match=r"base.*links"):
        plan_merge(Checkpoint.open(base), [Checkpoint.open(agent)], RamPlus())


def test_names_of_side_files_are_shown_without_control_characters(tmp_path: Path) -> None:
    base, agent = family(tmp_path)
    for folder, text in ((base, "{}"), (agent, "[]")):
        (folder / "token\x1b[2J.json").write_text(text)
        (folder / "pipe\x1b[2J.gguf").touch()
    assert "gguf" in merged(base, agent, tmp_path / "made" / "out")


@pytest.mark.parametrize("config", beside.CONFIGS)
def test_odd_configs_of_a_base_are_planned_or_refused(config: str, tmp_path: Path) -> None:
    model = {"model.embed_tokens.weight": folders.normal(1, 4, 2)}
    base = folders.folder(tmp_path / "base", model, config=config)
    agent = tmp_path / "agent"
    agent.mkdir()
    header = {"base_model.model.model.embed_tokens.weight": hostile.entry("F32", [4, 2], [0, 32])}
    hostile.weight_file(agent / adapters.WEIGHTS, header, bytes(32))
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "modules_to_save": ["embed_tokens"]}
    (agent / adapters.CONFIG).write_text(json.dumps(settings))
    with fuzz.watched(reads=tmp_path, text="agent"):
        plan_merge(Checkpoint.open(base), [Checkpoint.open(agent)], RamPlus())


def test_twenty_thousand_heads_and_embeddings_are_matched_at_once(tmp_path: Path) -> None:
    words = ["".join(chr(97 + int(digit)) for digit in str(i)) for i in range(20_000)]
    sources = []
    for role, name in (("base", "embed_tokens"), ("agent", "lm_head")):
        (tmp_path / role).mkdir()
        tensors = {f"{word}.{name}.weight": b"1" for word in words}
        hostile.good(tmp_path / role / hostile.NAME, tensors, dtype="F8_E4M3")
        sources.append(Checkpoint.open(tmp_path / role))
    with bounded(seconds=SECONDS), pytest.raises(CheckpointError, match="agent lacks 20000 tensors"):
        plan_merge(sources[0], sources[1:], RamPlus())


# --- permissions ---


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Without the rights of root, to whom nothing is forbidden; all above `folder` may be passed through."""
    if os.geteuid() != 0:
        yield
        return
    for path in folder.parents:
        if not path.stat().st_mode & 0o1:
            path.chmod(path.stat().st_mode | 0o11)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "."])
def test_what_may_not_be_read_is_named(name: str, tmp_path: Path) -> None:
    base, _ = family(tmp_path)
    (base / name).chmod(0)
    try:
        with (
            as_nobody(base),
            pytest.raises(CheckpointError, match=r"^base.*cannot be read: Permission denied"),
        ):
            Checkpoint.open(base)
    finally:
        (base / name).chmod(0o700)


def test_a_side_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    base, agent = family(tmp_path)
    (base / "generation_config.json").chmod(0)
    with as_nobody(base), pytest.raises(CheckpointError, match=r"generation_config.json: cannot be read"):
        plan_merge(Checkpoint.open(base), [Checkpoint.open(agent)], RamPlus())


def test_checkpoints_that_may_only_be_read_are_merged_and_stay_as_they_are(tmp_path: Path) -> None:
    sources = family(tmp_path)
    out = tmp_path / "made" / "out"
    merged(*sources, out)  # what is loaded and compiled the first time
    made = tmp_path / "nobody"
    made.mkdir()
    made.chmod(0o777)
    for path in (*sources, *(file for source in sources for file in source.iterdir())):
        path.chmod(path.stat().st_mode & 0o555 | 0o444)
    before = {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_relative_to(sources[0])
    }
    with as_nobody(made):
        merged(*sources, made / "out")
    assert (made / "out" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert before == {path: path.stat().st_mtime_ns for path in before}


# --- the whole command ---


def test_the_command_says_a_hostile_name_on_one_line_and_ends_with_5(agent: Path) -> None:
    headers.HEADERS["name with a line break"][0](agent)
    command = [sys.executable, "-m", "ramstream", "merge", agent, agent, "-o", agent.parent / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == CheckpointError.exit_code
    assert done.stderr.count("\n") == 1
    assert r"'w\nmodel.safetensors: all is well': the name holds control characters" in done.stderr
    assert not (agent.parent / "out").exists()
