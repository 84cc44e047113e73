"""From every crash state the same command ends with the same bytes, or says clearly what to do; nothing is lost."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import distributed
import pytest
from crash import Hasty, Killed, Recorder, Tree, at_the_end, found, in_place, put, states
from faults import SMALL, small_grains
from runs import Stop, Tensor, contents, family, plan_of, small_steps, stop_after, write_family

from ramstream import Limits, count, durable, merge
from ramstream.engine.events import Event, PassBegan
from ramstream.errors import ContentError, RamstreamError
from ramstream.journal import Journal
from ramstream.overlap import OverlapStore

LIMITS = Limits(workers=1, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def run_of_small_grains() -> Iterator[None]:
    """A small grain, in every module that has the number."""
    with small_grains():
        yield


# Commands, and what is there before them

Act = Callable[[Path], None]
"""What a command does below a folder."""


class Models:
    """Four grains and a byte range in two files, with a folder of side files; and the same with a NaN."""

    def __init__(self, root: Path) -> None:
        shapes = {
            "a": ("F8_E4M3", (2 * SMALL + 77,)),
            "ids": ("I64", (99,)),
            "b": ("BF16", (3, 501)),
            "c": ("F8_E4M3", (SMALL,)),
        }
        base, agents = family(shapes, agents=2, seed=5)
        self.good = write_family(root / "good", base, agents, shards=2)
        (self.good[0] / "1_Pooling").mkdir()
        (self.good[0] / "1_Pooling" / "config.json").write_text("{}")
        bits = agents[1]["b"].bits.copy()
        bits[700] = 0x7FC0
        agents[1]["b"] = Tensor("BF16", (3, 501), bits)
        self.bad = write_family(root / "bad", base, agents, shards=2)

    @cached_property
    def on_a_cluster(self) -> Limits:
        """A scheduler and a worker in threads of this process, where what they do to the disk is recorded too."""
        self._cluster = distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", dashboard_address=":0"
        )
        return replace(LIMITS, workers=None, scheduler=self._cluster.scheduler_address)

    def close(self) -> None:
        """End the cluster, if there is one."""
        if "on_a_cluster" in self.__dict__:
            self._cluster.close()

    def merges(
        self,
        method: str = "ram-plus",
        *,
        out: str = "out",
        store: str = "",
        bad: bool = False,
        cluster: bool = False,
        **options: Any,
    ) -> Act:
        """`ramstream merge`, by the worker of a cluster if wanted."""
        known = ("r", "epsilon", "density", "scope", "max_norm")
        parameters = {name: options.pop(name) for name in known if name in options}
        plan = plan_of(self.bad if bad else self.good, method, **parameters)

        def act(root: Path) -> None:
            limits = self.on_a_cluster if cluster else LIMITS
            merge(plan, root / out, limits, store=root / store if store else None, **options)

        return act

    def stops(self, title: str, units: int, **options: Any) -> Act:
        """A merge that ends in a pass after some units."""

        def act(root: Path) -> None:
            with small_steps(), suppress(Stop):
                self.merges(listener=stop_after(title, units), **options)(root)

        return act

    def counts(self, store: str) -> Act:
        """`ramstream stats --store`."""
        plan = plan_of(self.good).count

        def act(root: Path) -> None:
            count(plan, LIMITS, root / store)

        return act


def nothing(root: Path) -> None:
    """Nothing is there before."""


@dataclass
class Case:
    """A command, and what was there before it."""

    act: Act
    before: Act = nothing
    stepwise: bool = True
    """Whether every unit is vouched for by itself, and not all at once."""
    refused: bool = False
    """Whether the command ends in a ContentError."""

    def run(self, root: Path) -> None:
        """The command, to its end."""
        with pytest.raises(ContentError) if self.refused else nullcontext():
            self.act(root)


def cases(models: Models) -> dict[str, Case]:
    """All cases, by name."""
    merges, former = models.merges, models.merges("ram")
    return {
        "a merge that keeps its store": Case(merges(out="deep/er/out")),
        "a merge in one batch": Case(merges(), stepwise=False),
        "a merge in one scan": Case(merges("ram")),
        "a merge with surveys": Case(merges("ties", density=0.3, scope="model", max_norm="mean")),
        "a merge without store": Case(merges(keep_store=False)),
        "a merge with a store elsewhere": Case(merges(store="deep/counts.zarr")),
        "a merge from a store": Case(merges(store="counts.zarr"), models.counts("counts.zarr")),
        "an overwrite": Case(merges(overwrite=True), former),
        "an overwrite with other counts": Case(merges(overwrite=True), merges("ram", epsilon=1e-3)),
        "a resume": Case(merges(), models.stops("merging", 2)),
        "a resume with other parameters": Case(merges(), models.stops("merging", 2, r=0.3)),
        "a refusal": Case(merges(bad=True, overwrite=True), former, refused=True),
        "a refusal of one scan": Case(merges("ram", bad=True, overwrite=True), former, refused=True),
        "stats": Case(models.counts("deep/counts.zarr")),
        "a merge on a cluster": Case(merges(cluster=True)),
        "a resume on a cluster": Case(merges(cluster=True), models.stops("merging", 2, cluster=True)),
    }


# What came of them


def view(root: Path) -> dict[str, Any]:
    """Outputs and stores as they are promised, and whatever other files lie there, but locks."""
    seen: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if (path / "ramstream.json").exists():
            seen[name] = contents(path)
        elif path.suffix == ".zarr":
            seen[name] = {at: data for at, data in found(path).items() if at != "journal.jsonl"}
        elif path.is_file() and path.name != "lock" and not any(name.startswith(f"{o}/") for o in seen):
            seen[name] = path.read_bytes()
    return seen


def below(tree: Tree, folder: str) -> Tree:
    """A part of a state."""
    return {path.removeprefix(folder): data for path, data in tree.items() if path.startswith(folder)}


@dataclass
class Trial:
    """A case that is recorded, and run again from crash states."""

    case: Case
    root: Path
    want: dict[str, Any] = field(init=False)
    recorder: Recorder = field(init=False)
    former: Tree = field(init=False)
    begin: int = 0
    """Where in the log the last run begins."""
    ended: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        with in_place(Hasty()):
            for name in ("good", "recorded"):
                (self.root / name).mkdir(parents=True)
                self.case.before(self.root / name)
            self.case.run(self.root / "good")
        self.want = view(self.root / "good")
        self.former = below(found(self.root / "recorded"), "out/")
        self.recorder = Recorder(self.root / "recorded")

    def killed(self, gone: Callable[[list[str]], bool]) -> Trial:
        """Run the command until its acts are such that the process is gone."""
        begin = len(self.recorder.log)
        self.recorder.gone = lambda: gone(self.recorder.acts[begin:])
        with pytest.raises(Killed):
            self.finished()
        self.recorder.gone = lambda: False
        return self

    def killed_after(self, act: str, nth: int = 1) -> Trial:
        """Run the command until it did this the nth time."""
        return self.killed(lambda acts: sum(bool(re.fullmatch(act, one)) for one in acts) >= nth)

    def finished(self) -> Trial:
        """Run the command to its end."""
        self.begin = len(self.recorder.log)
        with in_place(self.recorder), small_steps() if self.case.stepwise else nullcontext():
            self.case.run(self.root / "recorded")
        return self

    def states(self, rng: random.Random, subsets: int = 32, share: float = 1.0) -> list[Tree]:
        """Crash states of the last run, in each of which a former output is whole or the new one is."""
        made = list(states(self.recorder, self.begin, rng, subsets, share))
        new = below(at_the_end(self.recorder, kept=True), "out/")
        for tree in made if self.former else ():
            out, old = below(tree, "out/"), below(tree, "out.ramstream/old/")
            assert self.former in (out, old) or out == new
        return made

    def replayed(self, trees: Sequence[Tree], act: Act | None = None) -> Trial:
        """The same command, or another, from each state."""
        root, run = self.root / "replayed", act or self.case.run
        with in_place(Hasty()):
            for tree in trees:
                put(tree, root)
                try:
                    run(root)
                    self.ended["complete"] += 1
                except RamstreamError as error:
                    self.ended[type(error).__name__] += 1
                    follow(str(error), root)
                    run(root)
                assert act or view(root) == self.want
        return self

    def on_disk(self) -> dict[str, Any]:
        """What of that which is promised is on disk for certain after all that was recorded."""
        put(at_the_end(self.recorder, kept=False), self.root / "replayed")
        seen = view(self.root / "replayed")
        return {name: seen.get(name) for name in self.want}


def follow(advice: str, root: Path) -> None:
    """Do what an error says."""
    named = re.search(r"remove (\S+)", advice)
    assert named, advice
    path = Path(named[1].rstrip(",;"))
    assert root in path.parents, advice
    shutil.rmtree(path)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: states are made and removed by the thousand."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with closing(Models(tmp_path_factory.mktemp("models"))) as made:
        yield made


NAMES = [
    "a merge that keeps its store",
    "a merge in one batch",
    "a merge in one scan",
    "a merge with surveys",
    "a merge without store",
    "a merge with a store elsewhere",
    "a merge from a store",
    "an overwrite",
    "an overwrite with other counts",
    "a resume",
    "a resume with other parameters",
    "a refusal",
    "a refusal of one scan",
    "stats",
    "a merge on a cluster",
    "a resume on a cluster",
]


def test_every_case_is_tried(models: Models) -> None:
    assert list(cases(models)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_some_crash_states(models: Models, place: Path, name: str) -> None:
    rng = random.Random(name)
    trial = Trial(cases(models)[name], place).finished()
    assert at_the_end(trial.recorder, kept=True) == found(place / "recorded"), (
        "something went beside the seam"
    )
    assert trial.on_disk() == trial.want
    assert ("cluster" in name) == any("/run-" in act for act in trial.recorder.acts), "workers are recorded"
    trees = trial.states(rng, subsets=4, share=0.2)
    trial.replayed(rng.sample(trees, 16))
    assert trial.ended == {"complete": 16}


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_crash_states(models: Models, place: Path, name: str) -> None:
    rng = random.Random(name)
    trial = Trial(cases(models)[name], place).finished()
    trees = trial.states(rng)
    tried = rng.sample(trees, min(len(trees), 240))
    trial.replayed(tried)
    print(f"{name}: {len(trees)} states, {len(tried)} replayed, {dict(trial.ended)}")
    assert len(tried) >= 200
    assert trial.ended == {"complete": len(tried)}


def resumed_resumes(models: Models, root: Path, rng: random.Random, name: str, states: int) -> Trial:
    """A run that was killed, one that went on and was perhaps killed too, and one that ended; from crash states."""
    trial = Trial(cases(models)[name], root)
    for most in rng.choice([(250,), (250, 60), (60, 60, 60)]):
        acts = rng.randrange(1, most)
        try:
            trial.killed(lambda done, acts=acts: len(done) >= acts)
        except pytest.fail.Exception:  # it was over before
            break
    else:
        trial.finished()
    trees = trial.states(rng, subsets=3, share=0.05)
    return trial.replayed(rng.sample(trees, min(len(trees), states)))


RESUMED = ["a merge that keeps its store", "a merge with a store elsewhere", "an overwrite with other counts"]


@pytest.mark.parametrize("name", RESUMED)
def test_some_crash_states_of_resumed_resumes(models: Models, place: Path, name: str) -> None:
    trial = resumed_resumes(models, place, random.Random(name), name, 20)
    assert set(trial.ended) == {"complete"}


@pytest.mark.soak
@pytest.mark.parametrize("name", [*RESUMED, "a merge without store", "an overwrite", "a refusal", "stats"])
def test_crash_states_of_resumed_resumes(models: Models, place: Path, name: str) -> None:
    rng, ended = random.Random(name), Counter[str]()
    for n in range(12):
        ended += resumed_resumes(models, place / str(n), rng, name, 12).ended
    print(f"{name}, resumed: {dict(ended)}")
    assert set(ended) == {"complete"}
    assert ended.total() >= 100


# One fault each


def test_what_a_worker_of_a_cluster_did_is_on_disk_before_the_driver_hears_of_it(
    models: Models, place: Path
) -> None:
    """The driver's fsync does not cover what another host holds."""
    trial = Trial(cases(models)["a merge on a cluster"], place).finished()
    bits = r"out\.ramstream/overlap\.zarr/run-\w+/\d+-\w+"
    acts = [act for act in trial.recorder.acts if re.fullmatch(rf"(write|sync) {bits}", act)]
    assert len(acts) > 4
    assert {act.split()[1] for act in acts if act.startswith("write")} == {
        act.split()[1] for act in acts if act.startswith("sync")
    }


def test_what_a_killed_run_wrote_down_is_on_disk_before_anything_is_built_on_it(
    models: Models, place: Path
) -> None:
    """A store was complete while the last lines of its journal were not on disk."""
    trial = Trial(Case(models.counts("counts.zarr")), place)
    trial.killed_after(r"write counts\.zarr/journal\.jsonl", 6).finished()
    assert trial.on_disk() == trial.want
    assert trial.replayed([at_the_end(trial.recorder, kept=False)]).ended == {"complete": 1}


@pytest.mark.parametrize("act", [r"new deep/counts\.zarr", r"new deep/counts\.zarr/zarr\.json"])
def test_names_that_a_killed_run_gave_in_a_store_are_on_disk_in_the_end(
    models: Models, place: Path, act: str
) -> None:
    """A store was lost, or not complete, after a run that had used it."""
    trial = Trial(Case(models.merges(store="deep/counts.zarr")), place)
    trial.killed_after(act).finished()
    assert trial.on_disk() == trial.want


def test_staged_files_of_a_killed_run_are_on_disk_before_a_line_vouches_for_them(
    models: Models, place: Path
) -> None:
    """The journal vouched for ranges of files whose names or sizes could be lost."""
    trial = Trial(Case(models.merges()), place)
    trial.killed_after(r"write out\.ramstream/out/model-00002-of-00002\.safetensors")
    trial.killed_after(r"write out\.ramstream/journal\.jsonl", 5)
    trees = trial.states(random.Random(4), subsets=4)
    tried = random.Random(4).sample(trees, 30)
    assert trial.replayed([*tried, at_the_end(trial.recorder, kept=False)]).ended == {"complete": 31}


def test_a_former_output_goes_when_the_new_one_has_its_name_for_certain(models: Models, place: Path) -> None:
    """A killed run had renamed, the next one cleared up before that was on disk."""
    trial = Trial(cases(models)["an overwrite"], place)
    trial.killed_after("new out").finished()
    trees = trial.states(random.Random(5), subsets=4)
    assert trial.replayed(trees[:30]).ended == {"complete": min(30, len(trees))}


def test_an_output_that_is_dropped_is_not_vouched_for(models: Models, place: Path) -> None:
    """With other parameters the journal went together with what it vouched for; then the first command again."""
    trial = Trial(cases(models)["a resume with other parameters"], place)
    trial.killed_after(r"new out\.ramstream/plan\.json")
    trees = trial.states(random.Random(6), subsets=8)
    trial.replayed(trees, models.merges(r=0.3))
    assert trial.ended == {"complete": len(trees)}


@pytest.mark.parametrize("name", ["a refusal", "a refusal of one scan"])
def test_a_store_that_was_set_aside_comes_back_wherever_a_refused_merge_ends(
    models: Models, place: Path, name: str
) -> None:
    """The same command said that the former store was another's, or that the output lacked files."""
    trial = Trial(cases(models)[name], place).finished()
    acts = trial.recorder.acts
    trial.begin = len(acts) - 1 - acts[::-1].index("gone out.ramstream/journal.jsonl")
    trees = trial.states(random.Random(7), subsets=1)
    assert trial.replayed(trees).ended == {"complete": len(trees)}
    assert len(trees) > 20


def test_a_store_that_a_killed_run_set_aside_is_used_again(models: Models, place: Path) -> None:
    Trial(cases(models)["a refusal"], place).killed_after(r"gone out\.ramstream/plan\.json")
    root, titles = place / "recorded", []
    assert (root / "out.ramstream" / "old.zarr").exists()

    def listen(event: Event) -> None:
        titles.extend([event.title] if isinstance(event, PassBegan) else [])

    models.merges(overwrite=True, listener=listen)(root)
    assert titles == ["merging"]
    assert [path.name for path in (root / "out.ramstream").iterdir()] == ["overlap.zarr"]


def test_what_killed_runs_left_half_made_goes_with_the_finished_one(models: Models, place: Path) -> None:
    models.stops("merging", 2)(place)
    work = place / "out.ramstream"
    (work / "overlap.zarr.new-1").mkdir()
    (work / "old.zarr.ramstream-removed").mkdir()
    for name in ("plan.json.new", "overlap.zarr.new-1/zarr.json", "old.zarr.ramstream-removed/zarr.json"):
        (work / name).touch()
    models.merges()(place)
    assert sorted(path.name for path in work.iterdir()) == ["overlap.zarr"]
    (place / "counts.zarr.new-1").mkdir()
    models.counts("counts.zarr")(place)
    assert sorted(path.name for path in place.iterdir()) == ["counts.zarr", "out", "out.ramstream"]


def test_a_store_that_another_run_finished_meanwhile_is_used(
    models: Models, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finishes a store removes what others had begun under another name."""
    begin, store = OverlapStore._begin, place / "counts.zarr"

    def overtaken(new: Path, *how: Any) -> None:
        begin(new, *how)
        monkeypatch.undo()
        monkeypatch.setattr(OverlapStore, "_begin", staticmethod(begin))
        models.counts("counts.zarr")(place)
        shutil.rmtree(new, ignore_errors=True)

    monkeypatch.setattr(OverlapStore, "_begin", staticmethod(overtaken))
    models.counts("counts.zarr")(place)
    assert list(place.iterdir()) == [store]
    assert OverlapStore(store).complete


def test_a_folder_that_is_removed_is_whole_or_gone(place: Path) -> None:
    """Half a store was no store that could be read, and the same command said so for ever."""
    for name in ("a", "b/c", "b/d"):
        (place / "it" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "it" / name).write_text(name)
    whole, recorder = found(place), Recorder(place)
    begin = len(recorder.log)
    with in_place(recorder):
        durable.remove(place / "it")
    assert list(place.iterdir()) == []
    trees = list(states(recorder, begin, random.Random(8)))
    assert len(trees) > 10
    assert whole in trees
    assert {} in trees
    assert all(tree == whole for tree in trees if "it" in tree)


def test_lines_that_were_cut_off_do_not_come_back(place: Path) -> None:
    """A torn line was cut, a shorter one written there, and behind that an old one was whole."""
    lines = [{"unit": n, "text": "x" * 700} for n in range(3)]
    journal = Journal(place / "journal.jsonl")
    journal.append(lines)
    journal.close()
    whole = (place / "journal.jsonl").read_bytes()
    (place / "journal.jsonl").write_bytes(b"\0" * 512 + whole[512:])
    recorder = Recorder(place)
    begin = len(recorder.log)
    with in_place(recorder):
        journal = Journal(place / "journal.jsonl")
        assert list(journal.replay()) == []
        journal.append([{"unit": 9, "text": "y" * 700}])
        journal.close()
    for tree in states(recorder, begin, random.Random(9)):
        put(tree, place / "replayed")
        journal = Journal(place / "replayed" / "journal.jsonl")
        assert [line["unit"] for _, line in journal.replay()] in ([], [9])
        journal.close()
