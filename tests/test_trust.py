"""What a run believes of inputs, stores and folders, and what it compares: nothing wrong passes in silence."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import Stop, Tensor, plan_of, promised, random_bits, small_steps, stopped, write_family

from ramstream import Limits, cli, count, merge, queries
from ramstream.checkpoint import Checkpoint
from ramstream.engine import passes
from ramstream.engine.disk import check_disk
from ramstream.engine.events import Event, Note, PassBegan
from ramstream.engine.forecast import forecast
from ramstream.engine.ledgers import CountLedger
from ramstream.engine.place import Place
from ramstream.errors import DiskFullError, IntegrityError, JournalError, PlanError, UsageError
from ramstream.kernels import jit
from ramstream.methods.ram import Ram
from ramstream.methods.ram_plus import RamPlus
from ramstream.overlap import OverlapStore
from ramstream.plan import MergePlan
from ramstream.types import GRAIN, Dtype
from ramstream.verify import verify_output

SIZE = 3 * GRAIN + 1000
PLACE = GRAIN // 2 + 60_000
"""A stretch in the first grain that no sample of the fingerprint touches."""


@pytest.fixture
def model(tmp_path: Path) -> list[Path]:
    """Four grains of one byte an element; the second agent changes only the last full one."""
    rng = np.random.default_rng(3)
    base = random_bits(rng, "F8_E4M3", SIZE)
    everywhere, last = base.copy(), base.copy()
    everywhere[rng.integers(0, SIZE, 40_000)] += 1
    last[2 * GRAIN + rng.integers(0, GRAIN, 40_000)] += 1
    made = [{"w": Tensor("F8_E4M3", (SIZE,), bits)} for bits in (base, everywhere, last)]
    return write_family(tmp_path / "in", made[0], made[1:])


def edit(agent: Path) -> None:
    """Change weights where no sample of the fingerprint looks; the fingerprint stays."""
    before = Checkpoint.open(agent).fingerprint()
    with open(agent / "model.safetensors", "r+b") as file:
        file.seek(PLACE)
        stretch = np.frombuffer(file.read(5000), np.uint8) ^ 1
        file.seek(PLACE)
        file.write(stretch.tobytes())
    assert Checkpoint.open(agent).fingerprint() == before


def at_merging(act: Callable[[], None]) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, PassBegan) and event.title == "merging":
            act()

    return listen


def test_an_agent_that_changed_where_it_was_not_to_be_read_is_found_with_a_store(
    model: list[Path], tmp_path: Path
) -> None:
    plan = plan_of(model)
    count(plan.count, Limits(), tmp_path / "store.zarr")
    edit(model[2])
    with pytest.raises(IntegrityError, match=r"agent-2 changed since it was counted"):
        merge(plan_of(model), tmp_path / "out", store=tmp_path / "store.zarr")
    with pytest.raises(IntegrityError, match=r"agent-2 changed since it was counted"):
        count(plan_of(model).count, Limits(), tmp_path / "store.zarr")


def test_it_is_found_after_a_kill_between_the_passes(model: list[Path], tmp_path: Path) -> None:
    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        merge(plan_of(model), tmp_path / "out", listener=at_merging(stop))
    edit(model[2])
    with pytest.raises(IntegrityError, match="agent-2 changed since it was counted"):
        merge(plan_of(model), tmp_path / "out")


def test_a_touched_file_is_read_where_it_need_not_be_and_gives_the_same(
    model: list[Path], tmp_path: Path
) -> None:
    plan = plan_of(model)
    merge(plan, tmp_path / "one")
    count(plan.count, Limits(), tmp_path / "store.zarr")
    os.utime(model[2] / "model.safetensors")
    merge(plan_of(model), tmp_path / "two", store=tmp_path / "store.zarr")
    assert promised(tmp_path / "one") == promised(tmp_path / "two")


def test_a_finished_unit_is_compared_whatever_store_the_resume_names(
    model: list[Path], tmp_path: Path
) -> None:
    stopped(plan_of(model, "ram"), tmp_path / "out", "counting and merging", store=tmp_path / "one.zarr")
    edit(model[1])
    with pytest.raises(IntegrityError, match="agent-1 changed since it was counted"):
        merge(plan_of(model, "ram"), tmp_path / "out", store=tmp_path / "two.zarr")


def test_a_finished_output_of_touched_inputs_says_what_it_did_not_compare(
    model: list[Path], tmp_path: Path
) -> None:
    merge(plan_of(model), tmp_path / "out")
    os.utime(model[0] / "model.safetensors")
    again = merge(plan_of(model), tmp_path / "out")
    assert (again.already_complete, again.summary["inputs_touched"]) == (True, True)
    said = subprocess.run(merge_command(model, tmp_path / "out"), capture_output=True, text=True, check=True)
    assert "input files were touched since this merge" in said.stdout


def test_inputs_that_change_before_the_output_has_its_name_are_found(
    model: list[Path], tmp_path: Path
) -> None:
    """All was built, and something stood at OUT; by the next run an input was another."""
    out = tmp_path / "out"
    with pytest.raises(PlanError, match="appeared meanwhile"):
        merge(plan_of(model), out, listener=lambda _: out.mkdir(exist_ok=True))
    out.rmdir()
    before = (model[1] / "model.safetensors").read_bytes()
    edit(model[1])
    with pytest.raises(
        IntegrityError, match=r"agent-1 changed since .*out\.ramstream, which was made of the former"
    ):
        merge(plan_of(model), out)
    assert not out.exists()
    (model[1] / "model.safetensors").write_bytes(before)
    merge(plan_of(model), out)
    assert verify_output(out, read_data=True).problems == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"zarr_format": 3}', None])
def test_a_store_with_a_damaged_description_of_its_bits_is_named(
    model: list[Path], tmp_path: Path, text: str | None
) -> None:
    plan, store = plan_of(model), tmp_path / "it.zarr"
    count(plan.count, store=store)
    description = store / "changed" / "zarr.json"
    description.unlink()
    if text is not None:
        description.write_text(text)
    damaged = r"it\.zarr is damaged .*; copy it again, or remove it"
    with pytest.raises(IntegrityError, match=damaged):
        merge(plan, tmp_path / "out", store=store)
    with pytest.raises(IntegrityError, match=damaged):
        queries.recount(OverlapStore(store), [0, 1])


def test_what_is_finished_when_a_neighbour_fails_is_vouched_for(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do, finished = passes.run_task, []

    def fail_once(setup, works):
        if works[0].unit == 2:
            raise RuntimeError("no")
        results = do(setup, works)
        finished.extend(result.unit for result in results)
        return results

    plan = plan_of(model)
    monkeypatch.setattr(passes, "run_task", fail_once)
    with small_steps(), pytest.raises(RuntimeError):
        count(plan.count, Limits(workers=4), tmp_path / "store.zarr")
    ledger = CountLedger(tmp_path / "store.zarr" / "journal.jsonl", plan.count)
    assert finished
    assert np.flatnonzero(ledger.done).tolist() == sorted(finished)


@pytest.fixture
def store(model: list[Path], tmp_path: Path) -> Path:
    count(plan_of(model).count, Limits(), tmp_path / "store.zarr")
    return tmp_path / "store.zarr"


@pytest.mark.parametrize("harm", [os.unlink, lambda chunk: os.truncate(chunk, 10)], ids=["gone", "cut"])
def test_bits_that_are_gone_are_no_zeros(store: Path, harm: Callable[[Path], None]) -> None:
    harm(store / "changed" / "c" / "0" / "2")
    with pytest.raises(IntegrityError, match=r"changed/c/0/2 is missing or cut"):
        queries.stats_of(store, agents="1")


def test_a_grain_nobody_changed_has_no_chunk_and_is_not_missed(store: Path) -> None:
    assert not (store / "changed" / "c" / "0" / "3").exists() or OverlapStore(store).attributes["stored"]
    assert queries.stats_of(store, agents="2")["agents"][0]["changed"] > 0


@pytest.mark.parametrize("tally", ["overlap", "l1", "refused_first"])
@pytest.mark.parametrize("harm", ["array", "chunk", "byte"])
def test_tallies_that_are_not_what_was_written_are_refused(
    store: Path, model: list[Path], tmp_path: Path, tally: str, harm: str
) -> None:
    chunk = next(path for path in (store / tally / "c").rglob("*") if path.is_file())
    if harm == "array":
        shutil.rmtree(store / tally)
    elif harm == "chunk":
        chunk.unlink()
    else:
        data = bytearray(chunk.read_bytes())
        data[0] ^= 1
        chunk.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"damaged|not what was written"):
        queries.stats_of(store)
    with pytest.raises(IntegrityError, match=r"damaged|not what was written"):
        merge(plan_of(model), tmp_path / "out", store=store)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "", '{"zarr_format": 3, "node_type": "group", "attributes": {}}']
)
def test_what_is_no_store_is_a_clear_error(store: Path, text: str) -> None:
    (store / "zarr.json").write_text(text)
    with pytest.raises(PlanError, match=r"not an overlap store that can be read|has format None"):
        queries.stats_of(store)


@pytest.mark.parametrize("key", ["digest", "described", "tallies", "stored", "found"])
@pytest.mark.parametrize("value", [None, 5, ["x"]])
def test_a_store_whose_attributes_are_not_what_they_should_be_is_a_clear_error(
    store: Path, key: str, value: object
) -> None:
    whole = json.loads((store / "zarr.json").read_text())
    whole["attributes"][key] = value
    (store / "zarr.json").write_text(json.dumps(whole))
    if (key, value) in (("digest", None), ("digest", 5), ("digest", ["x"]), ("found", ["x"])):
        return  # any text will do there
    with pytest.raises((PlanError, IntegrityError)):
        queries.stats_of(store)


@pytest.mark.parametrize("loss", ["changed/c/0/0", "journal.jsonl"])
def test_a_merge_does_not_trust_a_store_that_lost_something(
    store: Path, model: list[Path], tmp_path: Path, loss: str
) -> None:
    (store / loss).unlink()
    with pytest.raises(IntegrityError, match=r"is missing or cut|lost its journal"):
        merge(plan_of(model), tmp_path / "out", store=store)


def test_a_subset_is_named_by_this_runs_labels(
    store: Path, model: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = model[1].rename(model[1].with_name("else"))
    words = [
        "stats",
        *map(str, (model[0], other, model[2])),
        "--store",
        str(store),
        "--agents",
        "else",
        "--json",
    ]
    cli.cli([*words, "-q"], standalone_mode=False)
    (agent,) = json.loads(capsys.readouterr().out)["agents"]
    assert (agent["label"], agent["changed"]) == ("else", queries.stats_of(store)["agents"][0]["changed"])


def test_others_may_read_a_store_during_pass_2(model: list[Path], tmp_path: Path) -> None:
    read: list[int] = []
    path = tmp_path / "store.zarr"

    def ask() -> None:
        read.append(int(count(plan_of(model).count, Limits(), path)[1]["overlap"].sum()))

    merge(plan_of(model), tmp_path / "out", store=path, listener=at_merging(ask))
    assert read[0] > 0


def test_a_reused_store_speaks_of_this_runs_agents(store: Path, model: list[Path], tmp_path: Path) -> None:
    renamed = [path.rename(path.with_name(f"new-{path.name}")) for path in model]
    outcome = merge(plan_of(renamed), tmp_path / "out", store=store)
    labels = [agent["label"] for agent in outcome.summary["statistics"]["agents"]]
    assert [Path(label).name for label in labels] == ["new-agent-1", "new-agent-2"]
    assert queries.open_counts(tmp_path / "out").described.labels == tuple(labels)


def test_two_merges_may_use_a_finished_store_at_once(store: Path, model: list[Path], tmp_path: Path) -> None:
    inner = at_merging(lambda: merge(plan_of(model, r=0.5), tmp_path / "two", store=store) and None)
    merge(plan_of(model), tmp_path / "one", store=store, listener=inner)
    assert promised(tmp_path / "one").keys() == promised(tmp_path / "two").keys()


def test_a_finished_store_is_read_where_nothing_can_be_written(
    store: Path, model: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def read_only(path, flags, *mode):
        if str(path).startswith(str(store)) and flags & (os.O_RDWR | os.O_CREAT):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    _, tallies = count(plan_of(model).count, Limits(), store)
    assert tallies["overlap"].sum() > 0


def test_a_store_answers_with_the_epsilon_it_was_counted_with(model: list[Path], tmp_path: Path) -> None:
    plan = plan_of(model, epsilon=0.25)
    count(plan.count, Limits(), tmp_path / "store.zarr")
    assert queries.stats_of(tmp_path / "store.zarr")["epsilon"] == 0.25


def test_an_output_answers_with_its_own_method_and_parameters(model: list[Path], tmp_path: Path) -> None:
    merge(plan_of(model, r=0.3, scope="tensor", ratio="changed"), tmp_path / "plus")
    merge(plan_of(model, "ram"), tmp_path / "ram")
    plus, ram = queries.open_counts(tmp_path / "plus"), queries.open_counts(tmp_path / "ram")
    assert plus.method() == RamPlus(r=0.3, scope="tensor", ratio="changed")
    assert plus.method(None, {"r": "0.5"}) == RamPlus(r=0.5, scope="tensor", ratio="changed")
    assert plus.method("ram") == ram.method() == Ram()
    assert ram.method("ram-plus") == RamPlus()
    with pytest.raises(UsageError, match="ram has no parameter 'r'"):
        ram.method(None, {"r": "1"})


def test_counts_of_single_elements_can_be_read(store: Path, model: list[Path]) -> None:
    counts = queries.overlap_counts(OverlapStore(store), "w").compute()
    values = [np.fromfile(path / "model.safetensors", np.uint8)[-SIZE:] for path in model]
    assert (counts == sum((agent != values[0]).astype(int) for agent in values[1:])).all()
    with pytest.raises(PlanError, match="counted no tensor 'v'"):
        queries.overlap_counts(OverlapStore(store), "v")


def merge_command(sources: list[Path], out: Path) -> list[str]:
    return [sys.executable, "-m", "ramstream", "merge", *map(str, sources), "-o", str(out), "-q"]


def test_more_files_than_may_be_open_are_no_trouble(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shards = {f"t{i}": Tensor("F32", (5,), random_bits(rng, "F32", 5)) for i in range(150)}
    paths = write_family(tmp_path / "in", shards, [shards, shards], shards=150)
    command = merge_command(paths, tmp_path / "out")
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "_", *command], capture_output=True, text=True
    )
    assert limited.returncode == 0, limited.stderr


def test_output_and_store_on_one_disk_are_added_up(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model)
    monkeypatch.setattr("ramstream.engine.disk.free_disk", lambda _: plan.written + 1000)
    place = Place.of(tmp_path / "not" / "yet" / "out")
    check_disk(plan, place, None)
    with pytest.raises(DiskFullError, match="use --no-keep-store"):
        check_disk(plan, place, place.store)


def test_the_root_and_mount_points_are_no_outputs(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match="/ cannot be an output"):
        merge(plan_of(model), "/")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "out")
    with pytest.raises(PlanError, match="is a mount point"):
        merge(plan_of(model), tmp_path / "out")


@pytest.mark.parametrize("foreign", ["out/mine", "old/mine", "journal.jsonl"])
def test_a_work_folder_with_other_things_in_it_is_left_alone(
    model: list[Path], tmp_path: Path, foreign: str
) -> None:
    mine = tmp_path / "out.ramstream" / foreign
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    with pytest.raises(JournalError, match="move it away"):
        merge(plan_of(model), tmp_path / "out")
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_plan_that_cannot_be_read_is_a_clear_error(model: list[Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "out.ramstream").mkdir()
    (tmp_path / "out.ramstream" / "plan.json").write_text(text)
    with pytest.raises(JournalError, match=r"plan\.json cannot be read; remove"):
        merge(plan_of(model), tmp_path / "out")


def test_a_folder_that_is_no_model_is_not_overwritten(model: list[Path], tmp_path: Path) -> None:
    (tmp_path / "docs" / "a").mkdir(parents=True)
    with pytest.raises(PlanError, match="holds files but no model"):
        merge(plan_of(model), tmp_path / "docs", overwrite=True)
    assert (tmp_path / "docs" / "a").exists()


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("other", ["rewards.csv", "checkpoint-100/optimizer.pt", "notes/a.json", "link"])
def test_what_lies_beside_a_model_is_not_removed_with_it(
    model: list[Path], tmp_path: Path, ours: bool, other: str
) -> None:
    out = tmp_path / "out"
    if ours:
        merge(plan_of(model), out)
        (out / "README.md").write_text("my own card")
    else:
        shutil.copytree(model[1], out)
        (out / "LICENSE").write_text("free")
    (out / other).parent.mkdir(exist_ok=True)
    if other == "link":
        (out / other).symlink_to(tmp_path, target_is_directory=True)
    else:
        (out / other).write_text("mine")
    with pytest.raises(PlanError, match=f"holds what is no part of its model: {other}; move it elsewhere"):
        merge(plan_of(model, r=0.5), out, overwrite=True)
    (out / other).rename(tmp_path / "elsewhere")
    merge(plan_of(model, r=0.5), out, overwrite=True)
    assert merge(plan_of(model, r=0.5), out).already_complete


def killed_between_the_renames(plan: MergePlan, out: Path) -> None:
    """A merge over a former output that ends after that one lost its name and before the new one has it."""
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "out" and path.parent.name == "out.ramstream":
            raise Stop
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Stop):
            merge(plan, out, overwrite=True)


def test_the_former_output_gets_its_name_back(model: list[Path], tmp_path: Path) -> None:
    """A kill between the two renames of publishing, and then another merge of other agents to the same OUT."""
    merge(plan_of(model), tmp_path / "out")
    before = promised(tmp_path / "out")
    killed_between_the_renames(plan_of(model, r=0.9), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(JournalError, match=r"unfinished merge of other inputs, .*, and this is one of "):
        merge(plan_of(model[:2]), tmp_path / "out", overwrite=True)
    assert promised(tmp_path / "out") == before


def test_dropping_an_unfinished_output_of_other_parameters_is_said(model: list[Path], tmp_path: Path) -> None:
    stopped(plan_of(model), tmp_path / "out", "merging")
    said: list[Event] = []
    merge(plan_of(model, r=0.7), tmp_path / "out", listener=said.append)
    assert any("made with other parameters was dropped" in e.text for e in said if isinstance(e, Note))


def test_coefficients_that_are_not_finite_are_refused(model: list[Path], tmp_path: Path) -> None:
    twice = [*model[:2], model[1]]  # nothing is unique: ρ is infinite and λ = 1 + r · alpha
    with pytest.raises(PlanError, match="not finite"):
        merge(plan_of(twice, r=1e308, alpha=1e10), tmp_path / "out")
    count(plan_of(twice).count, Limits(), tmp_path / "store.zarr")
    with pytest.raises(UsageError, match="not a finite number"):
        queries.stats_of(tmp_path / "store.zarr", RamPlus(r=1e308, alpha=1e10))


def test_output_dtype_decides_the_merge_also_where_no_weight_changes(
    model: list[Path], tmp_path: Path
) -> None:
    (model[0] / "config.json").write_text('{"torch_dtype": "float32"}')
    merge(plan_of(model), tmp_path / "out")
    assert not merge(plan_of(model, dtype=Dtype.F8_E4M3), tmp_path / "out", overwrite=True).already_complete
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float8_e4m3fn"}


def test_the_record_names_the_output_dtype(model: list[Path], tmp_path: Path) -> None:
    merge(plan_of(model, dtype=Dtype.F32), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "ramstream.json").read_text())["options"]["dtype"] == "F32"


def test_a_linked_work_folder_is_refused_at_once(model: list[Path], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.ramstream").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="is a mount point or a link"):
        merge(plan_of(model), tmp_path / "out")


def test_a_complete_staged_output_is_not_dropped_before_a_refusal(model: list[Path], tmp_path: Path) -> None:
    merge(plan_of(model), tmp_path / "out")
    killed_between_the_renames(plan_of(model, r=0.5), tmp_path / "out")
    with pytest.raises(PlanError, match="use --overwrite"):
        merge(plan_of(model, r=0.9), tmp_path / "out")
    assert (tmp_path / "out.ramstream" / "out" / "ramstream.json").exists()
    merge(plan_of(model, r=0.5), tmp_path / "out", overwrite=True)
    assert queries.open_counts(tmp_path / "out").used["r"] == 0.5


def test_an_output_that_lost_a_file_is_merged_again(model: list[Path], tmp_path: Path) -> None:
    merge(plan_of(model), tmp_path / "out")
    before = promised(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(PlanError, match="use --overwrite"):
        merge(plan_of(model), tmp_path / "out")
    assert not merge(plan_of(model), tmp_path / "out", overwrite=True).already_complete
    assert promised(tmp_path / "out") == before


def test_what_is_finished_needs_no_space(
    model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(plan_of(model), tmp_path / "out")
    monkeypatch.setattr("ramstream.engine.disk.free_disk", lambda _: 0)
    assert forecast(plan_of(model), tmp_path / "out", Limits())["passes"] == 0
    assert merge(plan_of(model), tmp_path / "out").already_complete


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("encoded_tallies", "x"),
        ("encoded_tallies", 5),
        ("files", []),
        ("files", [{}]),
        ("method", []),
        ("side_files", []),
        ("checksums", []),
        ("described", {}),
        ("merged", [{}]),
        ("summary", None),
    ],
)
def test_an_edited_record_is_a_clear_error(
    model: list[Path], tmp_path: Path, key: str, value: object
) -> None:
    merge(plan_of(model), tmp_path / "out")
    path = tmp_path / "out" / "ramstream.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    for ask in (queries.stats_of, verify_output):
        with pytest.raises(PlanError, match="cannot be read"):
            ask(tmp_path / "out")


def test_a_store_that_is_named_and_not_kept_is_refused(model: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="leave out --no-keep-store"):
        merge(plan_of(model), tmp_path / "out", store=tmp_path / "s", keep_store=False)


@pytest.mark.parametrize("name", ["README.md", "ramstream.json", "tokenizer.json"])
def test_weights_under_a_name_the_output_needs_are_refused(model: list[Path], name: str) -> None:
    (model[0] / name).unlink(missing_ok=True)
    (model[0] / "model.safetensors").rename(model[0] / name)
    (model[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    if name == "tokenizer.json":
        assert plan_of(model).outputs[0].name == name  # no side file then
        return
    with pytest.raises(PlanError, match=f"puts weights into {name}"):
        plan_of(model)


def test_kernels_older_than_their_sources_are_dropped(tmp_path: Path) -> None:
    old, new = tmp_path / "old.nbi", tmp_path / "new.nbi"
    cut = tmp_path / "cores" / "__pycache__" / "cut.nbi"
    cut.parent.mkdir(parents=True)
    for path in (old, new):
        path.write_text("something")
    cut.touch()
    os.utime(old, (1, 1))
    jit._drop_stale_caches(tmp_path)
    assert not old.exists()
    assert not cut.exists(), "a crash left it empty, and numba would not get over it"
    assert new.exists()


def test_kernels_compile_uncached_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: object) -> object:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(jit, "njit", nowhere)
    assert jit._cache_folder() is None


def test_a_closed_stdout_loses_nothing(model: list[Path], tmp_path: Path) -> None:
    command = merge_command(model, tmp_path / "out")
    done = subprocess.run(["bash", "-c", 'exec "$@" >&-', "_", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "ramstream.json").exists()


def test_an_encoding_without_greek_is_no_reason_to_fail(model: list[Path]) -> None:
    command = [sys.executable, "-m", "ramstream", "stats", *map(str, model), "-q"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "agent-1" in done.stdout
