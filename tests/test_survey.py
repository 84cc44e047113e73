"""The survey: scans before the merge that find quantiles and norms, whatever cuts, kills or repeats them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runs import (
    Model,
    Tensor,
    contents,
    family,
    plan_of,
    read_weights,
    run,
    small_steps,
    stopped,
    write_family,
    write_folder,
)

from ramstream import Limits, count, memory, merge
from ramstream.engine import limits
from ramstream.engine.events import Advanced, Event, PassBegan
from ramstream.engine.forecast import forecast
from ramstream.engine.survey import SurveyLedger, norm_factors
from ramstream.errors import ContentError, IntegrityError, JournalError, PlanError
from ramstream.methods.ram import Ram
from ramstream.plan import MatchOptions
from ramstream.types import GRAIN, Dtype

Numbers = NDArray[np.float64]


def widened(tensor: Tensor) -> NDArray[np.floating]:
    """A tensor's values, float64 where it stores them and float32 elsewhere."""
    if tensor.dtype == "BF16":
        return (tensor.bits.astype(np.uint32) << 16).view(np.float32)
    return tensor.bits.view(np.float64 if tensor.dtype == "F64" else np.float32)


def noisy(shapes: dict[str, tuple[str, int]], agents: int, seed: int = 0) -> tuple[Model, list[Model]]:
    """A base and agents whose deltas are of any size, many of them equal, and 0 at half of the elements."""
    rng = np.random.default_rng(seed)
    base: Model = {}
    others: list[Model] = [{} for _ in range(agents)]
    for name, (dtype, n) in shapes.items():
        values = rng.normal(size=n)
        base[name] = stored(dtype, values)
        for agent in others:
            moved = rng.normal(size=n) * np.exp(rng.normal(size=n)) * 0.01
            moved = np.where(rng.random(n) < 0.2, 0.0625, moved)
            agent[name] = stored(dtype, np.where(rng.random(n) < 0.5, values, values + moved))
    return base, others


def stored(dtype: str, values: Numbers) -> Tensor:
    if dtype == "F64":
        return Tensor(dtype, values.shape, values.view(np.uint64))
    bits = values.astype(np.float32).view(np.uint32)
    return Tensor(dtype, values.shape, bits if dtype == "F32" else (bits >> 16).astype(np.uint16))


def deltas(base: Model, agent: Model) -> dict[str, NDArray[np.floating]]:
    """Of every tensor, in the width the merge computes in."""
    return {name: widened(agent[name]) - widened(tensor) for name, tensor in base.items()}


def sorted_out(found: Sequence[dict[str, NDArray[np.floating]]], density: Numbers, scope: str) -> Numbers:
    """The float32 magnitudes of rank k, by sorting; `found` by agent."""
    result = np.empty(density.shape)
    for i, t in np.ndindex(*density.shape):
        sizes = [np.abs(values).astype(np.float32) for values in found[t].values()]
        ordered = np.sort(sizes[i] if scope == "tensor" else np.concatenate(sizes))[::-1]
        share = density[i, t]
        k = max(1, int(share * len(ordered)))
        result[i, t] = np.inf if share <= 0 else 0 if share >= 1 else ordered[k - 1]
    return result


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> list[Numbers]:
    """The thresholds of every merge, as they are handed to it."""
    seen: list[Numbers] = []
    found = SurveyLedger.thresholds

    def thresholds(self: SurveyLedger) -> Numbers:
        seen.append(found(self))
        return seen[-1]

    monkeypatch.setattr(SurveyLedger, "thresholds", thresholds)
    return seen


# Exactness


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("density", ["0.2", "0.3,1,0.001", "b@0.1;0.7,0,b@0.5;c@0.25;1"])
def test_thresholds_are_what_sorting_gives(
    tmp_path: Path, thresholds: list[Numbers], scope: str, density: str
) -> None:
    base, agents = noisy({"a": ("F32", 5000), "b": ("F64", 3001), "c": ("F32", 1), "d": ("BF16", 999)}, 3)
    plan = plan_of(write_family(tmp_path, base, agents), "ties", density=density, scope=scope)
    run(plan, tmp_path / "out")
    shares = plan.settings["density"]
    assert shares.shape == (4, 3)
    found = [deltas(base, agent) for agent in agents]
    least = sorted_out(found, shares, scope)
    (used,) = thresholds
    for i, name in enumerate(base):
        for t in range(3):
            sizes = np.abs(found[t][name])
            assert ((sizes >= used[i, t]) == (sizes.astype(np.float32) >= least[i, t])).all()
            if sizes.dtype == np.float32:
                assert used[i, t] == least[i, t]


def test_only_deltas_above_epsilon_count(tmp_path: Path, thresholds: list[Numbers]) -> None:
    base, agents = noisy({"a": ("F32", 4000)}, 1)
    plan = plan_of(write_family(tmp_path, base, agents), "ties", density=0.4, epsilon=0.05)
    run(plan, tmp_path / "out")
    delta = deltas(base, agents[0])["a"]
    kept = np.where(np.abs(delta) > np.float32(0.05), delta, np.float32(0))
    assert thresholds[0][0, 0] == np.sort(np.abs(kept))[::-1][1599]


def test_nan_that_is_kept_counts_as_the_largest(tmp_path: Path, thresholds: list[Numbers]) -> None:
    base, agents = noisy({"a": ("F32", 100)}, 1)
    bits = agents[0]["a"].bits.copy()
    bits[:20] = 0x7FC00000
    agents[0]["a"] = Tensor("F32", (100,), bits)
    paths = write_family(tmp_path, base, agents)
    keep, back = MatchOptions(on_nonfinite="keep"), MatchOptions(on_nonfinite="base")
    run(plan_of(paths, "ties", options=keep, density=0.2), tmp_path / "all")
    run(plan_of(paths, "ties", options=keep, density=0.21), tmp_path / "more")
    run(plan_of(paths, "ties", options=back, density=0.01), tmp_path / "back")
    largest = np.abs(deltas(base, agents[0])["a"][20:]).max()
    assert [used[0, 0] for used in thresholds] == [np.inf, largest, largest]
    with pytest.raises(ContentError, match="agent-1: a has 20 NaN or Inf"):
        run(plan_of(paths, "ties", density=0.2), tmp_path / "error")
    assert not (tmp_path / "error.ramstream").exists()


# How many scans


def test_a_merge_takes_the_scans_that_were_promised(tmp_path: Path) -> None:
    fine = write_family(tmp_path / "fine", *noisy({"a": ("F32", 3000), "b": ("F32", 500)}, 2))
    short = write_family(tmp_path / "short", *family({"a": ("BF16", (30, 100)), "ids": ("I64", (5,))}, 2))
    select, norm = {"density": 0.3}, {"max_norm": "mean"}
    cases: list[tuple[list[Path], str, dict[str, Any], list[str]]] = [
        (fine, "ties", {"density": 1}, ["counting and merging"]),
        (fine, "ties", {"density": "0,1"}, ["counting and merging"]),
        (fine, "ties", select, ["counting and selecting", "selecting", "merging"]),
        (short, "ties", select, ["counting and selecting", "merging"]),
        (fine, "ties", select | norm, ["counting and selecting", "selecting", "measuring", "merging"]),
        (short, "ram", norm, ["counting and measuring", "merging"]),
        (short, "ram-plus", norm, ["counting", "measuring", "merging"]),
        (short, "ram-plus", {}, ["counting", "merging"]),
    ]
    for number, (paths, method, parameters, wanted) in enumerate(cases):
        plan, out = plan_of(paths, method, **parameters), tmp_path / str(number)
        promised = forecast(plan, out, Limits(device="cpu"))
        outcome, titles = run(plan, out)
        assert titles == wanted
        assert promised["passes"] == len(titles)
        assert promised["bytes_read"] == len(titles) * plan.count.bytes_read
        assert outcome.summary["projected_memory"] <= promised["projected_memory_bytes"]
        assert not (out.with_name(f"{out.name}.ramstream") / "survey.jsonl").exists()


def test_a_complete_store_leaves_nothing_to_count(tmp_path: Path) -> None:
    paths = write_family(tmp_path, *noisy({"a": ("F32", 3000)}, 2))
    store = tmp_path / "store"
    run(plan_of(paths, "ram-plus", epsilon=0.0), tmp_path / "other", store=store)
    before = (store / "journal.jsonl").read_bytes()
    plan = plan_of(paths, "ties", density=0.3, max_norm="mean")
    assert forecast(plan, tmp_path / "out", Limits(device="cpu"), store)["passes"] == 4
    assert run(plan, tmp_path / "out", store=store)[1] == ["selecting", "selecting", "measuring", "merging"]
    assert (store / "journal.jsonl").read_bytes() == before
    run(plan, tmp_path / "fresh")
    assert read_weights(tmp_path / "out") == read_weights(tmp_path / "fresh")


def test_agents_that_keep_all_are_not_read_to_select(tmp_path: Path) -> None:
    paths = write_family(tmp_path, *noisy({"a": ("F32", 3000)}, 3))
    read: dict[str, int] = {}
    titles: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, PassBegan):
            titles.append(f"{len(titles)} {event.title}")
        if isinstance(event, Advanced):
            read[titles[-1]] = read.get(titles[-1], 0) + event.read

    merge(plan_of(paths, "ties", density="1,0.4,0"), tmp_path / "out", Limits(device="cpu"), listener=listen)
    assert read == {"0 counting and selecting": 48_000, "1 selecting": 24_000, "2 merging": 48_000}


# Any cut, any kill


class Grains:
    """Three grains of short deltas and long ones, a byte range, and the outputs of undisturbed runs."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(3)
        sizes = {"a": 2 * GRAIN + 77, "b": 3003, "c": GRAIN // 2}
        ids = Tensor("I64", (99,), np.arange(99, dtype=np.uint64))
        base: Model = {
            n: Tensor("F8_E4M3", (k,), drawn(rng, k, 0x10, 0x50, np.uint8)) for n, k in sizes.items()
        }
        agents: list[Model] = [
            {n: Tensor("BF16", (k,), drawn(rng, k, 0x3A00, 0x3E00, np.uint16)) for n, k in sizes.items()}
            for _ in range(2)
        ]
        self.paths = write_family(root, base | {"ids": ids}, [agent | {"ids": ids} for agent in agents], 2)
        self.root = root
        self.good = {scope: root / f"good-{scope}" for scope in ("tensor", "model")}
        for scope, out in self.good.items():
            assert run(self.plan(scope), out, Limits(workers=3, device="cpu"))[1] == self.titles
        self.units = self.plan("tensor").count.units

    titles = ["counting and selecting", "selecting", "measuring", "merging"]  # noqa: RUF012

    def plan(self, scope: str, **parameters: Any) -> Any:
        chosen = {"density": "0.1,0.35", "max_norm": "mean", "norm_scope": scope, **parameters}
        return plan_of(self.paths, "ties", Dtype.BF16, scope=scope, **chosen)


def drawn(rng: np.random.Generator, n: int, low: int, high: int, dtype: Any) -> NDArray[Any]:
    return rng.integers(low, high, n, dtype=dtype)


@pytest.fixture(scope="module")
def grains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grains]:
    root = tmp_path_factory.mktemp("grains")
    yield Grains(root)
    shutil.rmtree(root)


SCOPES = pytest.mark.parametrize("scope", ["tensor", "model"])


@SCOPES
def test_thresholds_over_many_grains_are_exact(grains: Grains, tmp_path: Path, scope: str) -> None:
    seen: list[Numbers] = []
    plan = grains.plan(scope)
    stopped(plan, tmp_path / "out", "merging")
    ledger = SurveyLedger(tmp_path / "out.ramstream" / "survey.jsonl", plan)
    seen.append(ledger.thresholds())
    ledger.close()
    base, *agents = (read_floats(path) for path in grains.paths)
    found = [{name: agent[name] - values for name, values in base.items()} for agent in agents]
    assert (seen[0] == sorted_out(found, plan.settings["density"], scope)).all()


def read_floats(folder: Path) -> dict[str, NDArray[np.float32]]:
    """The float tensors of a family's folder."""
    found = {}
    for name, data in read_weights(folder).items():
        if name == "ids":
            continue
        if folder.name == "base":
            code = np.frombuffer(data, np.uint8).astype(np.int64)
            found[name] = np.ldexp(1 + (code & 7) / 8, (code >> 3) - 7).astype(np.float32)
        else:
            found[name] = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return {name: found[name] for name in ("a", "b", "c")}


@SCOPES
@pytest.mark.parametrize(
    ("title", "finished", "left"),
    [
        ("counting and selecting", 1, 0),
        ("counting and selecting", 4, 1),
        ("selecting", 1, 1),
        ("selecting", 3, 2),
        ("measuring", 1, 2),
        ("measuring", 3, 3),
        ("merging", 1, 3),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bytes(
    grains: Grains, tmp_path: Path, scope: str, title: str, finished: int, left: int
) -> None:
    out = tmp_path / "out"
    stopped(grains.plan(scope), out, title, finished)
    assert not out.exists()
    assert run(grains.plan(scope), out)[1] == grains.titles[left:]
    assert contents(out) == contents(grains.good[scope])


@SCOPES
def test_a_torn_survey_journal_is_made_up_for(grains: Grains, tmp_path: Path, scope: str) -> None:
    out, work, rng = tmp_path / "out", tmp_path / "out.ramstream", random.Random(5)
    stopped(grains.plan(scope), out, "merging")
    lines = (work / "survey.jsonl").read_bytes().splitlines(True)
    assert len(lines) == 1 + 3 * 3
    shutil.copytree(work, tmp_path / "kept")
    for line, left in ((9, 2), (6, 1), (4, 1), (3, 0), (1, 0), (0, 0)):
        torn = lines[line][: rng.randrange(len(lines[line]))]
        (work / "survey.jsonl").write_bytes(b"".join(lines[:line]) + torn)
        assert run(grains.plan(scope), out)[1] == ["selecting", *grains.titles[1:]][left:]
        assert contents(out) == contents(grains.good[scope])
        shutil.rmtree(out)
        shutil.rmtree(work)
        shutil.copytree(tmp_path / "kept", work)


@pytest.mark.parametrize("line", range(1, 10))
def test_a_line_that_is_there_twice_counts_once(grains: Grains, tmp_path: Path, line: int) -> None:
    out, work = tmp_path / "out", tmp_path / "out.ramstream"
    stopped(grains.plan("model"), out, "merging", 2)
    for name in ("survey.jsonl", "journal.jsonl"):
        lines = (work / name).read_bytes().splitlines(True)
        if line < len(lines):
            (work / name).write_bytes(b"".join([*lines[: line + 1], *lines[line:]]))
    run(grains.plan("model"), out)
    assert contents(out) == contents(grains.good["model"])
    both = [
        json.loads((path / "ramstream.json").read_text())["summary"] for path in (out, grains.good["model"])
    ]
    assert both[0]["overflow"] == both[1]["overflow"]
    assert both[0]["moved_by_lambda"] == both[1]["moved_by_lambda"]


@pytest.mark.parametrize("coarse", [1, 2])
def test_a_line_of_an_unfinished_stage_that_is_there_twice_counts_once(
    grains: Grains, tmp_path: Path, coarse: int
) -> None:
    out, survey = tmp_path / "out", tmp_path / "out.ramstream" / "survey.jsonl"
    stopped(grains.plan("model"), out, "counting and selecting", coarse)
    lines = survey.read_bytes().splitlines(True)
    assert b"coarse" in lines[1]
    survey.write_bytes(b"".join([*lines[:2], *lines[1:]]))
    run(grains.plan("model"), out)
    assert contents(out) == contents(grains.good["model"])


def test_a_survey_whose_counts_are_gone_counts_again(grains: Grains, tmp_path: Path) -> None:
    """The norms need the counts, which another store, or none, does not have."""
    out, plan = tmp_path / "out", plan_of(grains.paths, "ram", max_norm="largest")
    run(plan, tmp_path / "good")
    stopped(plan, out, "merging")
    shutil.rmtree(tmp_path / "out.ramstream" / "overlap.zarr")
    assert "counting" in run(plan, out)[1]
    assert contents(out) == contents(tmp_path / "good")


@pytest.mark.parametrize(("workers", "memory", "io"), [(1, "400MB", "pread"), (5, "2GB", "mmap")])
@SCOPES
def test_any_resources_give_the_same_bytes(
    grains: Grains, tmp_path: Path, scope: str, workers: int, memory: str, io: Any
) -> None:
    with small_steps():
        run(grains.plan(scope), tmp_path / "out", Limits(memory, workers, "cpu", io))
    assert contents(tmp_path / "out") == contents(grains.good[scope])


def test_other_parameters_survey_anew_and_use_the_counts(grains: Grains, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(grains.plan("tensor", density=0.2), out, "selecting")
    assert run(grains.plan("tensor"), out)[1] == ["selecting", "selecting", "measuring", "merging"]
    assert contents(out) == contents(grains.good["tensor"])


@pytest.fixture
def flip(grains: Grains) -> Iterator[Callable[[], None]]:
    """Changes a byte of the second agent's that no sample of the plan's is about; at the end it is as it was."""
    file, flipped = sorted(grains.paths[2].glob("*.safetensors"))[0], [False]

    def change() -> None:
        with open(file, "r+b") as opened:
            opened.seek(150_000)
            byte = opened.read(1)[0]
            opened.seek(150_000)
            opened.write(bytes([byte ^ 1]))
        flipped[0] ^= True

    yield change
    if flipped[0]:
        change()


@pytest.mark.parametrize("title", ["selecting", "measuring"])
def test_a_byte_that_changes_after_it_was_counted_is_found(
    grains: Grains, tmp_path: Path, title: str, flip: Callable[[], None]
) -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, PassBegan) and event.title == title:
            flip()

    out = tmp_path / "out"
    with pytest.raises(IntegrityError, match="agent-2 changed since it was counted"):
        merge(grains.plan("tensor"), out, Limits(workers=1, device="cpu"), listener=spoil)
    flip()
    run(grains.plan("tensor"), out)
    assert contents(out) == contents(grains.good["tensor"])


@pytest.mark.parametrize(
    ("title", "finished"), [("counting and selecting", 2), ("selecting", 1), ("measuring", 2), ("merging", 1)]
)
@pytest.mark.parametrize("counted", [False, True])
def test_a_survey_of_other_bytes_is_found_also_without_the_counts(
    grains: Grains, tmp_path: Path, title: str, finished: int, counted: bool, flip: Callable[[], None]
) -> None:
    """Thresholds of the former bytes were used where the store had been removed, as the first error said, or was
    one of the new bytes.
    """
    out, plan, options = tmp_path / "out", grains.plan("tensor"), {}
    stopped(plan, out, title, finished)
    flip()
    with pytest.raises(IntegrityError, match="agent-2 changed since it was counted"):
        run(plan, out)
    shutil.rmtree(tmp_path / "out.ramstream" / "overlap.zarr")
    if counted:
        options["store"] = tmp_path / "counts.zarr"
        count(plan.count, Limits(), options["store"])
    for _ in range(2):  # and not the second time either
        with pytest.raises(
            IntegrityError,
            match=r"agent-2 changed since it was counted.*remove \S*/\w+\.(ramstream|zarr), which",
        ):
            run(plan, out, **options)
    flip()
    if not counted:
        run(plan, out)
        assert contents(out) == contents(grains.good["tensor"])


def test_the_journal_of_another_merge_is_refused(grains: Grains, tmp_path: Path) -> None:
    ledger = SurveyLedger(tmp_path / "survey.jsonl", grains.plan("tensor"))
    ledger.note_inputs([])
    ledger.close()
    with pytest.raises(JournalError, match=r"survey journal of .*, not the survey journal of"):
        SurveyLedger(tmp_path / "survey.jsonl", grains.plan("model"))


def test_histograms_are_dropped_when_their_tensor_is_complete(
    grains: Grains, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    vouch = SurveyLedger.vouch

    def counted(self: SurveyLedger, stage: str, results: Any) -> None:
        vouch(self, stage, results)
        held.append(len(self._coarse.stage._parts))

    monkeypatch.setattr(SurveyLedger, "vouch", counted)
    with small_steps():
        run(grains.plan("tensor"), tmp_path / "out", Limits(workers=1, device="cpu"))
    assert held[:4] == [1, 1, 0, 0]
    assert set(held[4:]) == {0}


# max_norm


def norms(base: Model, models: Sequence[dict[str, NDArray[np.floating]]], scope: str) -> Numbers:
    """(models, tensors or 1): L2 norms of the differences from the base, float64."""
    squares = np.array(
        [[np.sum(np.square(m[n].astype(np.float64) - widened(b))) for n, b in base.items()] for m in models]
    )
    return np.sqrt(squares if scope == "tensor" else squares.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("method", ["ram", "ram-plus", "task-arithmetic", "ties"])
@pytest.mark.parametrize("bound", ["largest", "mean"])
@SCOPES
def test_the_norm_is_held(tmp_path: Path, method: str, bound: str, scope: str) -> None:
    base, agents = noisy({"a": ("F32", 5000), "b": ("F32", 800), "c": ("F64", 300), "d": ("F32", 40)}, 3)
    paths = write_family(tmp_path, base, agents)
    more = {"density": 0.5, "scale": 3.0} if method == "ties" else {"scale": 1.5}
    run(plan_of(paths, method, Dtype.F64, **more), tmp_path / "free")
    plan = plan_of(paths, method, Dtype.F64, max_norm=bound, norm_scope=scope, **more)
    run(plan, tmp_path / "bound")
    free, found = (
        {name: np.frombuffer(data, np.float64) for name, data in read_weights(tmp_path / out).items()}
        for out in ("free", "bound")
    )
    theirs = norms(base, [{n: widened(t) for n, t in agent.items()} for agent in agents], scope)
    limit = theirs.max(axis=0) if bound == "largest" else theirs.mean(axis=0)
    before, after = norms(base, [free, found], scope)
    assert (before > limit).any()
    np.testing.assert_allclose(after, np.minimum(before, limit), rtol=1e-6)
    within = [
        name for name, small in zip(base, np.broadcast_to(before <= limit, len(base)), strict=True) if small
    ]
    assert all((free[name] == found[name]).all() for name in within)


def test_a_norm_within_its_bound_changes_nothing(tmp_path: Path) -> None:
    paths = write_family(tmp_path, *noisy({"a": ("F32", 500)}, 3))
    run(plan_of(paths, "ram", scale=0.1), tmp_path / "free")
    run(plan_of(paths, "ram", scale=0.1, max_norm="mean"), tmp_path / "bound")
    assert read_weights(tmp_path / "free") == read_weights(tmp_path / "bound")


def test_norm_factors() -> None:
    l2, squares = np.array([[9.0, 1.0], [16.0, 0.0], [0.0, 0.0]]), np.array([4.0, 64.0, 0.0])

    def factors(**parameters: Any) -> list[float]:
        return norm_factors(Ram(**parameters), l2, squares).tolist()

    assert factors(max_norm="largest", norm_scope="tensor") == [1.0, 0.5, 1.0]
    assert factors(max_norm="mean", norm_scope="tensor") == [1.0, 0.25, 1.0]
    assert factors(max_norm="largest", norm_scope="model") == [5 / 68**0.5] * 3
    assert factors(max_norm="mean", norm_scope="model") == [3 / 68**0.5] * 3
    assert norm_factors(Ram(max_norm="mean"), l2[:0], squares[:0]).tolist() == []


def test_a_norm_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    base, agents = noisy({"a": ("F32", 100)}, 2)
    bits = agents[0]["a"].bits.copy()
    bits[3] = 0x7F800000
    agents[0]["a"] = Tensor("F32", (100,), bits)
    paths = write_family(tmp_path, base, agents)
    with pytest.raises(PlanError, match="max_norm needs finite norms"):
        run(
            plan_of(paths, "ram", options=MatchOptions(on_nonfinite="keep"), max_norm="mean"),
            tmp_path / "out",
        )
    run(plan_of(paths, "ram", options=MatchOptions(on_nonfinite="base"), max_norm="mean"), tmp_path / "other")


def test_nothing_to_merge_needs_no_survey(tmp_path: Path) -> None:
    ids = Tensor("I64", (9,), np.arange(9, dtype=np.uint64))
    folders = [write_folder(tmp_path / name, {"ids": ids}) for name in ("base", "agent")]
    plan = plan_of(folders, "ties", density=0.2, max_norm="mean")
    assert forecast(plan, tmp_path / "out", Limits(device="cpu"))["passes"] == 1
    assert run(plan, tmp_path / "out")[1] == ["counting and merging"]


# Memory


def test_the_projection_knows_the_histograms(tmp_path: Path) -> None:
    paths = write_family(tmp_path, *noisy({"a": ("F32", 300), "b.0.w": ("F32", 20), "b.1.w": ("F32", 20)}, 3))

    def projected(workers: int, **parameters: Any) -> int:
        plan = plan_of(paths, "ties", **parameters)
        return limits.capacity(Limits(workers=workers, device="cpu"), plan.count, plan).projected

    each = {
        str(chosen): projected(2, **chosen) - projected(1, **chosen)
        for chosen in ({"density": 1}, {"density": 0.2}, {"density": "0.1:0.9", "scope": "model"})
    }
    none, tensor, gradient = each.values()
    assert tensor - none > 3 * 3 * 65536 * 8
    assert gradient - none > 3 * 2 * 65536 * (8 + 4)
    assert projected(1, density=0.2) - projected(1, density=1) > tensor - none + 3 * memory.HISTOGRAMS


def test_memory_of_a_survey_is_the_sum_of_its_terms() -> None:
    fixed = memory.SIFTING + 3 * memory.HISTOGRAMS
    assert memory.survey(7, 11, 13) == fixed + 13 + 7 * 11 * 128
    assert memory.surveyed(17, by_tensor=True) == 51
    assert memory.surveyed(17, by_tensor=False) == 17


LARGE = {
    "a tensor larger than the budget": (("0.51B", "--largest", "1GB"), "512MB", "density=0.2", ()),
    "f32": (("20M", "--dtype", "f32"), "4GB", "density=0.2", ("--max-norm", "mean")),
    "40 agents": (("5M", "--agents", "40"), "4GB", "density=0.2", ("--workers", "1")),
    "a gradient": (("20M", "--dtype", "f32"), "4GB", "density=0.1:0.9", ("-p", "scope=model")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "allowed", "density", "words"), LARGE.values(), ids=LARGE.keys())
def test_memory_stays_inside_what_was_projected(
    tmp_path: Path, model: tuple[str, ...], allowed: str, density: str, words: tuple[str, ...]
) -> None:
    data, tool = tmp_path / "data", Path(__file__).parent.parent / "tools" / "make_checkpoint.py"
    made = [sys.executable, tool, data, "--parameters", *model]
    try:
        subprocess.run(made, check=True, capture_output=True)
        sources = [data / "base", *sorted(data.glob("agent-*"))]
        how = ["-m", "ties", "-p", density, "--memory", allowed, "--device", "cpu", *words]
        command = ["-m", "ramstream", "merge", *sources, "-o", data / "out", "--json", "-q", *how]
        done = json.loads(subprocess.run([sys.executable, *command], check=True, capture_output=True).stdout)
    finally:
        shutil.rmtree(data)
    assert done["peak_memory"] <= done["projected_memory"] <= limits.parse_size(allowed)
