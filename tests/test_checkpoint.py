"""Opening checkpoints: what people have opens the same; every fault is one readable error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hostile
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from ramstream.checkpoint import Checkpoint, open_all
from ramstream.checkpoint import hub as hub_module
from ramstream.errors import CheckpointError, IntegrityError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "agent-b"
    path.mkdir()
    return path


def bytes_of(checkpoint: Checkpoint, name: str) -> bytes:
    info = checkpoint.tensors[name]
    return (checkpoint.folder / info.file).read_bytes()[info.offset : info.offset + info.nbytes]


def contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: bytes_of(checkpoint, name) for name in checkpoint.tensors}


# --- what opens ---


def test_folder_and_file_and_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    arrays = {name: np.arange(6, dtype=np.float32).reshape(2, 3) + i for i, name in enumerate("abcd")}
    for form in ("one", "sharded"):
        (tmp_path / form).mkdir()
    save_file(arrays, tmp_path / "one" / "weights.safetensors")
    parts = {"part-b.safetensors": "ab", "part-a.safetensors": "dc"}
    for file, names in parts.items():
        save_file({name: arrays[name] for name in names}, tmp_path / "sharded" / file)
    hostile.index(tmp_path / "sharded", {name: file for file, names in parts.items() for name in names})

    one, file, sharded = open_all(
        [tmp_path / "one", tmp_path / "one/weights.safetensors", tmp_path / "sharded"]
    )

    assert contents(one) == contents(file) == contents(sharded)
    assert one.tensors["c"].shape == (2, 3)
    assert one.tensors["c"].dtype == "F32"
    assert [one.single_file, file.single_file] == [False, True]
    assert list(sharded.files) == ["part-a.safetensors", "part-b.safetensors"]
    assert [info.file for info in sharded.tensors.values()] == ["part-a.safetensors"] * 2 + [
        "part-b.safetensors"
    ] * 2


def test_tensors_come_in_file_order_not_header_order(folder: Path) -> None:
    header = {"z": hostile.entry("U8", [2], [4, 6]), "a": hostile.entry("U8", [4], [0, 4])}
    hostile.weight_file(folder / "model.safetensors", header, b"aaaazz")
    assert list(Checkpoint.open(folder).tensors) == ["a", "z"]


def test_expected_header_fields_written_out(folder: Path) -> None:
    hostile.weight_file(
        folder / "x.safetensors", {"w": hostile.entry("BF16", [2, 1], [0, 4])}, b"abcd", pad=9
    )
    (folder / "config.json").write_text('{"model_type": "new", "inf": Infinity}')
    checkpoint = Checkpoint.open(folder)
    info = checkpoint.tensors["w"]
    header = 8 + 9 + len('{"w": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}')
    assert (info.name, info.dtype, info.shape, info.file) == ("w", "BF16", (2, 1), "x.safetensors")
    assert (info.offset, info.nbytes) == (header, 4)
    assert checkpoint.files["x.safetensors"].data_start == header
    assert checkpoint.files["x.safetensors"].size == header + 4
    assert checkpoint.config is not None
    assert checkpoint.config["model_type"] == "new"
    assert checkpoint.folder == folder.resolve()
    assert checkpoint.paths == (folder.resolve() / "x.safetensors",)


def test_scalars_empty_tensors_and_unknown_dtypes_open(folder: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "empty": hostile.entry("F32", [0, 1 << 50, 1 << 50], [0, 0]),
        "scalar": hostile.entry("F32", [], [0, 4]),
        "between": hostile.entry("BF16", [3, 0], [4, 4]),
        "new": hostile.entry("F3_NEW", [8], [4, 7]),
        "last": hostile.entry("BOOL", [0], [7, 7]),
    }
    hostile.weight_file(folder / "model.safetensors", header, b"1234567")
    tensors = Checkpoint.open(folder).tensors
    assert list(tensors) == ["empty", "scalar", "between", "new", "last"]
    assert tensors["scalar"].elements == 1
    assert tensors["empty"].elements == 0
    assert tensors["new"].nbytes == 3


def test_only_empty_tensors_open(folder: Path) -> None:
    hostile.weight_file(folder / "model.safetensors", {"e": hostile.entry("F32", [0], [0, 0])})
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensors["e"].nbytes == 0
    assert len(checkpoint.fingerprint()) == 64


def test_index_decides_over_other_files(folder: Path) -> None:
    hostile.shards(folder, {"a.safetensors": {"x": b"1"}, "sub/b.safetensors": {"y": b"22"}})
    (folder / "consolidated.safetensors").write_bytes(b"whatever")
    (folder / "._a.safetensors").write_bytes(b"macOS")
    assert contents(Checkpoint.open(folder)) == {"x": b"1", "y": b"22"}


def test_index_of_another_name_is_used(folder: Path) -> None:
    hostile.good(folder / "unet.safetensors", {"x": b"1"})
    hostile.index(folder, {"x": "unet.safetensors"}, "unet.safetensors.index.json")
    assert list(Checkpoint.open(folder).files) == ["unet.safetensors"]


def test_model_index_wins_over_another_index(folder: Path) -> None:
    hostile.shards(folder, {"a.safetensors": {"x": b"1"}})
    hostile.index(folder, {"x": "gone.safetensors"}, "other.safetensors.index.json")
    assert list(Checkpoint.open(folder).files) == ["a.safetensors"]


def test_hidden_files_are_no_weights(folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    (folder / "._model.safetensors").write_bytes(b"macOS")
    assert list(Checkpoint.open(folder).files) == ["model.safetensors"]


def test_single_file_has_no_side_files(folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    hostile.good(folder / "other.safetensors")
    (folder / "config.json").write_text("{}")
    checkpoint = Checkpoint.open(folder / "model.safetensors")
    assert checkpoint.config is None
    assert checkpoint.folder == folder.resolve()
    assert list(checkpoint.files) == ["model.safetensors"]


def test_file_link_keeps_its_own_name_and_folder(tmp_path: Path, folder: Path) -> None:
    hostile.good(tmp_path / "0123abcd")
    (folder / "model.safetensors").symlink_to("../0123abcd")
    file, whole = open_all([folder / "model.safetensors", folder])
    assert file.folder == whole.folder == folder.resolve()
    assert list(file.files) == list(whole.files) == ["model.safetensors"]


def test_folder_link_is_resolved(tmp_path: Path, folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert Checkpoint.open(tmp_path / "link").folder == folder.resolve()


def test_float8_without_scales_opens(folder: Path) -> None:
    hostile.good(folder / "model.safetensors", {"a.weight": b"12", "a.bias": b"3"}, dtype="F8_E4M3")
    assert Checkpoint.open(folder).tensors["a.weight"].dtype == "F8_E4M3"


def test_lora_layers_inside_a_full_model_open(folder: Path) -> None:
    hostile.good(folder / "model.safetensors", {"a.base_layer.weight": b"12", "a.lora_A.speech.weight": b"3"})
    assert len(Checkpoint.open(folder).tensors) == 2


# --- labels ---


def test_labels_are_as_typed(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile.good(folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    typed = ["agent-b/", "./agent-b", str(folder), "agent-b/model.safetensors"]
    assert [Checkpoint.open(t).label for t in typed] == [
        "agent-b",
        "./agent-b",
        "agent-b",
        "agent-b/model.safetensors",
    ]
    monkeypatch.chdir(folder)
    assert Checkpoint.open(".").label == "agent-b"


def test_two_folders_of_one_name_get_distinct_labels(tmp_path: Path) -> None:
    for run in "ab":
        (tmp_path / run / "checkpoint-100").mkdir(parents=True)
        hostile.good(tmp_path / run / "checkpoint-100" / "model.safetensors")
    sources = [tmp_path / "a" / "checkpoint-100", tmp_path / "b" / "checkpoint-100"]
    assert [c.label for c in open_all(sources)] == [str(s) for s in sources]


# --- faults ---


@pytest.mark.parametrize(("make", "message"), hostile.FILES.values(), ids=hostile.FILES.keys())
def test_faulty_file_is_refused(make, message, folder: Path) -> None:
    make(folder)
    for source, label in (
        (folder, "agent-b/model.safetensors: "),
        (folder / "model.safetensors", "model.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint.open(source)
        assert str(caught.value).startswith(label)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(("make", "message"), hostile.FOLDERS.values(), ids=hostile.FOLDERS.keys())
def test_faulty_folder_is_refused(make, message, folder: Path) -> None:
    make(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder)
    assert all(line.startswith("agent-b") for line in str(caught.value).splitlines())


def test_all_problems_of_all_checkpoints_are_listed_together(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    hostile.FILES["truncated data"][0](tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("no")
    hostile.good(tmp_path / "b" / "model.safetensors")
    hostile.FOLDERS["missing shards"][0](tmp_path / "c")
    with pytest.raises(CheckpointError) as caught:
        open_all([tmp_path / name for name in ("a", "b", "c", "gone")])
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "a/config.json",
        "a/model.safetensors",
        "c/b.safetensors",
        "c/c.safetensors",
        str(tmp_path / "gone"),
    ]


def test_every_faulty_shard_is_listed(folder: Path) -> None:
    hostile.shards(
        folder, {"a.safetensors": {"x": b"12"}, "b.safetensors": {"y": b"34"}, "c.safetensors": {"z": b"5"}}
    )
    for name in ("a", "c"):
        with (folder / f"{name}.safetensors").open("ab") as stream:
            stream.truncate(stream.tell() - 1)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert str(caught.value).splitlines() == [
        "agent-b/a.safetensors: header says 2 bytes of data, the file has 1; it is truncated; download it again",
        "agent-b/c.safetensors: header says 1 bytes of data, the file has 0; it is truncated; download it again",
    ]


def test_missing_and_faulty_shards_are_listed_together(folder: Path) -> None:
    hostile.shards(
        folder, {"a.safetensors": {"x": b"1"}, "b.safetensors": {"y": b"2"}, "c.safetensors": {"z": b"3"}}
    )
    (folder / "a.safetensors").unlink()
    (folder / "b.safetensors").write_bytes(hostile.LFS)
    hostile.good(folder / "c.safetensors", {"other": b"3"})
    (folder / "config.json").write_text("")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    faults = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    shards = ["a", "b", "c", "c"]
    assert faults == ["agent-b/config.json", *(f"agent-b/{shard}.safetensors" for shard in shards)]


def test_every_faulty_tensor_is_listed_up_to_twenty(folder: Path) -> None:
    header = {f"w{i}": hostile.entry("F32", [3], [0, 8]) for i in range(100)}
    hostile.weight_file(folder / "model.safetensors", header, b"12345678")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "agent-b/model.safetensors: has 80 more problems"


def test_names_with_control_characters_are_escaped(folder: Path) -> None:
    header = {"w\n\x1b[2J": hostile.entry("F32", [3], [0, 8]), "x" * 100_000: 3}
    hostile.weight_file(folder / "model.safetensors", header, b"12345678")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("what", ["model.safetensors", "config.json", "."])
def test_unreadable_is_an_error(what: str, folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / what).chmod(0)
    try:
        with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
            Checkpoint.open(folder)
    finally:
        (folder / what).chmod(0o700)


def test_permission_and_disk_errors_become_checkpoint_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile.good(folder / "model.safetensors")

    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(
        CheckpointError, match=r"agent-b/model.safetensors: cannot be read: Permission denied"
    ):
        Checkpoint.open(folder)
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(CheckpointError, match=r"agent-b: the folder cannot be read: Permission denied"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "source",
    [
        "./gone",
        "/gone",
        "x/y/z",
        "gone.safetensors",
        "gone/",
        "",
        "a b",
        "-x",
        Path("org/name"),
        "org/model.bin",
    ],
)
def test_path_that_does_not_exist(
    source: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_module, "fetch", lambda *_: pytest.fail("asked the Hub"))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        Checkpoint.open(source)


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "x" * 300 + "/y"])
def test_impossible_path(source: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint.open(source)


def test_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="agent: is a link to nowhere, which does not exist"):
        Checkpoint.open(tmp_path / "agent")


# --- fuzz ---

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
sizes = st.lists(st.integers(0, 6), max_size=3)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "ODD"]) | json_values,
        "shape": sizes | json_values,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=5), entries | json_values, max_size=3)
quick = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opens_or_is_refused(path: Path) -> None:
    checkpoint, problem = None, ""
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        problem = str(error)
    if checkpoint is None:
        assert problem.startswith(path.name)
        return
    position = checkpoint.files[path.name].data_start
    for info in checkpoint.tensors.values():
        assert info.offset == position
        position += info.nbytes
    assert position == path.stat().st_size


@quick
@given(header=headers, data=st.binary(max_size=24))
def test_any_json_header_opens_or_is_refused(header, data, folder: Path) -> None:
    text = json.dumps(header).encode()
    opens_or_is_refused(hostile.weight_file(folder / "model.safetensors", text, data))


@quick
@given(data=st.binary(max_size=80), length=st.none() | st.integers(0, 90))
def test_any_bytes_are_refused_or_open(data, length, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data if length is None else length.to_bytes(8, "little") + b"{" + data)
    opens_or_is_refused(path)


@quick
@given(position=st.integers(0, 100), byte=st.integers(0, 255))
def test_one_changed_byte_opens_or_is_refused(position, byte, folder: Path) -> None:
    path = hostile.good(folder / "model.safetensors", {"a": b"123", "b": b"45"})
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content)
    opens_or_is_refused(path)


@quick
@given(header=headers)
def test_any_index_opens_or_is_refused(header, folder: Path) -> None:
    hostile.index(folder, header)
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


# --- identity ---


def large(path: Path, seed: int = 0) -> Path:
    data = np.random.default_rng(seed).bytes(1 << 20)
    return hostile.good(path, {"w": data})


def test_fingerprint_is_of_content_not_path(tmp_path: Path) -> None:
    prints = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        large(tmp_path / name / f"{name}.safetensors")
        prints.append(Checkpoint.open(tmp_path / name).fingerprint())
    prints.append(Checkpoint.open(tmp_path / "a" / "a.safetensors").fingerprint())
    assert len(set(prints)) == 1
    assert re.fullmatch("[0-9a-f]{64}", prints[0])


def test_fine_tunes_with_equal_headers_have_distinct_fingerprints(tmp_path: Path) -> None:
    prints = set()
    for seed in range(3):
        prints.add(Checkpoint.open(large(tmp_path / f"{seed}.safetensors", seed)).fingerprint())
    assert len(prints) == 3


@pytest.mark.parametrize("position", [-1, -4096, 4095, 0])
def test_fingerprint_sees_first_and_last_block(position: int, tmp_path: Path) -> None:
    path = large(tmp_path / "w.safetensors")
    before = Checkpoint.open(path).fingerprint()
    content = bytearray(path.read_bytes())
    content[position] ^= 1 if position != 0 else 0
    path.write_bytes(content)
    assert (Checkpoint.open(path).fingerprint() == before) == (position == 0)


def test_fingerprint_sees_every_byte_of_a_small_file(tmp_path: Path) -> None:
    path = hostile.good(tmp_path / "w.safetensors", {"w": bytes(200_000)})
    before = Checkpoint.open(path).fingerprint()
    content = bytearray(path.read_bytes())
    content[101_234] ^= 1
    path.write_bytes(content)
    assert Checkpoint.open(path).fingerprint() != before


def test_fingerprint_is_computed_once(tmp_path: Path) -> None:
    path = large(tmp_path / "w.safetensors")
    checkpoint = Checkpoint.open(path)
    first = checkpoint.fingerprint()
    path.unlink()
    assert checkpoint.fingerprint() == first


def test_fingerprint_of_a_shrunk_file_is_an_integrity_error(tmp_path: Path) -> None:
    path = large(tmp_path / "w.safetensors")
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 500_000)
    with pytest.raises(IntegrityError, match=r"w.safetensors: had 1,048,\d+ bytes when it was opened"):
        checkpoint.fingerprint()


# --- the Hub ---


class FakeHub:
    """Stands in for `snapshot_download`: what the cache has, what a download gives."""

    def __init__(self, cached: Path | None = None, remote: Path | Exception | None = None) -> None:
        self.cached, self.remote, self.calls = cached, remote, []

    def __call__(
        self, repo: str, *, revision: str | None, ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        self.calls.append((repo, revision, "cache" if local_files_only else "download"))
        assert "*.gguf" in ignore_patterns
        found = self.cached if local_files_only else self.remote
        if isinstance(found, Path):
            return str(found)
        raise found or FileNotFoundError("no snapshot of it\nmore text")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)

    def install(**kwargs: Path | Exception | None) -> FakeHub:
        fake = FakeHub(**kwargs)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    return install


@pytest.mark.parametrize(
    ("source", "repo", "revision"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("gpt2", "gpt2", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/1", "org/name", "refs/pr/1"),
    ],
)
def test_hub_id_in_the_cache_is_not_downloaded(
    source: str, repo: str, revision: str | None, hub, folder: Path
) -> None:
    hostile.good(folder / "model.safetensors")
    fake = hub(cached=folder)
    checkpoint = Checkpoint.open(source)
    assert checkpoint.label == source
    assert checkpoint.folder == folder.resolve()
    assert fake.calls == [(repo, revision, "cache")]


def test_hub_id_not_in_the_cache_is_downloaded(hub, folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    fake = hub(remote=folder)
    assert list(Checkpoint.open("org/name").tensors) == ["w"]
    assert [call[2] for call in fake.calls] == ["cache", "download"]


@pytest.mark.parametrize("fault", ["only a config", "missing shards", "dangling shard"])
def test_incomplete_snapshot_is_downloaded(fault: str, hub, folder: Path, tmp_path: Path) -> None:
    hostile.FOLDERS[fault][0](folder)
    (tmp_path / "whole").mkdir()
    hostile.good(tmp_path / "whole" / "model.safetensors")
    hub(cached=folder, remote=tmp_path / "whole")
    assert Checkpoint.open("org/name").folder == (tmp_path / "whole").resolve()


@pytest.mark.parametrize(
    ("also", "kept"),
    [
        ({}, {"pytorch_model.bin", "config.json"}),
        ({"model.safetensors": b"x"}, {"model.safetensors", "config.json"}),
    ],
    ids=["only .bin", "safetensors too"],
)
def test_bin_weights_are_downloaded_where_there_are_no_others(
    also: dict[str, bytes], kept: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    files = {
        "config.json": b"{}",
        "pytorch_model.bin": b"PK",
        "optimizer.bin": b"..",
        "a.gguf": b"GGUF",
    } | also

    def download(repo: str, *, revision: object, ignore_patterns: list[str], local_files_only: bool) -> str:
        if local_files_only:
            raise FileNotFoundError("no snapshot of it")
        for name in huggingface_hub.utils.filter_repo_objects(files, ignore_patterns=ignore_patterns):
            (folder / name).write_bytes(files[name])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(CheckpointError):  # the weights are fakes; what counts is which of them came
        Checkpoint.open("org/name")
    assert {path.name for path in folder.iterdir()} == kept


def test_failed_download_says_what_was_tried(hub) -> None:
    hub(remote=ConnectionError("no route to host"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open("org/name@v2")
    assert str(caught.value) == (
        "org/name@v2: no such file or folder; as a Hub id: not complete in the local cache (no snapshot of it), "
        "and the download failed: no route to host"
    )


def test_what_a_server_replies_is_shown_without_control_characters(hub) -> None:
    hub(remote=ConnectionError("\x1b[2J no route"))
    with pytest.raises(CheckpointError, match=r"the download failed: '\\x1b\[2J no route'"):
        Checkpoint.open("org/name")


def test_existing_path_is_never_a_hub_id(hub, folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    fake = hub()
    assert Checkpoint.open("agent-b").folder == folder.resolve()
    assert fake.calls == []


def test_real_cache_layout_opens_through_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    store = tmp_path / "hub" / "models--org--name"
    snapshot = store / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (store / "blobs").mkdir()
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("a" * 40)
    hostile.good(store / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").write_text('{"model_type": "x"}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint.open("org/name")
    assert checkpoint.folder == snapshot.resolve()
    assert list(checkpoint.files) == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="org/other: no such file or folder; as a Hub id: not complete"):
        Checkpoint.open("org/other")


def test_opening_loads_no_heavy_module(folder: Path) -> None:
    hostile.good(folder / "model.safetensors")
    code = (
        "import sys; from ramstream.checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]).fingerprint();"
        "print([m for m in ('torch', 'numba', 'numpy', 'safetensors', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
