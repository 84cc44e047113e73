"""The bench: verdicts, turns, earlier figures, and that it measures what it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from benchmark import cgroup  # noqa: E402
from benchmark.groups import GROUPS  # noqa: E402
from benchmark.lines import Goal, Line, at_least, at_most, skipped, spread  # noqa: E402
from benchmark.models import Models, write_many  # noqa: E402
from benchmark.processes import Program, take_turns, timed  # noqa: E402
from benchmark.report import Report, cells, machine  # noqa: E402
from make_checkpoint import Recipe  # noqa: E402


def ignore(_: str) -> None:
    pass


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


# Lines


@pytest.mark.parametrize(
    ("measured", "goal", "verdict"),
    [
        (1.25, at_most(1.25), "holds"),
        (1.26, at_most(1.25), "short"),
        (-3.0, at_most(10), "holds"),
        (18.0, at_least(18), "holds"),
        (17.9, at_least(18), "short"),
        (1.0, None, "information"),
        (None, at_most(1), "skipped"),
        (None, None, "skipped"),
    ],
)
def test_a_goal_holds_up_to_its_bound(measured: float | None, goal: Goal | None, verdict: str) -> None:
    assert Line("a line", measured, goal=goal).verdict == verdict


def test_a_line_is_plain_data_and_a_row() -> None:
    line = Line("ram", 2.0, "s", at_most(1.5), "why", {"ram": [2.0, 2.5]}).as_dict()
    assert line == {
        "line": "ram",
        "goal": "<= 1.5",
        "measured": 2.0,
        "unit": "s",
        "ratio": pytest.approx(4 / 3),
        "verdict": "short",
        "note": "why",
        "raw": {"ram": [2.0, 2.5]},
    }
    assert cells(line) == ["ram", "<= 1.5 s", "2.00 s", "1.33", "short", "why"]


def test_what_was_skipped_or_is_to_be_zero_has_no_ratio() -> None:
    assert cells(skipped("a", "x", at_least(18), "no peer").as_dict()) == [
        "a", ">= 18 x", "-", "", "skipped", "no peer"
    ]  # fmt: skip
    assert Line("a", 0.0, "", at_most(0)).ratio is None


def test_spread_is_the_largest_above_the_smallest() -> None:
    assert spread([1.0, 1.2, 1.1]) == pytest.approx(20)


# Earlier figures


def about(date: str) -> dict[str, Any]:
    return {"date": date, "parameters": 5, "rounds": 1, "cold": "drop_caches", "extra": []}


def saved(path: Path, report: Report) -> dict[str, Any]:
    report.save(path, GROUPS)
    return dict(json.loads(path.read_text()))


def test_groups_not_measured_are_taken_over_with_their_date(tmp_path: Path) -> None:
    earlier, path = Report(), tmp_path / "bench.json"
    earlier.add("warm", about("2026-01-01"), [Line("old", 1.0)])
    earlier.add("start", about("2026-01-01"), [Line("old", 1.0)])
    saved(path, earlier)
    report = Report()
    report.take_over(path)
    report.add("warm", about("2026-02-02"), [Line("new", 2.0)])
    groups = saved(path, report)["groups"]
    found = [(name, group["date"], group["lines"][0]["line"]) for name, group in groups.items()]
    assert found == [("start", "2026-01-01", "old"), ("warm", "2026-02-02", "new")]
    assert report.table(GROUPS).row_count == 4


def test_figures_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    saved(path, Report({**machine(), "cores": 1000}))
    with pytest.raises(SystemExit, match="cores 1000, here"):
        Report().take_over(path)


# Processes


def test_programs_take_turns_and_the_first_round_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    add = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
    one, two = (Program(name, [*python(add), str(log), name]) for name in "ab")
    two.rounds = 1
    take_turns([one, two], 2, ignore)
    assert log.read_text() == "ababa"
    assert (len(one.runs), len(two.runs)) == (2, 1)


def test_leftovers_are_gone_before_and_after(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = Program("makes a folder", [*python("import os, sys; os.mkdir(sys.argv[1])"), str(out)], [out])
    take_turns([program], 2, ignore)
    assert not out.exists()


def test_a_run_knows_its_peak_and_what_it_printed() -> None:
    run = timed(python("held = b'1' * 200_000_000; print('{\"seconds\": 7}')"))
    assert 200e6 < run.peak < 300e6
    assert run.printed == {"seconds": 7}


def test_a_failure_shows_what_was_said() -> None:
    with pytest.raises(SystemExit, match=r"exited 3:\nno such luck"):
        timed(python("import sys; sys.stderr.write('no such luck'); sys.exit(3)"))


# Models and cgroups


def test_models_are_made_once_and_kept_if_asked(tmp_path: Path) -> None:
    recipe = Recipe(20_000, agents=1)
    kept = Models(tmp_path, True, ignore)
    inode = kept.get(recipe).base[0].stat().st_ino
    kept.close()
    found = Models(tmp_path, False, ignore)
    with found.briefly(recipe) as model:
        assert model.base[0].stat().st_ino == inode
    with found.briefly(Recipe(3000, agents=1, tiny=10), write_many) as model:
        assert len(model.inputs) == 2
    found.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ramstream-bench-20000-x2-bf16"]


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(SystemExit, match=r"1\.0 GB are needed and 1\.0 GB are free"):
        Models(tmp_path, False, ignore).get(Recipe(20_000))
    assert not any(tmp_path.iterdir())


def test_own_cgroup_of_either_version() -> None:
    mixed = "4:memory:/a/b\n1:cpu:/\n0::/\n"
    assert cgroup.parent("own", mixed, Path("/sys")) == Path("/sys/memory/a/b")
    assert cgroup.parent("own", "0::/user.slice\n", Path("/sys")) == Path("/sys/user.slice")
    assert cgroup.parent("/somewhere") == Path("/somewhere")
    with pytest.raises(cgroup.NotPossible, match="--cgroup"):
        cgroup.parent(None)


@pytest.mark.parametrize("name", ["memory.limit_in_bytes", "memory.max"])
def test_limit_is_written_in_either_version(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    cgroup.set_limit(tmp_path, 5)
    assert (tmp_path / name).read_text() == "5\n"


def test_a_folder_that_is_no_cgroup_is_left_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(cgroup.NotPossible, match="no memory controller"), cgroup.limited(tmp_path, 5):
        pass
    with pytest.raises(cgroup.NotPossible, match="No such file"), cgroup.limited(tmp_path / "none", 5):
        pass
    assert not any(tmp_path.iterdir())


# The whole

LINES = {
    "start": ["--help", "merge of 1 MB", "merge of 1 MB, the very first", "stats STORE"],
    "store": [
        "one pass from a store / two passes",
        "read by ten merges from a store / inputs",
        "read to make the store / inputs",
        *(
            f"cost of a store, {how}, {state}"
            for how in ("scattered", "clustered")
            for state in ("cold", "warm")
        ),
    ],
}


@pytest.mark.slow
def test_bench_writes_every_line_and_removes_its_data(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "bench.json"
    data.mkdir()
    words = ["--parameters", "200000", "--rounds", "1", "--cold", "fadvise", "--only", ",".join(LINES)]
    words += ["--data", str(data), "--out", str(out), "--", "--workers", "1"]
    command = [sys.executable, str(TOOLS / "bench.py"), *words]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(out.read_text())
    assert set(report["machine"]) == {"cpu", "cores", "memory_gib", "kernel", "python"}
    for group, names in LINES.items():
        found = report["groups"][group]
        assert (found["parameters"], found["rounds"], found["extra"]) == (200_000, 1, ["--workers", "1"])
        assert [line["line"] for line in found["lines"]] == names
        for line in found["lines"]:
            assert line["measured"] is not None
            assert line["verdict"] in ({"holds", "short"} if line["goal"] else {"information"})
            assert line["raw"]
            assert line["line"] in printed
    assert not any(data.iterdir())
