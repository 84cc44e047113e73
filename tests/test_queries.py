"""What a store or an output answers alone equals a recount from the checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ramstream import Limits, cli, count, merge, queries
from ramstream.checkpoint import Checkpoint
from ramstream.errors import JournalError, PlanError
from ramstream.methods.ram_plus import RamPlus
from ramstream.overlap import OverlapStore
from ramstream.plan import MatchOptions
from ramstream.planning import plan_counts, plan_merge
from ramstream.statistics import statistics
from ramstream.types import GRAIN

LIMITS = Limits(workers=2)
SHAPES = {
    "embed.weight": (700, 3),
    "layers.0.mlp.weight": (65,),
    "layers.1.attn.weight": (5000,),
    "norm": (1,),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """A base and four agents whose changes overlap in every way."""
    random = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("model")
    base = {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    paths = [folder / name for name in ("base", "one", "two", "three", "four")]
    for k, path in enumerate(paths):
        path.mkdir()
        moved = {
            name: value + (random.random(value.shape) < 0.2 * k) * random.standard_normal(value.shape)
            for name, value in base.items()
        }
        saved = {name: value.astype(np.float32) for name, value in (moved if k else base).items()}
        safetensors.numpy.save_file(saved, path / "model.safetensors")
    return [Checkpoint.open(path) for path in paths]


@pytest.fixture(scope="module")
def store(model: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "overlap.zarr"
    count(plan_counts(model[0], model[1:]), LIMITS, path)
    return path


@pytest.fixture(scope="module")
def out(model: list[Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("out") / "merged"
    merge(plan_merge(model[0], model[1:], RamPlus()), path, LIMITS)
    return path


def numbers(stats: dict[str, Any]) -> dict[str, Any]:
    return {key: stats[key] for key in ("elements", "counts", "lambda")} | {
        "agents": [{k: v for k, v in agent.items() if k != "steps"} for agent in stats["agents"]]
    }


@pytest.mark.parametrize("chosen", [[0, 2], [3, 1], [2], [0, 1, 2, 3], [3, 2, 0]])
def test_some_of_the_agents_recounted_from_bits_equal_a_count_of_their_checkpoints(
    model: list[Checkpoint], store: Path, chosen: list[int]
) -> None:
    selection = ",".join(str(t + 1) for t in chosen)
    method = RamPlus(r=0.3, alpha=0.7)
    asked = queries.stats_of(store, method, "tensor", selection)
    plan = plan_counts(model[0], [model[1 + t] for t in chosen])
    path = store.parent / f"some-{selection}.zarr"
    count(plan, LIMITS, path)
    counted = queries.stats_of(path, method, "tensor")
    assert numbers(asked) == numbers(counted)
    assert asked["groups"] == counted["groups"]


@pytest.mark.parametrize(
    "method", [RamPlus(), RamPlus(r=1.0, alpha=0.5), RamPlus(ratio="changed", scope="tensor")]
)
def test_store_output_and_checkpoints_give_the_same_statistics(
    model: list[Checkpoint], store: Path, out: Path, method: RamPlus
) -> None:
    described, tallies = count(plan_counts(model[0], model[1:]), LIMITS)
    fresh = statistics(described, tallies, method, "layer")
    assert queries.stats_of(store, method, "layer") == fresh
    of_output = queries.stats_of(out, method, "layer")
    norms = of_output.pop("norms", None)
    assert of_output == fresh
    assert (norms is not None) == (method == RamPlus()), "known for the method it was merged by"


def test_an_output_without_its_store_answers_from_its_record(out: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    assert queries.stats_of(alone, RamPlus()) == queries.stats_of(out, RamPlus())
    with pytest.raises(PlanError, match="needs the overlap bits; name a store with --store"):
        queries.stats_of(alone, RamPlus(), None, "1,2")
    assert numbers(queries.stats_of(out, RamPlus(), None, "1,2"))["elements"] == 7166


def test_an_output_answers_from_a_store_elsewhere_if_it_fits(
    model: list[Checkpoint], store: Path, out: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    asked = queries.stats_of(alone, RamPlus(), None, "1,2", store)
    assert asked == queries.stats_of(store, RamPlus(), None, "1,2")
    other = tmp_path / "other.zarr"
    count(plan_counts(model[0], model[1:3]), LIMITS, other)
    with pytest.raises(PlanError, match=r"holds the counts \w+, .* was merged from \w+"):
        queries.stats_of(alone, RamPlus(), None, "1,2", other)
    with pytest.raises(PlanError, match="is a store itself"):
        queries.stats_of(store, RamPlus(), None, None, other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["STORE", "--exclude", "norm"], "answers for what it was counted with"),
        (["BASE", "AGENT", "--agents", "1"], "--agents needs the overlap bits"),
        (["BASE", "AGENT", "--agents", "2", "--store", "NEW"], "--agents '2': use numbers 1 to 1"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_before_anything_is_counted(
    words: list[str], message: str, model: list[Checkpoint], store: Path, tmp_path: Path
) -> None:
    places = {"STORE": store, "BASE": model[0].folder, "AGENT": model[1].folder, "NEW": tmp_path / "new.zarr"}
    with pytest.raises(PlanError, match=message):
        cli.cli(["stats", *(str(places.get(word, word)) for word in words)], standalone_mode=False)
    assert not (tmp_path / "new.zarr").exists()


def test_the_bits_say_exactly_who_changed_each_element(model: list[Checkpoint], store: Path) -> None:
    opened = OverlapStore(store)
    unpacked = np.unpackbits(np.asarray(opened.bits[...]), axis=1, bitorder="little").astype(bool)
    values = [safetensors.numpy.load_file(checkpoint.folder / "model.safetensors") for checkpoint in model]
    for name, start, size in zip(
        opened.described.names, opened.flat.starts, opened.flat.lengths, strict=True
    ):
        base = values[0][name].ravel()
        for t, agent in enumerate(values[1:]):
            changed = np.abs(agent[name].ravel() - base) > np.float32(1e-5)
            assert (unpacked[t, start : start + size] == changed).all()


def test_another_epsilon_needs_another_count(store: Path) -> None:
    with pytest.raises(PlanError, match=r"counted with epsilon 1e-05, not 0\.1"):
        queries.stats_of(store, RamPlus(epsilon=0.1))


def test_a_store_of_something_else_is_refused_with_field_and_both_values(
    model: list[Checkpoint], store: Path
) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    with pytest.raises(PlanError, match=r"epsilon is 0\.5 here and 1e-05 there"):
        count(plan_counts(model[0], model[1:], 0.5), LIMITS, store)
    with pytest.raises(PlanError, match="exclude"):
        count(plan_counts(model[0], model[1:], options=MatchOptions(exclude=("norm",))), LIMITS, store)
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_an_unfinished_store_answers_nothing(model: list[Checkpoint], tmp_path: Path) -> None:
    OverlapStore.create(tmp_path / "new.zarr", plan_counts(model[0], model[1:]), bits=True)
    with pytest.raises(JournalError, match="unfinished"):
        queries.stats_of(tmp_path / "new.zarr", RamPlus())


@pytest.mark.parametrize("target", ["nothing-here", "."])
def test_what_is_neither_store_nor_output_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no such folder|no output of ramstream"):
        queries.stats_of(tmp_path / target, RamPlus())


@pytest.mark.parametrize("text", ["0", "5", "1,1", "one,1", "x", "", "1.5"])
def test_a_selection_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--agents"):
        queries.parse_agents(text, ("one", "two", "three", "four"))


def test_agents_are_selected_by_number_or_label() -> None:
    assert queries.parse_agents("3,one", ("one", "two", "three")) == [2, 0]


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_recounting_bytes_equals_counting_bit_by_bit(agents: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    planes = random.integers(0, 256, (agents, 40), np.uint8)
    begins = [0, 8, 9, 33]
    bits = np.unpackbits(planes, axis=1)
    counts = bits.sum(axis=0)
    for i, (first, last) in enumerate(zip(begins, [*begins[1:], 40], strict=True)):
        part = slice(8 * first, 8 * last)
        expected = [
            [int((bits[t, part] & (counts[part] == k + 1)).sum()) for k in range(agents)]
            for t in range(agents)
        ]
        assert queries._overlap(planes, begins)[i].tolist() == expected


def test_stats_prints_one_json_object(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.cli(["stats", str(store), "--json", "--by", "kind", "-p", "r=0.2"], standalone_mode=False)
    stats = json.loads(capsys.readouterr().out)
    assert stats["method"]["r"] == 0.2
    assert {group["group"] for group in stats["groups"]} == {"embedding", "mlp", "attention", "norm"}


def test_stats_tables_name_every_agent(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.cli(["stats", str(store), "--by", "layer"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert all(label in shown for label in ("one", "two", "three", "four", "layer 0", "outside layers"))


def test_a_chunk_written_as_bytes_is_what_zarr_reads(store: Path) -> None:
    overlap = OverlapStore(store)
    planes = np.random.default_rng(7).integers(0, 256, (len(overlap.described.labels), GRAIN // 8), np.uint8)
    overlap.write_bits(0, planes)
    assert np.array_equal(overlap.bits[:], planes[:, : overlap.bits.shape[1]])


def test_two_runs_that_make_the_same_store_share_the_one_that_came_first(
    model: list[Checkpoint], tmp_path: Path
) -> None:
    plan = plan_counts(model[0], model[1:])
    path = tmp_path / "overlap.zarr"
    OverlapStore.create(path, plan, bits=True)
    (path / "mine").touch()
    assert OverlapStore.create(path, plan, bits=True).digest == plan.digest
    assert (path / "mine").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["overlap.zarr"]
