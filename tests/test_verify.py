"""`verify`: what each of its depths finds, and what it says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import cli, family, plan_of, run, write_family

from ramstream.errors import PlanError
from ramstream.types import Dtype
from ramstream.verify import verify_output

SHAPES = {
    "a": ("BF16", (4099, 1031)),
    "b": ("F32", (33, 5)),
    "ids": ("I64", (600,)),
    "c": ("BF16", (700, 11)),
}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DATA = 4096


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    paths = write_family(root, *family(SHAPES, agents=2), shards=2)
    (paths[0] / "deep").mkdir()
    (paths[0] / "deep" / "side.json").write_text("{}")
    run(plan_of(paths), root / "out")
    return root / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def problems(out: Path, read_data: bool = False) -> list[str]:
    report = verify_output(out, read_data)
    assert report.as_dict()["ok"] == (not report.problems)
    return report.problems


def test_an_untouched_output_is_whole(out: Path) -> None:
    seen: list[int] = []
    report = verify_output(out, read_data=True, progress=seen.append)
    assert report.problems == []
    nbytes = 2 * 4099 * 1031 + 4 * 33 * 5 + 8 * 600 + 2 * 700 * 11
    assert report.bytes_read == sum(seen) == nbytes
    assert report.files == 2 + 4  # weights; config, tokenizer, side, index
    assert verify_output(out).bytes_read == 0
    assert cli("verify", out) == cli("verify", out, "--read-data") == 0


@pytest.mark.parametrize(
    ("file", "place", "named"),
    [
        (ONE, DATA, ONE),
        (ONE, DATA + 2 * 4099 * 1031 - 1, ONE),  # the second grain, which goes on in the other file
        (TWO, DATA, TWO),
        (TWO, -1, TWO),
    ],
)
def test_a_flipped_byte_is_found_by_reading_only(out: Path, file: str, place: int, named: str) -> None:
    size = (out / file).stat().st_size
    flip(out / file, place % size)
    assert problems(out) == []
    assert cli("verify", out) == 0
    (problem,) = problems(out, read_data=True)
    spans = dict(part.split(", bytes ") for part in problem.split(": ")[0].split(" and "))
    begin, end = map(int, spans[named].split(" to "))
    assert begin <= place % size <= end
    assert cli("verify", out, "--read-data") == 7


def test_every_byte_of_the_weights_is_looked_at(out: Path) -> None:
    for file in (ONE, TWO):
        size = (out / file).stat().st_size
        for place in [*range(DATA, size, size // 7), size - 1]:
            flip(out / file, place)
            assert len(problems(out, read_data=True)) == 1, (file, place)
            flip(out / file, place)
    assert problems(out, read_data=True) == []


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda out: (out / TWO).unlink(), f"{TWO} is missing"),
    (lambda out: flip(out / ONE, 30), f"{ONE}: its header is not the one that was written"),
    (lambda out: flip(out / ONE, 7), f"{ONE}: its header is not the one that was written"),
    (lambda out: os.truncate(out / TWO, 9000), f"{TWO} has 9000 bytes, it was written with "),
    (lambda out: os.truncate(out / TWO, 5), f"{TWO} has 5 bytes, it was written with "),
    (lambda out: (out / "config.json").write_text("{}"), "config.json changed: its sha256 is not "),
    (lambda out: (out / "tokenizer.json").write_text(""), "tokenizer.json changed: its sha256 is not "),
    (lambda out: (out / "deep" / "side.json").unlink(), "deep/side.json is missing"),
    (lambda out: (out / "model.safetensors.index.json").unlink(), "model.safetensors.index.json is missing"),
    (
        lambda out: (out / "deep" / "x.safetensors").touch(),
        "deep/x.safetensors does not belong to this merge",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), SPOILED)
def test_the_structure_shows_it(
    out: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], said: str
) -> None:
    spoil(out)
    assert problems(out)[0].startswith(said)
    assert any(problem.startswith(said) for problem in problems(out, read_data=True))
    assert cli("verify", out, "--json") == 7
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["ok"] is False
    assert report["problems"][0].startswith(said)
    assert "is not what was written; restore it from a copy" in printed.err


def test_a_missing_file_does_not_hide_a_flipped_byte_in_another(out: Path) -> None:
    (out / TWO).unlink()
    flip(out / ONE, DATA + 9)
    found = problems(out, read_data=True)
    assert found[0] == f"{TWO} is missing"
    assert any(p.startswith(f"{ONE}, bytes {DATA} to ") and "differs" in p for p in found)


def test_side_files_added_by_hand_are_nobodys_business(out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    assert problems(out, read_data=True) == []


def test_what_is_no_output_is_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"is no output of ramstream: it has no ramstream\.json"):
        verify_output(tmp_path)
    assert cli("verify", tmp_path / "nothing") == 3
    record = json.loads((out / "ramstream.json").read_bytes())
    (out / "ramstream.json").write_text(json.dumps({**record, "format": "ramstream merge 9"}))
    with pytest.raises(PlanError, match="has format 'ramstream merge 9', this version reads"):
        verify_output(out)
    (out / "ramstream.json").write_text("{")
    with pytest.raises(PlanError, match=r"ramstream\.json cannot be read"):
        verify_output(out)
    (out / "ramstream.json").write_text("[]")
    with pytest.raises(PlanError, match=r"ramstream\.json cannot be read"):
        verify_output(out)


@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.F64, Dtype.F8_E5M2])
def test_converted_outputs_are_verified_too(tmp_path: Path, dtype: Dtype) -> None:
    paths = write_family(tmp_path, *family({**SHAPES, "a": ("BF16", (70, 31))}, agents=1))
    run(plan_of(paths, dtype=dtype), tmp_path / "out")
    assert problems(tmp_path / "out", read_data=True) == []
    flip(tmp_path / "out" / "model.safetensors", DATA + 70 * 31 * dtype.itemsize + 5)
    assert len(problems(tmp_path / "out", read_data=True)) == 1
