"""Checkpoints by Hub id, out of a cache folder as huggingface_hub keeps it: links into blobs, refs to commits."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hostile
import pytest
from folders import Model, agents_of, folder, merged, normal, read
from runs import cli

from ramstream.checkpoint import Checkpoint, open_all
from ramstream.errors import CheckpointError

BASE: Model = {"model.embed.weight": normal(1, 12, 8), "model.layers.0.up.weight": normal(2, 16, 8)}
AGENTS = agents_of(BASE, 3)
SIDE = {"config.json": '{"model_type": "x"}', "tokenizer.json": "{}", "sub/more.txt": "more"}
SHARDS = {f"model-{i:05}-of-00002.safetensors": [name] for i, name in enumerate(BASE, start=1)}
ONE, TWO = "1" * 40, "abcdef0123" * 4


@dataclass(frozen=True)
class Cache:
    """A cache folder of the Hub, written by hand."""

    root: Path

    def repo(self, name: str) -> Path:
        return self.root / f"models--{name.replace('/', '--')}"

    def snapshot(self, name: str, commit: str = ONE) -> Path:
        return self.repo(name) / "snapshots" / commit

    def add(
        self, name: str, model: Model, commit: str = ONE, refs: Sequence[str] = ("main",), **how: object
    ) -> Path:
        """A snapshot of a model: every file a relative link to its blob, which is named by its content."""
        plain = folder(self.root / "plain" / name / commit, model, files=SIDE, **how)  # type: ignore[arg-type]
        for path in [path for path in plain.rglob("*") if path.is_file()]:
            content = path.read_bytes()
            blob = self.repo(name) / "blobs" / hashlib.sha256(content).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link = self.snapshot(name, commit) / path.relative_to(plain)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
        for ref in refs:
            (self.repo(name) / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
            (self.repo(name) / "refs" / ref).write_text(commit)
        return self.snapshot(name, commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The Hub's cache in a temporary folder; whoever reaches for the network fails the test."""
    from huggingface_hub import constants

    root = tmp_path / "home" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("reached for the network"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("reached for the network"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Cache(root)


@pytest.fixture
def offline(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The same where the user said that there is no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def values(checkpoint: Checkpoint) -> dict[str, bytes]:
    data = {file: (checkpoint.folder / file).read_bytes() for file in checkpoint.files}
    return {i.name: data[i.file][i.offset : i.offset + i.nbytes] for i in checkpoint.tensors.values()}


def bits(model: Model) -> dict[str, bytes]:
    return {name: t.data for name, t in model.items()}


@pytest.mark.parametrize("how", [{}, {"shards": SHARDS}], ids=["one file", "sharded"])
def test_a_complete_snapshot_opens_without_a_network(how: Mapping[str, object], cache: Cache) -> None:
    snapshot = cache.add("org/base", BASE, **how)
    checkpoint = Checkpoint.open("org/base")
    assert checkpoint.folder == snapshot.resolve()
    assert (checkpoint.label, checkpoint.config) == ("org/base", {"model_type": "x"})
    assert values(checkpoint) == bits(BASE)
    assert len(checkpoint.files) == len(how.get("shards", "1"))  # type: ignore[arg-type]


def test_a_snapshot_of_torch_files_opens_too(cache: Cache) -> None:
    torch = pytest.importorskip("torch")
    snapshot = cache.add("org/name", BASE)
    blob = (snapshot / hostile.NAME).resolve()
    torch.save({"w": torch.arange(6.0).bfloat16()}, blob)
    (snapshot / hostile.NAME).rename(snapshot / "pytorch_model.bin")
    (info,) = Checkpoint.open("org/name").tensors.values()
    assert (info.name, info.dtype, info.shape, info.file) == ("w", "BF16", (6,), "pytorch_model.bin")


def test_a_revision_is_a_branch_a_tag_a_pull_request_or_a_commit(cache: Cache) -> None:
    cache.add("org/name", AGENTS[0])
    cache.add("org/name", AGENTS[1], TWO, refs=("step-100", "v1.0", "refs/pr/7"))
    for revision in ("step-100", "v1.0", "refs/pr/7", TWO):
        assert values(Checkpoint.open(f"org/name@{revision}")) == bits(AGENTS[1])
    for source in ("org/name", "org/name@main", f"org/name@{ONE}"):
        assert values(Checkpoint.open(source)) == bits(AGENTS[0])


def test_two_revisions_of_one_model_are_two_agents(cache: Cache) -> None:
    cache.add("org/name", AGENTS[0])
    cache.add("org/name", AGENTS[1], TWO, refs=("v1.0",))
    labels = [checkpoint.label for checkpoint in open_all(["org/name@v1.0", "org/name", "org/name@main"])]
    assert labels == ["org/name@v1.0", "org/name", "org/name@main"]


@pytest.mark.parametrize("source", ["org/name", "org/name@v1.0", "name"])
def test_an_existing_path_of_the_same_spelling_is_a_path(source: str, cache: Cache) -> None:
    cache.add("org/name", AGENTS[0], refs=("main", "v1.0"))
    cache.add("name", AGENTS[0])
    path = folder(Path(source), AGENTS[1])
    assert Checkpoint.open(source).folder == path.resolve()
    assert values(Checkpoint.open(source)) == bits(AGENTS[1])


def test_an_existing_path_that_holds_nothing_is_not_looked_up(cache: Cache) -> None:
    cache.add("org/name", AGENTS[0])
    Path("org/name").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="org/name: no safetensors weights: holds nothing"):
        Checkpoint.open("org/name")


def test_snapshots_are_merged_counted_and_verified_like_folders(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.add("org/base", BASE, shards=SHARDS)
    for i, agent in enumerate(AGENTS[:2]):
        cache.add(f"org/agent-{i}", agent)
    cache.add("org/agent-1", AGENTS[2], TWO, refs=("late",))
    sources = ["org/base", "org/agent-0", "org/agent-1@late"]
    assert cli("merge", *sources, "-o", "out", "-q") == 0
    out = Path("out")
    assert read(out) == merged(BASE, [AGENTS[0], AGENTS[2]])
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert {name: (out / name).read_text() for name in SIDE} == SIDE
    assert cli("verify", "out", "--read-data", "-q") == 0
    card = (out / "README.md").read_text()
    assert all(source in card for source in sources)
    capsys.readouterr()
    assert cli("stats", *sources, "--json", "-q") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["base"], [agent["label"] for agent in said["agents"]]) == (sources[0], sources[1:])


def test_an_output_inside_or_around_a_snapshot_is_refused(
    cache: Cache, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache.add("org/base", BASE)
    cache.add("org/agent", AGENTS[0])
    for out in (snapshot / "out", cache.repo("org/agent") / "blobs", cache.repo("org/base")):
        assert cli("merge", "org/base", "org/agent", "-o", out, "-q", "--overwrite") == 3
        assert "overlap" in capsys.readouterr().err
    assert values(Checkpoint.open("org/base")) == bits(BASE)


# --- incomplete ---


def _dangling(snapshot: Path) -> None:
    (snapshot / hostile.NAME).resolve().unlink()


def _interrupted(snapshot: Path) -> None:
    blob = (snapshot / hostile.NAME).resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))


def _interrupted_before_the_link(snapshot: Path) -> None:
    _interrupted(snapshot)
    (snapshot / hostile.NAME).unlink()


def _first_shard(snapshot: Path) -> Path:
    return snapshot / next(iter(SHARDS))


NOWHERE = r"is a link to \S+, which does not exist; the download is incomplete, download it again"
WITHOUT_WEIGHTS = "no safetensors weights: holds config.json, sub, tokenizer.json"
"""By id the message also says that the download is incomplete; a folder may be anything."""
INCOMPLETE: dict[str, tuple[Mapping[str, object], Callable[[Path], object], str]] = {
    "dangling link": ({}, _dangling, f"model.safetensors: {NOWHERE}"),
    "interrupted": ({}, _interrupted, f"model.safetensors: {NOWHERE}"),
    "interrupted before the link": ({}, _interrupted_before_the_link, WITHOUT_WEIGHTS),
    "shard without a link": (
        {"shards": SHARDS},
        lambda snapshot: _first_shard(snapshot).unlink(),
        "model-00001-of-00002.safetensors: is missing, model.safetensors.index.json lists it; download it again",
    ),
    "shard with a dangling link": (
        {"shards": SHARDS},
        lambda snapshot: _first_shard(snapshot).resolve().unlink(),
        f"model-00001-of-00002.safetensors: {NOWHERE}",
    ),
    "only side files": (
        {"shards": SHARDS},
        lambda snapshot: [path.unlink() for path in snapshot.glob("*.safetensors*")],
        WITHOUT_WEIGHTS,
    ),
}


@pytest.mark.parametrize("by_id", [True, False], ids=["by id", "by folder"])
@pytest.mark.parametrize(("how", "damage", "fault"), INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_an_incomplete_download_is_an_error_that_says_so(
    how: Mapping[str, object], damage: Callable[[Path], object], fault: str, by_id: bool, offline: Cache
) -> None:
    snapshot = offline.add("org/name", BASE, **how)
    damage(snapshot)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open("org/name" if by_id else snapshot)
    (line,) = str(caught.value).splitlines()
    assert re.match(rf"{'org/name' if by_id else ONE}[/:]", line)
    assert re.search(fault, line)


def test_a_listing_that_names_files_the_snapshot_lacks_is_an_error_that_names_them(offline: Cache) -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    if not hasattr(errors, "IncompleteSnapshotError"):
        pytest.skip("this huggingface_hub keeps no listings")
    offline.add("org/name", BASE)
    files = {name: {"size": 1, "blob_id": "0"} for name in (hostile.NAME, "vocab.json", "pytorch_model.h5")}
    listing = offline.repo("org/name") / "trees" / f"{ONE}.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"format_version": 1, "files": files}))
    with pytest.raises(CheckpointError, match=r"is incomplete: 1 file\(s\) are missing \(vocab.json\)"):
        Checkpoint.open("org/name")


def test_all_ids_that_cannot_be_had_are_one_error(offline: Cache) -> None:
    offline.add("org/one", BASE)
    _dangling(offline.add("org/two", BASE))
    sources = ["org/one", "org/two", "org/three", "org/one@nowhere", f"org/one@{TWO}", "org/one@1111111"]
    with pytest.raises(CheckpointError) as caught:
        open_all(sources)
    faults = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert faults == ["org/two/model.safetensors", *sources[2:]]


# --- as a user has it ---


@pytest.mark.parametrize(
    "variables", [{"HF_HOME": "home"}, {"HF_HUB_CACHE": "home/hub"}], ids=lambda v: next(iter(v))
)
def test_the_variables_of_the_hub_say_where_the_cache_is(variables: dict[str, str], tmp_path: Path) -> None:
    cache = Cache(tmp_path / "home" / "hub")
    cache.add("org/base", BASE)
    cache.add("org/agent", AGENTS[0])
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    places = {key: str(tmp_path / value) for key, value in variables.items()}

    def ramstream(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ramstream", *words],
            cwd=tmp_path,
            env={**inherited, **places, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    done = ramstream("stats", "org/base", "org/agent", "-q", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["base"] == "org/base"
    failed = ramstream("stats", "org/base", "org/gone", "-q")
    assert failed.returncode == 5
    assert failed.stderr.startswith("error: org/gone: no such file or folder; as a Hub id: not complete")
    assert "Traceback" not in failed.stderr
