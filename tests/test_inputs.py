"""Checkpoints as people really have them (INPUTS.md): every row is a test, on small synthetic folders.

What opening a checkpoint refuses is in test_checkpoint.py; here begins what planning and merging make of it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import reference
from folders import Model, Tensor, agents_of, folder, merged, normal, raw, read, tensor, trained, weights

from ramstream import Limits, cli, memory
from ramstream import folder as side_files
from ramstream.checkpoint import open_all
from ramstream.engine import disk, merging
from ramstream.engine.events import Event, Note
from ramstream.errors import CheckpointError, DiskFullError, PlanError
from ramstream.methods import Method
from ramstream.methods.ram import Ram
from ramstream.methods.ram_plus import RamPlus
from ramstream.plan import MatchOptions, MergePlan
from ramstream.planning import plan_counts, plan_merge
from ramstream.types import Dtype
from ramstream.verify import verify_output

EMBED, HEAD, UP, NORM = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
)
BASE: Model = {EMBED: normal(1, 40, 8), UP: normal(2, 16, 8), NORM: normal(3, 8, scale=1)}
AGENTS = agents_of(BASE, 2)


@dataclass
class Done:
    """A merge that was run through the library."""

    out: Path
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    already_complete: bool = False

    @property
    def warnings(self) -> str:
        return "\n".join(self.summary["statistics"]["warnings"])


def plan_of(sources: list[Path], method: Method | None = None, **words: Any) -> MergePlan:
    output = {key: words.pop(key) for key in ("dtype", "shard_size") if key in words}
    first, *others = open_all(sources)
    return plan_merge(first, others, method or Ram(), MatchOptions(**words), **output)


def run_merge(*sources: Path, method: Method | None = None, **words: Any) -> Done:
    """Merge folders or files into `out` beside the first; words are match options, or what is named here."""
    out = words.pop("out", sources[0].parent / "out")
    overwrite, limits = words.pop("overwrite", False), words.pop("limits", Limits(workers=2))
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    plan = plan_of(list(sources), method, **words)
    outcome = merging.merge(plan, out, limits, overwrite=overwrite, listener=listen)
    assert not verify_output(outcome.out, read_data=True).problems
    return Done(outcome.out, outcome.summary, notes, outcome.already_complete)


def merge_models(
    tmp_path: Path, base: Model, agents: list[Model], method: Method | None = None, **words: Any
) -> Done:
    """Merge models that are written as plain folders `base`, `agent-1`, …"""
    sources = [folder(tmp_path / "base", base, config=words.pop("config", None))]
    sources += [folder(tmp_path / f"agent-{i}", agent) for i, agent in enumerate(agents, start=1)]
    return run_merge(*sources, method=method, **words)


def refusal(
    tmp_path: Path, base: Model, agents: list[Model], kind: type[Exception] = CheckpointError, **words: Any
) -> str:
    """The message with which planning refuses; nothing may have been written."""
    with pytest.raises(kind) as caught:
        merge_models(tmp_path, base, agents, **words)
    assert not list(tmp_path.glob("out*"))
    return str(caught.value)


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """`ramstream WORDS…` in this process."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["ramstream", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        return Ended(int(ended.value.code or 0), text.out, text.err)

    return run


@pytest.fixture
def plain(tmp_path: Path) -> list[Path]:
    """A base and two agents as plain folders."""
    return [
        folder(tmp_path / "base", BASE),
        *(folder(tmp_path / f"agent-{t}", a) for t, a in enumerate(AGENTS, 1)),
    ]


def contents(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


# --- The table of all of them ---

TABLE = (Path(__file__).parent / "INPUTS.md").read_text()
ROWS = [line for line in TABLE.splitlines() if re.match(r"\| (?!what arrives)", line)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0][2:])
def test_every_row_of_the_table_names_tests_that_exist(row: str) -> None:
    named = re.findall(r"`(\w+\.py)::(\w+)`", row)
    assert named
    assert len(named) == row.count("::")
    for file, test in named:
        assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text(), f"{file} has no {test}"


# --- Files: layouts ---


def _one_file(path: Path, model: Model) -> Path:
    return weights(path / "weights.safetensors", model)


def _one_folder(path: Path, model: Model) -> Path:
    return folder(path, model)


def _shards(path: Path, model: Model) -> Path:
    names = list(model)
    return folder(
        path,
        model,
        {"model-00001-of-00002.safetensors": names[:1], "model-00002-of-00002.safetensors": names[1:]},
    )


def _odd_shards(path: Path, model: Model) -> Path:
    names = list(model)
    return folder(path, model, {"sub/b.safetensors": names[2:], "a.weights": names[:2]})


def _reversed(path: Path, model: Model) -> Path:
    return folder(path, dict(reversed(model.items())))


def _unaligned(path: Path, model: Model) -> Path:
    """An odd number of padding bytes: no tensor begins on a multiple of its element's size."""
    content = weights(path / "model.safetensors", model).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    hostile.weight_file(path / "model.safetensors", content[8:start], content[start:], pad=1 + start % 2)
    return path


LAYOUTS = [_one_file, _one_folder, _shards, _odd_shards, _reversed, _unaligned]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_agents_in_any_layout_are_merged_by_name(layout, io: str, tmp_path: Path) -> None:
    sources = [folder(tmp_path / "base", BASE)]
    sources += [layout(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(AGENTS)]
    done = run_merge(*sources, limits=Limits(workers=1, io=io))
    assert read(done.out) == merged(BASE, AGENTS, r=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_base_in_any_layout_gives_the_same_tensors_in_its_own_files(layout, tmp_path: Path) -> None:
    base = layout(tmp_path / "base", BASE)
    agents = [folder(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(AGENTS)]
    done = run_merge(base, *agents)
    (checkpoint, again) = open_all([base, done.out])
    assert list(again.files) == list(checkpoint.files)
    assert [info.name for info in again.tensors.values()] == list(checkpoint.tensors)
    found = {
        name: Tensor(i.dtype, i.shape, (again.folder / i.file).read_bytes()[i.offset : i.offset + i.nbytes])
        for name, i in again.tensors.items()
    }
    assert found == merged(BASE, AGENTS, r=0)


def test_sharded_output_has_an_index_with_the_tensors_bytes(tmp_path: Path) -> None:
    base = _shards(tmp_path / "base", BASE)
    done = run_merge(base, folder(tmp_path / "agent", AGENTS[0]))
    index = json.loads((done.out / hostile.INDEX).read_text())
    assert index["weight_map"] == json.loads((base / hostile.INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in BASE.values())


def test_shard_size_cuts_the_output_anew(tmp_path: Path) -> None:
    sources = [_shards(tmp_path / "base", BASE), folder(tmp_path / "agent", AGENTS[0])]
    whole = run_merge(*sources, out=tmp_path / "whole", shard_size=10**9)
    assert sorted(p.name for p in whole.out.glob("*.safetensors*")) == ["model.safetensors"]
    cut = run_merge(*sources, out=tmp_path / "cut", shard_size=700)
    assert sorted(p.name for p in cut.out.glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert set(json.loads((cut.out / hostile.INDEX).read_text())["weight_map"]) == set(BASE)
    assert read(whole.out) == read(cut.out) == merged(BASE, AGENTS[:1], r=0)


def test_stale_weights_beside_an_index_do_not_go_along(tmp_path: Path) -> None:
    base = _shards(tmp_path / "base", BASE)
    weights(base / "consolidated.safetensors", BASE)
    done = run_merge(base, folder(tmp_path / "agent", AGENTS[0]))
    assert not (done.out / "consolidated.safetensors").exists()
    assert any(line.startswith("consolidated.safetensors (weights") for line in done.summary["left_behind"])


def test_faults_of_all_checkpoints_are_one_error(command, plain: list[Path]) -> None:
    base, one, two = plain
    (base / "config.json").write_text("{,}")
    os.truncate(one / hostile.NAME, 900)
    (two / hostile.NAME).write_bytes(hostile.LFS)
    ended = command("merge", *plain, "-o", base.parent / "out")
    assert ended.code == 5
    for text in (
        "base/config.json: is not valid JSON",
        "agent-1/model.safetensors: header says",
        "git lfs pull",
    ):
        assert text in ended.err
    assert not list(base.parent.glob("out*"))


# --- Files: the output folder ---


def test_existing_output_is_refused_and_left_alone(command, plain: list[Path], tmp_path: Path) -> None:
    out = folder(tmp_path / "out", BASE, files={"notes.txt": "mine"})
    before = contents(out)
    ended = command("merge", *plain, "-o", out)
    assert ended.code == 3
    assert f"{out} exists; use --overwrite" in ended.err
    assert contents(out) == before
    assert not (tmp_path / "out.ramstream").exists()


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_output_that_is_no_folder_is_refused(
    command, overwrite: tuple[str, ...], plain: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling"):
        ended = command("merge", *plain, "-o", tmp_path / name, *overwrite)
        assert ended.code == 3
        assert "is not a folder; choose another output" in ended.err
    assert (tmp_path / "file").read_text() == "mine"


def test_overwrite_leaves_nothing_of_an_older_set_of_shards(plain: list[Path], tmp_path: Path) -> None:
    _shards(tmp_path / "out", AGENTS[1])
    (tmp_path / "out" / "old.txt").write_text("old")
    done = run_merge(*plain, overwrite=True)
    assert {"model.safetensors", "README.md", "ramstream.json"} == set(contents(done.out))
    assert read(done.out) == merged(BASE, AGENTS, r=0)


def test_overwrite_keeps_the_old_output_until_the_new_one_is_complete(
    plain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder(tmp_path / "out", BASE, files={"old.txt": "old"})
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr(side_files, "model_card", None)
        with pytest.raises(TypeError):
            run_merge(*plain, overwrite=True)
    assert contents(out) == before
    assert read(run_merge(*plain, overwrite=True).out) == merged(BASE, AGENTS, r=0)


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_same_merge_again_is_already_complete(
    command, overwrite: tuple[str, ...], plain: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert command("merge", *plain, "-o", out).code == 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    ended = command("merge", *plain, "-o", out, *overwrite)
    assert ended.code == 0
    assert "already complete" in ended.out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_other_merge_into_a_finished_output_is_refused(command, plain: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command("merge", *plain, "-o", out).code == 0
    before = contents(out)
    assert command("merge", *plain, "-o", out, "-p", "r=0.3").code == 3
    assert contents(out) == before
    assert command("merge", *plain, "-o", out, "-p", "r=0.3", "--overwrite").code == 0
    assert contents(out) != before


def _link(path: Path, target: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


OVERLAPS: dict[str, Callable[[Path], Path]] = {
    "the base": lambda tmp: tmp / "in" / "base",
    "an agent": lambda tmp: tmp / "in" / "agent-2",
    "in the base": lambda tmp: tmp / "in" / "base" / "out",
    "deep in an agent": lambda tmp: tmp / "in" / "agent-1" / "x" / "y",
    "around all": lambda tmp: tmp / "in",
    "spelled otherwise": lambda tmp: tmp / "in" / "agent-1" / ".." / "base",
    "a link to the base": lambda tmp: _link(tmp / "link", tmp / "in" / "base"),
    "below a link to the base": lambda tmp: _link(tmp / "link", tmp / "in" / "base") / "out",
    "a link to the folder around": lambda tmp: _link(tmp / "link", tmp / "in"),
    "the folder of a linked shard": lambda tmp: tmp / "blobs",
    "in the folder of a linked shard": lambda tmp: tmp / "blobs" / "0123" / "out",
    "the folder of a file": lambda tmp: tmp / "file",
    "the file itself": lambda tmp: tmp / "file" / "a.safetensors",
    "the linked file itself": lambda tmp: tmp / "linked" / "a.safetensors",
    "whose work folder is an agent": lambda tmp: tmp / "in" / "work",
}


@pytest.mark.parametrize("place", OVERLAPS.values(), ids=OVERLAPS.keys())
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
def test_output_that_overlaps_an_input_is_refused(command, place, overwrite, tmp_path: Path) -> None:
    inputs = [
        folder(tmp_path / "in" / name, BASE) for name in ("base", "agent-1", "agent-2", "work.ramstream")
    ]
    (tmp_path / "blobs").mkdir()
    (inputs[1] / hostile.NAME).rename(tmp_path / "blobs" / "0123")
    (inputs[1] / hostile.NAME).symlink_to("../../blobs/0123")
    inputs.append(weights(tmp_path / "file" / "a.safetensors", BASE))
    inputs.append(_link(tmp_path / "linked" / "a.safetensors", weights(tmp_path / "real" / "w", BASE)))
    out = place(tmp_path)
    before = contents(tmp_path)
    ended = command("merge", *inputs, "-o", out, *overwrite)
    assert ended.code == 3
    assert "overlap; choose a place outside every input" in ended.err
    assert contents(tmp_path) == before


def test_output_that_contains_the_link_an_input_was_named_by_is_refused(command, tmp_path: Path) -> None:
    base = _link(tmp_path / "linked" / "a.safetensors", weights(tmp_path / "real" / "w", BASE))
    agent = folder(tmp_path / "agent", AGENTS[0])
    ended = command("merge", base, agent, "-o", tmp_path / "linked", "--overwrite")
    assert base.is_symlink()
    assert ended.code == 3


@pytest.mark.parametrize("store", ["out/overlap.zarr", "out.ramstream/out", "base/overlap.zarr"])
def test_store_that_overlaps_output_or_input_is_refused(store: str, command, plain: list[Path]) -> None:
    tmp = plain[0].parent
    assert command("merge", *plain, "-o", tmp / "out", "--store", tmp / store).code == 3


@pytest.mark.parametrize("out", ["file/out", "x" * 300])
def test_output_that_cannot_be_made_is_an_error(out: str, command, plain: list[Path]) -> None:
    (plain[0].parent / "file").write_text("")
    assert command("merge", *plain, "-o", plain[0].parent / out).code == 3


def test_output_beside_the_inputs_with_a_like_name_is_fine(plain: list[Path], tmp_path: Path) -> None:
    assert read(run_merge(*plain, out=tmp_path / "base-merged").out) == merged(BASE, AGENTS, r=0)


def test_too_little_disk_is_refused_before_anything_is_written(
    command, plain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_disk", lambda _: 1000)
    ended = command("merge", *plain, "-o", tmp_path / "out")
    assert ended.code == 8
    assert re.search(r"the run writes \d+ MiB there and 1 MiB are free; free some space", ended.err)
    assert not list(tmp_path.glob("out*"))


def test_disk_that_fills_up_keeps_the_state_and_the_same_command_goes_on(
    plain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ramstream.writer.RangeWriter.write", full)
        with pytest.raises(DiskFullError, match=r"No space left on device; free some space and run the same"):
            run_merge(*plain, method=RamPlus())
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.ramstream" / "plan.json").exists()
    assert read(run_merge(*plain, method=RamPlus()).out) == merged(BASE, AGENTS)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask_whatever_the_sources_have(
    mask: int, mode: int, umask, tmp_path: Path
) -> None:
    files = {"tokenizer.json": "{}", "sub/x.txt": "x"}
    base = folder(tmp_path / "base", BASE, config={"dtype": "bfloat16"}, files=files)
    agent = folder(tmp_path / "agent", AGENTS[0])
    for path in (*base.rglob("*"), *agent.rglob("*")):
        if path.is_file():
            path.chmod(0o400)
    umask(mask)
    done = run_merge(base, agent)
    assert len(contents(done.out)) == 6
    for path in (done.out, *done.out.rglob("*")):
        wanted = mode | (mode & 0o444) >> 2 if path.is_dir() else mode
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


# --- Tensors: which there are ---


def test_unknown_architecture_merges(tmp_path: Path) -> None:
    base = {"größe/β.0": normal(1, 3, 5, 7), "blob": normal(2, 70), "x.y.z.0.1.2": normal(3, 2, 1, 3, 1, 2)}
    agents = agents_of(base, 3)
    done = merge_models(tmp_path, base, agents, RamPlus(), config={"model_type": "nobody-knows"})
    assert read(done.out) == merged(base, agents)


MTP = {f"model.mtp.{i}.weight": normal(50 + i, 4, 8) for i in range(6)}


def test_tensors_no_agent_has_are_copied_and_said(tmp_path: Path) -> None:
    base = BASE | MTP
    done = merge_models(tmp_path, base, AGENTS)
    assert read(done.out) == merged(base, AGENTS, r=0)
    share = 100 * 6 * 32 / (40 * 8 + 16 * 8 + 8 + 6 * 32)
    assert f"copied from the base, {share:.2g} % of its bytes" in done.warnings
    assert "model.mtp.*.weight × 6" in done.warnings
    assert "no agent has it" in done.warnings


def test_tensors_the_only_agent_lacks_are_missing(tmp_path: Path) -> None:
    text = refusal(tmp_path, BASE | MTP, AGENTS[:1])
    assert "agent-1 lacks 6 tensors (model.mtp.*.weight × 6) that the base has; use --missing base" in text
    done = merge_models(tmp_path, BASE | MTP, AGENTS[:1], missing="base")
    assert read(done.out) == merged(BASE | MTP, AGENTS[:1], r=0)
    assert "unchanged there" in done.warnings


def test_tensors_some_agents_lack_are_an_error_that_lists_them_all(command, tmp_path: Path) -> None:
    short = [{EMBED: AGENTS[0][EMBED], UP: AGENTS[0][UP]}, {EMBED: AGENTS[1][EMBED], NORM: AGENTS[1][NORM]}]
    sources = [folder(tmp_path / "base", BASE)]
    sources += [folder(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(short, 1)]
    ended = command("merge", *sources, "-o", tmp_path / "out")
    assert ended.code == 5
    assert f"agent-1 lacks {NORM} that the base has; use --missing base" in ended.err
    assert f"agent-2 lacks {UP} that the base has; use --missing base" in ended.err
    assert not list(tmp_path.glob("out*"))
    ended = command("merge", *sources, "-o", tmp_path / "out", "--missing", "base", "-m", "ram")
    assert ended.code == 0
    assert f"agent-1 lacks {NORM} that the base has; unchanged there" in ended.out
    assert read(tmp_path / "out") == merged(BASE, short, r=0)


def test_tensors_only_an_agent_has_are_an_error_or_left_out(tmp_path: Path) -> None:
    more = {
        **AGENTS[0],
        "v_head.summary.weight": normal(9, 1, 8),
        **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": normal(60 + i, 4) for i in range(4)},
    }
    text = refusal(tmp_path, BASE, [more, AGENTS[1]])
    assert (
        "agent-1 has 5 tensors (model.layers.*.self_attn.rotary_emb.inv_freq × 4, v_head.summary.weight)"
        in text
    )
    assert "use --extra ignore to leave them out" in text
    done = merge_models(tmp_path, BASE, [more, AGENTS[1]], extra="ignore")
    assert read(done.out) == merged(BASE, AGENTS, r=0)
    assert "left out" in done.warnings


def test_all_that_does_not_match_is_one_error(tmp_path: Path) -> None:
    agent = {
        EMBED: normal(5, 41, 8),
        UP: normal(6, 16, 9),
        "value.weight": normal(7, 3),
        "count": raw("I64", np.arange(3)),
    }
    base = BASE | {"count": normal(8, 3)}
    lines = refusal(tmp_path, base, [agent, AGENTS[0]], config={"vocab_size": 40}).splitlines()
    for text in (
        f"agent-1/model.safetensors: {EMBED} has shape (41, 8), the base has (40, 8); use --vocab base-rows",
        f"agent-1/model.safetensors: {UP} has shape (16, 9), the base has (16, 8)",
        "agent-1/model.safetensors: count is I64, the base's is BF16",
        f"agent-1 lacks {NORM} that the base has",
        "agent-1 has value.weight that the base lacks",
        "agent-2 lacks count that the base has",
    ):
        assert sum(line.startswith(text) for line in lines) == 1, text
    assert len(lines) == 6
    assert all("; " in line for line in lines)


def test_a_glob_that_matches_nothing_is_an_error_that_names_all_such(command, plain: list[Path]) -> None:
    words = ["--exclude", "*.nom.*", "--include", "model.*", "--include", "*lora*"]
    ended = command("merge", *plain, "-o", plain[0].parent / "out", *words)
    assert ended.code == 3
    assert "--include '*lora*' matches none of the 3 tensors of base" in ended.err
    assert "--exclude '*.nom.*' matches none" in ended.err
    assert "model.*'" not in ended.err


@pytest.mark.parametrize("words", [{"exclude": (UP, "*norm*")}, {"include": ("*embed*",)}])
def test_excluded_tensors_are_the_bases_and_in_no_count(words: dict[str, Any], tmp_path: Path) -> None:
    odd = [{**agent, UP: normal(7, 3, 3)} for agent in AGENTS]
    done = merge_models(tmp_path, BASE, odd, RamPlus(), **words)
    assert read(done.out) == {**BASE, EMBED: merged({EMBED: BASE[EMBED]}, AGENTS)[EMBED]}
    assert done.summary["statistics"]["elements"] == 320
    assert "(excluded)" in done.warnings


# --- Tensors: tied embeddings ---

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
NESTED = {"text_config": {"tie_word_embeddings": True}}


def both(agent: Model, head: Tensor | None = None) -> Model:
    return {HEAD: head or agent[EMBED], **agent}


@pytest.mark.parametrize("config", [TIED, NESTED, None])
def test_agent_that_repeats_a_tied_head_is_merged_into_a_base_without(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    done = merge_models(tmp_path, BASE, [both(AGENTS[0]), AGENTS[1]], config=config)
    assert read(done.out) == merged(BASE, AGENTS, r=0)
    assert f"agent-1: {HEAD} repeats {EMBED}, tied in the base" in done.warnings


@pytest.mark.parametrize("extra", ["error", "ignore"])
def test_untied_agent_whose_copies_differ_is_refused(extra: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, BASE, [both(AGENTS[0], AGENTS[1][EMBED])], config=TIED, extra=extra)
    assert f"agent-1: {HEAD} differs from {EMBED}, but the base ties the two" in text
    assert "an untied agent cannot be merged into this base" in text


@pytest.mark.parametrize("config", [TIED, NESTED, None])
def test_agent_without_the_tied_head_is_merged_into_a_base_with_both(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    base = both(BASE)
    done = merge_models(tmp_path, base, [AGENTS[0], both(AGENTS[1])], config=config)
    wanted = merged(base, [both(agent) for agent in AGENTS], r=0)
    assert read(done.out) == wanted
    assert list(read(done.out)) == [HEAD, *BASE]
    assert wanted[HEAD].data == wanted[EMBED].data
    assert f"agent-1: {HEAD} is tied to {EMBED}" in done.warnings


@pytest.mark.parametrize(
    ("config", "head"), [(UNTIED, None), (UNTIED, normal(77, 40, 8)), (None, normal(77, 40, 8))]
)
def test_agent_without_the_head_of_an_untied_base_lacks_it(
    config: dict[str, Any] | None, head: Tensor | None, tmp_path: Path
) -> None:
    text = refusal(tmp_path, both(BASE, head), [AGENTS[0]], config=config)
    assert f"agent-1 lacks {HEAD} that the base has; use --missing base" in text


@pytest.mark.parametrize("config", [TIED, None])
@pytest.mark.parametrize("kept", [EMBED, HEAD])
def test_agent_that_keeps_the_other_copy_of_a_tied_pair_is_merged(
    config: dict[str, Any] | None, kept: str, tmp_path: Path
) -> None:
    """safetensors' `save_model` keeps the alphabetically first name of shared tensors: the head."""
    other = HEAD if kept == EMBED else EMBED
    base = {kept: BASE[EMBED], UP: BASE[UP]}
    agents = [{name: agent[EMBED if name == kept else UP] for name in base} for agent in AGENTS]
    stored = [{other if name == kept else name: t for name, t in agent.items()} for agent in agents]
    done = merge_models(tmp_path, base, [stored[0], agents[1]], config=config)
    assert read(done.out) == merged(base, agents, r=0)
    assert f"agent-1: {kept} is tied to {other}" in done.warnings


def test_agents_own_config_decides_over_the_bases(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", both(BASE, normal(77, 40, 8)), config=UNTIED)
    done = run_merge(base, folder(tmp_path / "agent", AGENTS[0], config=TIED))
    assert read(done.out) == merged(both(BASE, normal(77, 40, 8)), [both(AGENTS[0])], r=0)


def test_a_head_the_base_never_had_is_extra(tmp_path: Path) -> None:
    text = refusal(tmp_path, BASE, [both(AGENTS[0], AGENTS[1][EMBED])], config=UNTIED)
    assert f"agent-1 has {HEAD} that the base lacks; use --extra ignore" in text


# --- Tensors: shapes ---


@pytest.mark.parametrize("rows", [[37, 37], [43, 43], [37, 43], [1, 40]])
def test_vocabularies_of_other_sizes_merge_the_rows_both_have(rows: list[int], tmp_path: Path) -> None:
    base = both(BASE, normal(20, 40, 8)) | {"lm_head.bias": normal(21, 40)}
    agents = []
    for t, n in enumerate(rows):
        agent = agents_of(base, 1, seed=7 + t)[0]
        for name in (EMBED, HEAD, "lm_head.bias"):
            shape = (n, *base[name].shape[1:])
            data = (agent[name].data + normal(90, 43, 8).data)[: 2 * int(np.prod(shape))]
            agent[name] = Tensor("BF16", shape, data)
        agents.append(agent)
    config = {"vocab_size": 40}
    text = refusal(tmp_path, base, agents, config=config)
    shape, size = (rows[0], 8), (40, 8)
    assert f"agent-1/model.safetensors: {EMBED} has shape {shape}, the base has {size}; use --vocab" in text
    done = merge_models(tmp_path, base, agents, RamPlus(), config=config, vocab="base-rows")
    assert read(done.out) == merged(base, agents)
    assert f"{EMBED} ({rows[0]} rows, the base has 40)" in done.warnings


def test_vocabulary_of_a_tied_agent_may_differ_too(tmp_path: Path) -> None:
    base = both(BASE)
    agent = AGENTS[0] | {EMBED: Tensor("BF16", (38, 8), AGENTS[0][EMBED].data[: 38 * 16])}
    done = merge_models(tmp_path, base, [agent], config=TIED, vocab="base-rows")
    assert read(done.out) == merged(base, [both(agent)], r=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(UP, (17, 8)), (UP, (8, 16)), (UP, (128,)), (EMBED, (40, 9)), (EMBED, (320,)), (NORM, (9,)), (NORM, ())],
)
@pytest.mark.parametrize("vocab", ["error", "base-rows"])
def test_any_other_shape_is_an_error(name: str, shape: tuple[int, ...], vocab: str, tmp_path: Path) -> None:
    text = refusal(tmp_path, BASE, [AGENTS[0] | {name: normal(5, *shape)}], vocab=vocab)
    assert f"agent-1/model.safetensors: {name} has shape {shape}, the base has {BASE[name].shape};" in text
    assert f"--exclude {name}" in text
    assert "--vocab" not in text


@pytest.mark.parametrize(
    ("base", "agent", "text"),
    [
        (
            "model.layers.{i}.a.weight",
            "model.language_model.layers.{i}.a.weight",
            "'model.language_model.' stands",
        ),
        (
            "model.language_model.layers.{i}.a.weight",
            "model.layers.{i}.a.weight",
            "for 'model.language_model.'",
        ),
        ("model.layers.{i}.a.weight", "layers.{i}.a.weight", "where '' stands for 'model.'"),
        ("transformer.h.{i}.a.weight", "_orig_mod.transformer.h.{i}.a.weight", "'_orig_mod.' stands for ''"),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_another_prefix_is_an_error_that_names_both(
    base: str, agent: str, text: str, count: int, tmp_path: Path
) -> None:
    model = {base.format(i=i): normal(i, 8) for i in range(12)}
    theirs = {agent.format(i=i): normal(i, 8) for i in range(11, -1, -1)}
    message = refusal(tmp_path, {**model, "visual.x": normal(40, 8)}, [theirs] * count)
    assert text in message
    assert "the prefix differs" in message
    assert "12 tensors (" in message


def test_fused_experts_against_separate_ones_are_an_error_that_says_so(tmp_path: Path) -> None:
    separate = {f"m.experts.{i}.up_proj.weight": normal(i, 4, 8) for i in range(4)}
    fused = {"m.experts.gate_up_proj": normal(9, 4, 4, 8)}
    for number, (base, agents, order) in enumerate(
        [
            (separate, [fused], "separate, the agent fused"),
            (fused, [separate] * 2, "fused, the agent separate"),
        ]
    ):
        message = refusal(
            tmp_path / str(number), base | {"x": normal(1, 4)}, [a | {"x": normal(1, 4)} for a in agents]
        )
        assert f"the base stores experts {order}: convert one of them" in message


# --- Tensors: dtypes ---

FLOATS = ("F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2")


def cast(model: Model, dtype: str) -> Model:
    return {name: tensor(dtype, t.values) for name, t in model.items()}


@pytest.mark.parametrize("theirs", FLOATS)
@pytest.mark.parametrize("ours", FLOATS)
def test_any_two_float_dtypes_merge_in_the_bases(ours: str, theirs: str, tmp_path: Path) -> None:
    base = cast(BASE, ours)
    agents = [cast(AGENTS[0], theirs), cast(AGENTS[1], ours)]
    done = merge_models(tmp_path, base, agents, RamPlus())
    assert read(done.out) == merged(base, agents)
    alarm = f"agent-1 stores {EMBED}, {UP}, {NORM} as {theirs} where base has {ours}: rounding alone counts"
    assert (alarm in done.warnings) == (ours != theirs)


def test_dtypes_mixed_within_a_checkpoint_merge_tensor_by_tensor(tmp_path: Path) -> None:
    base = {f"t.{d}": normal(i, 30, 5, dtype=d) for i, d in enumerate(FLOATS)}
    agents = [{name: tensor(FLOATS[(i + t) % 6], trained(b, t).values) for i, (name, b) in enumerate(base.items())}
              for t in range(3)]  # fmt: skip
    done = merge_models(tmp_path, base, agents, RamPlus())
    assert read(done.out) == merged(base, agents)


def test_alarm_of_a_dtype_mismatch_says_the_share_it_causes(tmp_path: Path) -> None:
    exact = {name: normal(i, *t.shape, dtype="F32") for i, (name, t) in enumerate(BASE.items())}
    done = merge_models(tmp_path, exact, [cast(exact, "BF16")])
    share = 100 * done.summary["statistics"]["agents"][0]["changed_share"]
    (alarm,) = [line for line in done.warnings.splitlines() if "--compare-dtype bf16" in line]
    assert 50 < share < 90
    assert f"{share:.1f} %" in alarm


@pytest.mark.parametrize(
    ("ours", "theirs", "coarser"),
    [("BF16", "F32", "bf16"), ("F32", "BF16", "bf16"), ("F16", "BF16", "bf16"), ("F64", "F32", "f32")],
)
def test_alarm_of_a_dtype_mismatch_names_the_coarser_one(
    ours: str, theirs: str, coarser: str, tmp_path: Path
) -> None:
    done = merge_models(tmp_path, cast(BASE, ours), [cast(AGENTS[0], theirs)])
    assert f"--compare-dtype {coarser} compares what both can hold" in done.warnings


def test_compare_dtype_sees_only_what_both_can_hold(command, tmp_path: Path) -> None:
    exact = {name: normal(i, *t.shape, dtype="F32") for i, (name, t) in enumerate(BASE.items())}
    base, agent = folder(tmp_path / "base", exact), folder(tmp_path / "agent", cast(exact, "BF16"))
    plain = json.loads(command("stats", base, agent, "--json", "-q").out)
    assert plain["agents"][0]["changed_share"] > 0.5
    compared = json.loads(command("stats", base, agent, "--compare-dtype", "bf16", "--json", "-q").out)
    assert compared["agents"][0]["changed"] == 0
    assert not any("rounding alone counts" in text for text in compared["warnings"])


def test_compare_dtype_keeps_stored_deltas(tmp_path: Path) -> None:
    base, agents = cast(BASE, "F32"), [cast(agent, "BF16") for agent in AGENTS]
    done = merge_models(tmp_path, base, agents, RamPlus(), compare_dtype=Dtype.BF16)
    assert read(done.out) == merged(base, agents, compare="BF16")


@pytest.mark.parametrize("out", FLOATS)
def test_dtype_converts_every_float_tensor_copied_ones_too(out: str, tmp_path: Path) -> None:
    base = {
        **{f"t.{d}": normal(i, 7, 5, dtype=d) for i, d in enumerate(FLOATS)},
        **{f"mtp.{d}": normal(i, 7, 5, dtype=d) for i, d in enumerate(FLOATS)},
        "position_ids": raw("I64", np.arange(9)),
    }
    agents = [{name: t for name, t in agent.items() if "mtp" not in name} for agent in agents_of(base, 2)]
    done = merge_models(tmp_path, base, agents, RamPlus(), dtype=Dtype[out])
    assert read(done.out) == merged(base, agents, dtype=out)


def test_unknown_float_name_is_an_error(command, plain: list[Path]) -> None:
    ended = command("merge", *plain, "-o", plain[0].parent / "out", "--dtype", "int8")
    assert ended.code == 2
    assert "'int8' is not a float dtype ramstream knows; use one of f32, f64, bf16" in ended.err


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "F8_E5M2"])
def test_wide_and_narrow_floats_are_widened_exactly(dtype: str, tmp_path: Path) -> None:
    base = {"a": normal(1, 300, dtype=dtype, scale=1), "b": normal(2, 3, dtype=dtype)}
    agents = agents_of(base, 3)
    done = merge_models(tmp_path, base, agents, RamPlus())
    assert read(done.out) == merged(base, agents)


def test_unknown_dtype_is_copied_where_all_agents_hold_the_same_bytes(tmp_path: Path) -> None:
    blob = Tensor("F4_NEW", (64,), bytes(range(32)))
    done = merge_models(tmp_path, BASE | {"q": blob}, [a | {"q": blob} for a in AGENTS])
    assert read(done.out) == merged(BASE | {"q": blob}, AGENTS, r=0)
    assert "q (unknown dtype F4_NEW)" in done.warnings


def test_unknown_dtype_no_agent_has_is_copied(tmp_path: Path) -> None:
    blob = Tensor("F4_NEW", (64,), bytes(range(32)))
    done = merge_models(tmp_path, BASE | {"q": blob}, AGENTS)
    assert read(done.out)["q"] == blob
    assert "q (no agent has it)" in done.warnings


@pytest.mark.parametrize("method", [Ram(), RamPlus()])
def test_unknown_dtype_with_other_bytes_is_an_error(method: Method, command, tmp_path: Path) -> None:
    blob = Tensor("F4_NEW", (64,), bytes(range(32)))
    other = replace(blob, data=bytes(31) + b"\1")
    sources = [folder(tmp_path / "base", BASE | {"q": blob, "p": blob})]
    for t, (agent, one) in enumerate(zip(AGENTS, (blob, other), strict=True), 1):
        sources.append(folder(tmp_path / f"agent-{t}", agent | {"q": one, "p": other}))
    for _ in range(2):
        ended = command("merge", *sources, "-o", tmp_path / "out", "-m", method.name())
        assert ended.code == 5
        assert "agent-2: q (F4_NEW) differs from the base's, and its dtype is unknown" in ended.err
        assert all(f"agent-{t}: p (F4_NEW) differs" in ended.err for t in (1, 2))
        assert "agent-1: q" not in ended.err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "other",
    [
        Tensor("F4_OLD", (64,), bytes(32)),
        Tensor("F4_NEW", (32,), bytes(32)),
        Tensor("F4_NEW", (64,), bytes(16)),
        None,
    ],
    ids=["dtype", "shape", "size", "lacking"],
)
def test_unknown_dtype_that_cannot_be_compared_is_an_error(other: Tensor | None, tmp_path: Path) -> None:
    blob = Tensor("F4_NEW", (64,), bytes(32))
    odd = AGENTS[1] | ({"q": other} if other else {})
    text = refusal(tmp_path, BASE | {"q": blob}, [AGENTS[0] | {"q": blob}, odd])
    assert re.search(
        "agent-2 lacks q that the base has; use --missing|agent-2/.*: q is F4_.*use --exclude q", text
    )


@pytest.mark.parametrize("dtype", ["I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"])
def test_integers_are_the_bases_and_a_difference_is_said(dtype: str, tmp_path: Path) -> None:
    size = {"64": 8, "32": 4, "16": 2}.get(dtype[-2:], 1)
    numbers = (np.arange(24) % 2).astype(f"u{size}")
    base = BASE | {"same": raw(dtype, numbers), "other": raw(dtype, numbers)}
    agents = [
        AGENTS[0] | {"same": base["same"], "other": base["other"]},
        AGENTS[1] | {"same": base["same"], "other": raw(dtype, 1 - numbers)},
    ]
    done = merge_models(tmp_path, base, agents)
    assert read(done.out) == merged(base, agents, r=0)
    assert f"agent-2: other ({dtype}) differs from the base's; the base's is copied" in done.warnings
    assert f"same, other (dtype {dtype})" in done.warnings


def test_integers_that_differ_are_said_in_the_summary_and_again_from_the_store(
    command, tmp_path: Path
) -> None:
    sources = [folder(tmp_path / "base", BASE | {"ids": raw("I64", np.arange(24))})]
    sources.append(folder(tmp_path / "agent", AGENTS[0] | {"ids": raw("I64", np.arange(1, 25))}))
    for words in (("-q",), ("-q", "-p", "r=0.5", "--overwrite")):
        ended = command("merge", *sources, "-o", tmp_path / "out", *words)
        assert "agent: ids (I64) differs from the base's" in ended.out


def test_integers_an_agent_lacks_or_has_otherwise_are_said(tmp_path: Path) -> None:
    base = BASE | {"ids": raw("I64", np.arange(24)), "kept": raw("I64", np.arange(3))}
    agents = [
        AGENTS[0] | {"kept": base["kept"]},
        AGENTS[1] | {"ids": raw("I64", np.arange(12)), "kept": base["kept"]},
    ]
    done = merge_models(tmp_path, base, agents)
    assert read(done.out) == merged(base, agents, r=0)
    assert "agent-1 lacks ids; the base's are copied" in done.warnings
    assert (
        "agent-2/model.safetensors: ids is I64 (12,) of 96 bytes, the base's is I64 (24,) of 192"
        in done.warnings
    )


def test_float_where_the_base_has_integers_or_the_reverse(tmp_path: Path) -> None:
    base = BASE | {"ids": raw("I64", np.arange(8))}
    done = merge_models(tmp_path / "a", base, [AGENTS[0] | {"ids": normal(1, 8)}])
    assert read(done.out)["ids"] == base["ids"]
    assert "ids is BF16 (8,)" in done.warnings
    text = refusal(tmp_path / "b", BASE, [AGENTS[0] | {NORM: raw("I8", np.zeros(8, "i1"))}])
    assert f"{NORM} is I8, the base's is BF16, and they cannot be merged; use --exclude {NORM}" in text


# --- Tensors: sizes ---

ODD_SIZES = {
    "scalar": tensor("BF16", 0.5),
    "empty": normal(1, 0),
    "hollow": normal(1, 3, 0, 5),
    "one": normal(2, 1),
    "wide": normal(3, 1, 1, 130),
    "count": raw("I64", np.array(7)),
    "none": raw("I64", np.zeros((0, 4))),
    "last": normal(1, 0),
}


def test_zero_dimensional_and_empty_tensors_are_like_any_other(tmp_path: Path) -> None:
    agents = agents_of(ODD_SIZES, 2)
    agents[0]["scalar"] = tensor("BF16", 0.75)
    done = merge_models(tmp_path, ODD_SIZES, agents, RamPlus())
    assert read(done.out) == merged(ODD_SIZES, agents)
    assert read(done.out)["scalar"].values != 0.5


NOTHING: dict[str, Model] = {
    "only empty": {"a": normal(1, 0), "b": normal(1, 4, 0)},
    "only integers": {"a": raw("I64", np.arange(5)), "b": raw("BOOL", np.zeros(3, "u1"))},
    "only unknown": {"a": Tensor("F4_NEW", (4,), b"ab")},
    "empty and copied": {"a": normal(1, 0), "b": raw("U8", np.arange(5, dtype="u1"))},
    "only empty integers": {"a": raw("I64", np.zeros(0))},
}


@pytest.mark.parametrize("method", ["ram", "ram-plus"])
@pytest.mark.parametrize("model", NOTHING.values(), ids=NOTHING.keys())
def test_a_base_with_nothing_to_merge_is_copied(model: Model, method: str, command, tmp_path: Path) -> None:
    sources = [folder(tmp_path / name, model) for name in ("base", "agent-1", "agent-2")]
    out = tmp_path / "out"
    assert command("merge", *sources, "-o", out, "-m", method).code == 0
    assert read(out) == model
    assert command("verify", out, "--read-data").code == 0
    assert command("stats", out).code == 0
    assert command("stats", *sources).code == 0
    if model["a"].dtype == "BF16":
        assert command("stats", tmp_path / "out.ramstream" / "overlap.zarr", "--agents", "1").code == 0


def test_everything_excluded_is_the_base(tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, RamPlus(), exclude=("*",))
    assert read(done.out) == BASE


def test_one_tensor_larger_than_the_memory_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process itself holds is taken out of the sum, so that a small tensor is a large one."""
    monkeypatch.setattr(memory, "PROCESS", 0)
    part = normal(1, 1 << 16)
    changed = trained(part, 2)
    times = 17 * 16 + 3  # 17.2 Mi elements: five grains, 36 MB
    base = {"x": normal(3, 5), "huge": Tensor("BF16", (times, 1 << 16), part.data * times), "y": normal(4, 7)}
    agent = base | {"huge": Tensor("BF16", (times, 1 << 16), changed.data * times)}
    assert len(base["huge"].data) > 32 * 10**6
    done = merge_models(tmp_path, base, [agent], limits=Limits(memory="32MB", workers=2))
    assert done.summary["projected_memory"] <= 32 * 10**6
    wanted = merged({"huge": part}, [{"huge": changed}], r=0)["huge"].data * times
    assert read(done.out) == base | {"huge": Tensor("BF16", (times, 1 << 16), wanted)}


def test_ten_thousand_tiny_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers, other = (tensor("BF16", rng.normal(0, 1, 20_000)).data for _ in range(2))
    base, agent = {}, {}
    for i in range(10_000):
        n = i % 17
        data = numbers[2 * i : 2 * (i + n)]
        base[f"layers.{i // 10}.part.{i % 10}"] = Tensor("BF16", (n,), data)
        agent[f"layers.{i // 10}.part.{i % 10}"] = Tensor(
            "BF16", (n,), other[2 * i :][: 2 * n] if i % 3 == 0 else data
        )
    names = list(base)
    shards = {f"s{k}.safetensors": names[k::4] for k in range(4)}
    sources = [folder(tmp_path / "base", base, shards), folder(tmp_path / "agent", agent)]
    began = time.monotonic()
    plan = plan_of(sources, RamPlus())
    planned = time.monotonic() - began
    merging.merge(plan, tmp_path / "out", Limits(workers=2))
    assert planned < 5
    assert time.monotonic() - began < 30
    few = names[:300]
    whole = read(tmp_path / "out")
    assert {n: whole[n] for n in few} == {n: merged({n: base[n]}, [agent], alpha=0)[n] for n in few}


def test_ten_thousand_names_that_do_not_match_are_refused_quickly(tmp_path: Path) -> None:
    base = {f"a.{i}.weight": normal(0, 1) for i in range(10_000)}
    agent = {f"b.{i}.bias": normal(0, 1) for i in range(10_000)}
    began = time.monotonic()
    text = refusal(tmp_path, base, [agent])
    assert time.monotonic() - began < 10
    assert "10000 tensors (a.*.weight × 10000)" in text


# --- Tensors: values ---


def test_an_agent_identical_to_the_base_is_said(command, tmp_path: Path) -> None:
    sources = [folder(tmp_path / "base", BASE), folder(tmp_path / "idle", BASE)]
    sources.append(folder(tmp_path / "busy", AGENTS[0]))
    ended = command("merge", *sources, "-o", tmp_path / "out")
    assert ended.code == 0
    assert "idle changed no merged element by more than 1e-05" in ended.out
    assert "busy changed no" not in ended.out
    assert read(tmp_path / "out") == merged(BASE, [BASE, AGENTS[0]])


@pytest.mark.parametrize("twice_the_same_folder", [True, False])
def test_two_identical_agents_are_said(twice_the_same_folder: bool, command, tmp_path: Path) -> None:
    names = ["one", "other", "one" if twice_the_same_folder else "copy"]
    models = [AGENTS[0], AGENTS[1], AGENTS[0]]
    sources = [folder(tmp_path / "base", BASE)]
    sources += [folder(tmp_path / name, model) for name, model in zip(names, models, strict=True)]
    ended = command("merge", *sources, "-o", tmp_path / "out")
    assert ended.code == 0
    assert re.search(r"one and (\S*/one|copy|one) are identical in every merged element", ended.out)
    assert read(tmp_path / "out") == merged(BASE, models)


@pytest.mark.parametrize("method", ["ram", "ram-plus"])
def test_nothing_changed_at_all_gives_the_base(method: str, command, tmp_path: Path) -> None:
    odd = {**BASE, NORM: tensor("BF16", [-0.0, 0.0, np.nan, np.inf, -np.inf, 1e-40, 3e38, 1])}
    sources = [folder(tmp_path / name, odd) for name in ("base", "agent-1", "agent-2")]
    ended = command("merge", *sources, "-o", tmp_path / "out", "-m", method)
    assert ended.code == 0
    assert "nothing changed at all: a merge equals the base" in ended.out
    assert read(tmp_path / "out") == odd


def spoiled(t: Tensor, **at: float) -> Tensor:
    values = t.values.ravel()
    for position, value in at.items():
        values[int(position[1:])] = value
    return tensor(t.dtype, values.reshape(t.shape))


BAD_BASE = BASE | {NORM: spoiled(BASE[NORM], _2=np.nan, _5=np.inf)}
BAD_AGENTS = [
    AGENTS[0] | {UP: spoiled(AGENTS[0][UP], _77=np.nan, _90=np.inf, _91=-np.inf)},
    AGENTS[1] | {EMBED: spoiled(AGENTS[1][EMBED], _319=-np.inf), NORM: spoiled(BAD_BASE[NORM], _2=1.0)},
]
BAD_AGENTS[0][NORM] = BAD_BASE[NORM]


@pytest.mark.parametrize("method", ["ram", "ram-plus"])
def test_nonfinite_values_are_an_error_that_lists_them_all(method: str, command, tmp_path: Path) -> None:
    sources = [folder(tmp_path / "base", BAD_BASE)]
    sources += [folder(tmp_path / f"agent-{t}", agent) for t, agent in enumerate(BAD_AGENTS, 1)]
    for _ in range(2):  # a resume says the same
        ended = command("merge", *sources, "-o", tmp_path / "out", "-m", method)
        assert ended.code == 5
        for text in (
            f"agent-1: {UP} has 3 NaN or Inf, the first at index 77; use --on-nonfinite base",
            f"agent-2: {EMBED} has 1 NaN or Inf, the first at index 319",
            f"base: {NORM} has 1 NaN or Inf, the first at index 2",
        ):
            assert ended.err.count(text) == 1
        assert ended.err.count("NaN or Inf") == 3
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", ["base", "keep"])
@pytest.mark.parametrize("method", [Ram(), RamPlus()])
def test_nonfinite_values_are_left_out_or_kept_on_request(
    policy: str, method: Method, tmp_path: Path
) -> None:
    done = merge_models(tmp_path, BAD_BASE, BAD_AGENTS, method, on_nonfinite=policy)
    r = 0.0 if isinstance(method, Ram) and not isinstance(method, RamPlus) else 0.1
    assert read(done.out) == merged(BAD_BASE, BAD_AGENTS, r=r, on_nonfinite=policy)
    assert [agent["nonfinite"] for agent in done.summary["statistics"]["agents"]] == [5, 2]


def test_the_remedy_for_nonfinite_values_can_be_followed(command, tmp_path: Path) -> None:
    sources = [folder(tmp_path / "base", BAD_BASE), folder(tmp_path / "agent-1", BAD_AGENTS[0])]
    words = ["merge", *sources, "-o", tmp_path / "out"]
    assert command(*words).code == 5
    assert command(*words, "--on-nonfinite", "base").code == 0


def test_float16_overflow_is_counted_and_named(command, tmp_path: Path) -> None:
    base = {
        "a": tensor("F32", [1.0, 7e4, 2.0]),
        "b": tensor("F32", [1.0, 2.0]),
        "c": tensor("F32", [1e5, 1e5]),
    }
    agent = {"a": tensor("F32", [1.0, 8e4, 1e6]), "b": tensor("F32", [1.0, 3.0]), "c": base["c"]}
    sources = [folder(tmp_path / "base", base), folder(tmp_path / "agent", agent)]
    ended = command("merge", *sources, "-o", tmp_path / "out", "--dtype", "f16", "--exclude", "c")
    assert ended.code == 0
    assert "2 elements of a are beyond the output's range" in ended.out
    assert "2 elements of c are beyond the output's range" in ended.out
    assert "elements of b" not in ended.out
    values = read(tmp_path / "out")
    assert np.isinf(values["a"].values).tolist() == [False, True, True]
    assert np.isinf(values["c"].values).all()


# --- Agents that are not full checkpoints, or not stored as the base is ---


@dataclass(frozen=True)
class Computed:
    """What the oracle takes for a computed tensor: float32 values, or deltas."""

    dtype: str
    values: np.ndarray

    @property
    def source(self) -> reference.Source:
        return reference.Source(self.dtype, self.values.astype(np.float32).ravel().view(np.uint32))


def lora(path: Path) -> dict[str, Computed]:
    """An adapter of one matrix, as PEFT saves it; and its delta, a step at a time."""
    a, b = normal(70, 2, 8, dtype="F32", scale=1), normal(71, 16, 2, dtype="F32")
    module = f"base_model.model.{UP.removesuffix('.weight')}"
    weights(path / "adapter_model.safetensors", {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": ["up_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    left, right = b.values.astype(np.float32), a.values.astype(np.float32)
    steps = [left[:, k, None] * right[None, k] for k in range(2)]
    return {UP: Computed(reference.DELTA, np.float32(0.5) * (steps[0] + steps[1]))}


def archive(path: Path, model: Model) -> Model:
    """Weights as torch saves them."""
    import torch

    path.mkdir()
    bits = {name: np.frombuffer(t.data, np.int16).reshape(t.shape).copy() for name, t in model.items()}
    torch.save(
        {n: torch.from_numpy(a).view(torch.bfloat16) for n, a in bits.items()}, path / "pytorch_model.bin"
    )
    return model


def quantised(path: Path, model: Model) -> Mapping[str, Tensor | Computed]:
    """One matrix as float8 with a scale."""
    scale = np.float32(2**-9 * 1.1)
    codes = tensor("F8_E4M3", model[UP].values / scale)
    stored = {**model, UP: codes, f"{UP}_scale_inv": tensor("F32", [[scale]])}
    folder(
        path, stored, config={"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    )
    return {**model, UP: Computed("F32", codes.values.astype(np.float32) * scale)}


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_agents_of_every_kind_merge_together(prefix: str, command, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", BASE)
    kinds = [lora(tmp_path / "agent-1"), archive(tmp_path / "agent-2", AGENTS[0])]
    kinds += [quantised(tmp_path / "agent-3", AGENTS[1])]
    sources = [base, *(tmp_path / f"agent-{t}" for t in (1, 2, 3))]
    renaming: list[str] = []
    if prefix:
        renamed = {prefix + name.removeprefix("model."): t for name, t in AGENTS[0].items()}
        sources.append(folder(tmp_path / "agent-4", renamed))
        kinds.append(AGENTS[0])
        renaming = ["--map-prefix", f"{prefix}=model."]
    ended = command("merge", *sources, "-o", tmp_path / "out", *renaming)
    assert ended.code == 0
    assert read(tmp_path / "out") == merged(BASE, kinds)
    said = " ".join(ended.out.split())
    assert f"agent-3 stores {UP} as F8_E4M3 with one scale where base has BF16" in said
    assert "agent-1 lacks" not in said
    assert "agent-1 stores" not in said


# --- Side files ---

CONFIG = """{
  "architectures": ["X"],   "dtype": "float32",
  "text_config": {"torch_dtype" :"float32", "hidden_size": 8, "eps": 1e-6},
  "vision_config": {"torch_dtype": "float32"},
  "note": "\\"dtype\\": \\"float32\\" ü", "list": [{"dtype": "float32"}],
  "tail": 1}"""


def test_config_is_verbatim_where_the_dtype_stays(tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, config=CONFIG)
    assert (done.out / "config.json").read_text() == CONFIG


def test_dtype_fields_of_the_config_follow_the_output_and_other_bytes_stay(tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, config=CONFIG, dtype=Dtype.F16)
    wanted = CONFIG.replace('"dtype": "float32",\n  "text', '"dtype": "float16",\n  "text')
    wanted = wanted.replace('"torch_dtype" :"float32"', '"torch_dtype" :"float16"')
    assert (done.out / "config.json").read_text() == wanted
    assert wanted.count("float16") == 2


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(("dtype", "name"), [(Dtype.F32, "float32"), (Dtype.F8_E4M3, "float8_e4m3fn")])
def test_whichever_dtype_field_there_is_is_changed(key: str, dtype: Dtype, name: str, tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, config={key: "bfloat16", "x": None}, dtype=dtype)
    assert json.loads((done.out / "config.json").read_text()) == {key: name, "x": None}


@pytest.mark.parametrize(
    "config", ['{"dtype": null, "x": NaN}', '{"model_type": "bert"}', "{}", '{"text_config": []}']
)
def test_config_without_a_dtype_field_gets_none(config: str, tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, config=config, dtype=Dtype.F16)
    assert (done.out / "config.json").read_text() == config


SIDE_FILES = {
    "tokenizer.json": '{"a":1}\r\n',
    "tokenizer_config.json": "{}",
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": "{ }",
    "preprocessor_config.json": "{}",
    "modeling_custom.py": "import nothing\n",
    "tokenizer.model": b"\0\xff\n",
    "merges.txt": "a b",
    "LICENSE": "free",
    "model.json.new": "",
    "1_Pooling/config.json": "{}",
    "deep/er/README.md": "not the card",
}


def test_side_files_go_along_verbatim(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", BASE, config={}, files=SIDE_FILES)
    agent = folder(tmp_path / "agent", AGENTS[0], files={"LICENSE": "other", "more.txt": "agent's"})
    done = run_merge(base, agent)
    wanted = {name: (base / name).read_bytes() for name in (*SIDE_FILES, "config.json")}
    found = contents(done.out)
    assert {name: found[name] for name in wanted} == wanted
    assert set(found) - set(wanted) == {"model.safetensors", "README.md", "ramstream.json"}
    assert done.summary["left_behind"] == []


def test_links_are_copied_by_content(tmp_path: Path) -> None:
    """The Hub's cache is all links; people link folders too."""
    base = folder(tmp_path / "base", BASE)
    files = {"blob": '{"x": 1}', "pooling/config.json": "{}", "pooling/more/a.txt": "a"}
    store = folder(tmp_path / "store", {}, files=files)
    (store / hostile.NAME).unlink()
    _link(base / "tokenizer.json", store / "blob")
    _link(base / "1_Pooling", store / "pooling")
    done = run_merge(base, folder(tmp_path / "agent", AGENTS[0]))
    found = contents(done.out)
    assert found["tokenizer.json"] == b'{"x": 1}'
    assert found["1_Pooling/config.json"] == b"{}"
    assert found["1_Pooling/more/a.txt"] == b"a"
    assert not any(path.is_symlink() for path in done.out.rglob("*"))


@pytest.mark.parametrize("target", [".", "..", "../..", "sub"])
def test_links_that_go_round_in_circles_end(target: str, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", BASE, files={"sub/a.txt": "a"})
    _link(base / "sub" / "round", Path("../sub" if target == "sub" else target))
    done = run_merge(base, folder(tmp_path / "agent", AGENTS[0]))
    assert (done.out / "sub" / "a.txt").read_text() == "a"
    assert done.summary["left_behind"] == ["sub/round/ (links to a folder that it lies in)"]


def test_what_is_left_behind_is_listed(command, tmp_path: Path) -> None:
    files = {
        "README.md": "---\nlicense: mit\nlanguage: en\n---\nThe base's card",
        ".gitattributes": "x",
        ".cache/huggingface/x.lock": "",
        "pytorch_model.bin": "PK",
        "onnx/model.onnx": "..",
        "training_args.bin": "..",
        "2_Dense/model.safetensors": "..",
        "ramstream.json": "{}",
        "kept.txt": "k",
    }
    base = folder(tmp_path / "base", BASE, files=files)
    with open(base / "big.dat", "wb") as stream:
        stream.truncate((64 << 20) + 1)
    with open(base / "fits.dat", "wb") as stream:
        stream.truncate(64 << 20)
    os.mkfifo(base / "pipe")
    (base / "broken").symlink_to("nowhere")
    words = ["merge", base, folder(tmp_path / "agent", AGENTS[0]), "-o", tmp_path / "out"]
    left = json.loads(command(*words, "--dry-run", "--json").out)["left_behind"]
    wanted = {*files, "big.dat", "pipe", "broken", ".cache/"} - {"kept.txt", ".cache/huggingface/x.lock"}
    assert {line.split(" (")[0] for line in left} == wanted
    ended = command(*words)
    assert ended.code == 0
    assert "left behind: .cache/ (hidden), .gitattributes (hidden)" in " ".join(ended.out.split())
    assert "big.dat (64 MiB, side files go up to 64 MiB)" in " ".join(ended.out.split())
    assert set(contents(tmp_path / "out")) == {
        *("model.safetensors", "README.md", "ramstream.json", "kept.txt", "fits.dat")
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nbase_model:\n")
    assert "The base's card" not in card


def test_base_without_config_merges(tmp_path: Path) -> None:
    done = merge_models(tmp_path, BASE, AGENTS, dtype=Dtype.F32)
    assert not (done.out / "config.json").exists()
    assert read(done.out) == merged(BASE, AGENTS, r=0, dtype="F32")


def test_single_file_base_takes_nothing_of_its_folder_along(tmp_path: Path) -> None:
    home = folder(tmp_path / "home", BASE, config={}, files=SIDE_FILES)
    done = run_merge(home / hostile.NAME, folder(tmp_path / "agent", AGENTS[0]), out=tmp_path / "out")
    assert set(contents(done.out)) == {"model.safetensors", "README.md", "ramstream.json"}
    assert read(done.out) == merged(BASE, AGENTS[:1], r=0)


TEMPLATE_PLACES: dict[str, dict[str, str]] = {
    "jinja": {"chat_template.jinja": "{{ x }}\n"},
    "json": {"chat_template.json": '{"chat_template": "{{ x }}"}'},
    "tokenizer config": {"tokenizer_config.json": '{"eos": 1, "chat_template": "{{ x }}"}'},
    "named": {
        "tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ x }}"}], "eos": 1}'
    },
}


def tokenizer_warnings(tmp_path: Path, ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """What planning says about the second of two agents."""
    sources = [folder(tmp_path / "base", BASE, files=ours)]
    sources += [
        folder(tmp_path / "same", AGENTS[0], files=ours),
        folder(tmp_path / "odd", AGENTS[1], files=theirs),
    ]
    first, *others = open_all(sources)
    notes = list(plan_counts(first, others).notes)
    assert not any(note.startswith("same") for note in notes)
    return notes


@pytest.mark.parametrize("place", TEMPLATE_PLACES.values(), ids=TEMPLATE_PLACES.keys())
@pytest.mark.parametrize("other", TEMPLATE_PLACES.values(), ids=TEMPLATE_PLACES.keys())
def test_chat_template_that_differs_is_said_wherever_it_lives(
    place: dict[str, str], other: dict[str, str], tmp_path: Path
) -> None:
    assert tokenizer_warnings(tmp_path / "same", place, other) == []
    changed = {name: text.replace("{{ x }}", "{{ y }}") for name, text in other.items()}
    assert tokenizer_warnings(tmp_path / "other", place, changed) == [
        f"odd: the chat template ({next(iter(other))}) differs from the base's; the output has the base's"
    ]


def test_chat_template_only_an_agent_has_is_said(tmp_path: Path) -> None:
    files = {"chat_template.jinja": "x", "additional_chat_templates/tool.jinja": "y"}
    (note,) = tokenizer_warnings(tmp_path, {"tokenizer.json": "{}"}, files)
    places = "additional_chat_templates/tool.jinja, chat_template.jinja"
    assert (
        note == f"odd: the chat template ({places}) differs from the base's; the output has the base's, none"
    )


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
     "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "qwen.tiktoken"],
)  # fmt: skip
def test_tokenizer_file_that_differs_is_said(name: str, tmp_path: Path) -> None:
    (note,) = tokenizer_warnings(tmp_path, {name: '{"x": 1}'}, {name: '{"x": 2}'})
    assert note == f"odd: {name} differs from the base's; the output has the base's"


def test_all_differing_tokenizer_files_are_one_line(tmp_path: Path) -> None:
    names = ["vocab.json", "merges.txt", "generation_config.json"]
    (note,) = tokenizer_warnings(tmp_path, dict.fromkeys(names, "1"), dict.fromkeys(names, "2"))
    assert note.startswith("odd: merges.txt, vocab.json differs")


@pytest.mark.parametrize("theirs", [{}, {"tokenizer_config.json": '{"b": 2, "a": 1}'}])
def test_agent_without_a_tokenizer_or_spelled_otherwise_is_fine(
    theirs: dict[str, str], tmp_path: Path
) -> None:
    assert (
        tokenizer_warnings(tmp_path, {"tokenizer_config.json": '{"a": 1,"b": 2}', "vocab.txt": "a"}, theirs)
        == []
    )


def test_broken_tokenizer_files_are_compared_by_their_bytes(tmp_path: Path) -> None:
    name = "tokenizer_config.json"
    assert tokenizer_warnings(tmp_path / "a", {name: "[,"}, {name: "[,"}) == []
    assert len(tokenizer_warnings(tmp_path / "b", {name: "[,"}, {name: "[]"})) == 1


def test_differing_tokenizer_is_in_stats_and_summary(command, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", BASE, files={"tokenizer.json": "1"})
    agent = folder(tmp_path / "agent", AGENTS[0], files={"tokenizer.json": "2"})
    text = "agent: tokenizer.json differs from the base's; the output has the base's"
    assert text in command("stats", base, agent).out
    assert text in command("merge", base, agent, "-o", tmp_path / "out").out
    assert text in command("stats", tmp_path / "out").out
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "1"


def test_side_file_changed_after_planning_is_refused(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", BASE, files={"tokenizer.json": "1"})
    plan = plan_of([base, folder(tmp_path / "agent", AGENTS[0])])
    (base / "tokenizer.json").write_text("2")
    with pytest.raises(Exception, match=r"tokenizer.json changed since the merge was planned"):
        merging.merge(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_merge_takes_1_to_64_agents(plain: list[Path]) -> None:
    (base,) = open_all(plain[:1])
    for n in (0, 65):
        with pytest.raises(PlanError, match=f"{n} agents; a merge takes 1 to 64"):
            plan_counts(base, [base] * n)


# --- What transformers makes of the output ---


@pytest.fixture(scope="module")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def random_model(transformers: Any, kind: str, tied: bool) -> Any:
    import torch

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **heads, tie_word_embeddings=tied, dtype="bfloat16"
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)


def saved_family(transformers: Any, tmp_path: Path, kind: str, tied: bool, shard_size: str) -> list[Path]:
    """A random base and two fine-tunes of it, as `save_pretrained` writes them."""
    import torch

    model = random_model(transformers, kind, tied)
    sources = [tmp_path / name for name in ("base", "agent-1", "agent-2")]
    for t, path in enumerate(sources):
        if t:
            torch.manual_seed(t)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.where(torch.rand(weight.shape) < 0.2, 0.01, 0.0).to(weight.dtype))
        model.save_pretrained(path, max_shard_size=shard_size if t == 0 else "1GB")
    return sources


def load_without_a_word(transformers: Any, path: Path) -> Any:
    """`from_pretrained` where every warning, of Python or of its logger, is an error."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(listener)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", output_loading_info=True
            )
    finally:
        logger.removeHandler(listener)
    assert said == []
    assert not any(info.values()), info
    return model


def names_of_weights(path: Path) -> list[str]:
    return sorted(p.name for p in path.glob("*.safetensors*"))


@pytest.mark.parametrize(("kind", "tied"), [("Qwen2", True), ("Qwen2", False), ("Llama", False)])
@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
def test_transformers_loads_the_output_without_a_warning(
    kind: str, tied: bool, shard_size: str, transformers, tmp_path: Path
) -> None:
    import torch

    sources = saved_family(transformers, tmp_path, kind, tied, shard_size)
    done = run_merge(*sources, method=RamPlus())
    assert names_of_weights(done.out) == names_of_weights(sources[0])
    assert (len(names_of_weights(done.out)) > 2) == (shard_size == "8KB")
    assert (done.out / "generation_config.json").read_bytes() == (
        sources[0] / "generation_config.json"
    ).read_bytes()
    found = read(done.out)
    assert found == merged(read(sources[0]), [read(path) for path in sources[1:]])
    model = load_without_a_word(transformers, done.out)
    weights = model.state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    for name, t in found.items():
        assert np.array_equal(weights[name].double().numpy(), t.values), name
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


def test_transformers_takes_the_dtype_from_the_config(transformers, tmp_path: Path) -> None:
    import torch

    sources = saved_family(transformers, tmp_path, "Qwen2", True, "1GB")
    done = run_merge(*sources, dtype=Dtype.F32)
    assert load_without_a_word(transformers, done.out).dtype == torch.float32


def test_transformers_loads_what_shard_size_cut(transformers, tmp_path: Path) -> None:
    sources = saved_family(transformers, tmp_path, "Llama", False, "1GB")
    done = run_merge(*sources, shard_size=4000)
    assert len(names_of_weights(done.out)) > 3
    load_without_a_word(transformers, done.out)


def test_transformers_loads_the_output_of_a_base_whose_index_names_one_shard(
    transformers, tmp_path: Path
) -> None:
    sources = saved_family(transformers, tmp_path, "Llama", False, "1GB")
    (sources[0] / hostile.NAME).rename(sources[0] / "model-00001-of-00001.safetensors")
    hostile.index(sources[0], dict.fromkeys(read(sources[0]), "model-00001-of-00001.safetensors"))
    load_without_a_word(transformers, sources[0])
    load_without_a_word(transformers, run_merge(*sources).out)
