"""kill -9, SIGTERM, Ctrl-C at random moments: the same command again ends with the same bytes, nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import SMALL, is_one_of, vouched, work_of
from forks import Forks
from runs import contents, family, write_family

UNITS = 23

METHODS: dict[str, list[object]] = {
    "ram-plus": ["-p", "r=0.5"],
    "ties": ["-m", "ties", "-p", "density=0.3", "--max-norm", "largest"],
    "ram": ["-m", "ram", "--no-keep-store"],
}

PHASES = {
    "beginning": 15,
    "counting": 15,
    "surveying": 15,
    "merging": 25,
    "finishing": 15,
    "publishing": 5,
    "tidying up": 5,
}
"""How many kills must have found a run there, of 200."""

ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}
"""What a run ends with."""


def lines(journal: Path) -> int:
    """Whole lines of a journal."""
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@dataclass
class Victim:
    """Merges into one folder, one after the other over the last, that are killed until they are done."""

    forks: Forks
    paths: list[Path]
    out: Path
    wanted: dict[str, dict[str, Any]]
    rng: random.Random
    old: dict[str, Any] = field(default_factory=dict)
    """The output that was there before the present merge."""
    method: str = "ram-plus"
    phases: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)
    fresh: int = 0
    """Kills of runs that had nothing to go on from."""
    done: int = 0
    """Merges that were ended."""

    def words(self) -> list[object]:
        """The command of the present merge; workers are another number each time."""
        more = ["--overwrite", "--workers", self.rng.choice([1, 2, 3])]
        return ["merge", *self.paths, "-o", self.out, "-q", "--device", "cpu", *METHODS[self.method], *more]

    @property
    def work(self) -> Path:
        return work_of(self.out)

    def phase(self) -> str:
        """How far the run is, or was when it ended."""
        counted, merged = vouched(self.out)
        if not (self.work / "plan.json").exists():
            return "beginning"
        if self.is_new():
            return "tidying up"
        if (self.work / "old").exists() or b'{"publishing"' in read(self.work / "journal.jsonl"):
            return "publishing"
        if merged >= UNITS:
            return "finishing"
        if merged:
            return "merging"
        if lines(self.work / "survey.jsonl") > 1:
            return "surveying"
        return "counting" if counted else "beginning"

    def reached(self) -> Callable[[], bool]:
        """A moment to wait for: one of a phase that was hit least often, of those that the method has."""
        n = self.rng.randrange(1, UNITS - 2)
        count, merge = self.work / "overlap.zarr" / "journal.jsonl", self.work / "journal.jsonl"
        moments: dict[str, Callable[[], bool]] = {
            "beginning": self.work.exists,
            "merging": lambda: lines(merge) > n,
            "finishing": lambda: lines(merge) > UNITS + 1,
            "publishing": lambda: b'{"publishing"' in read(merge),
            "tidying up": lambda: not (self.work / "out").exists() and self.is_new(),
        }
        if self.method == "ram-plus":
            moments["counting"] = lambda: lines(count) > n
        if self.method == "ties":
            moments["surveying"] = lambda: lines(self.work / "survey.jsonl") > n
        hits = {phase: self.phases[phase] / PHASES[phase] + self.rng.random() for phase in moments}
        return moments[min(hits, key=lambda phase: hits[phase])]

    def kill(self) -> bool:
        """Start the command and end it at a random moment; whether it was there to be ended."""
        number = min(ENDS, key=lambda number: self.signals[number.name] + self.rng.random())
        fresh = not (self.work / "plan.json").exists()
        pid = self.forks.start(*self.words(), slow=self.rng.choice([0.001, 0.002]))
        ready, until = self.reached(), time.monotonic() + 3
        while not ready() and not self.is_complete() and time.monotonic() < until:
            time.sleep(0.0005)
        time.sleep(self.rng.random() ** 2 * 0.03)
        os.kill(pid, number)
        code, said = self.forks.wait(pid)
        if code == 0:
            return False
        assert code in (ENDS[number], -number), (number, code, said)
        if code != ENDS[number]:  # its handler was not there yet
            return False
        assert said.strip() == (
            "" if number == signal.SIGKILL else "stopped; the same command goes on from here"
        )
        self.phases[self.phase()] += 1
        self.signals[number.name] += 1
        self.fresh += fresh
        return True

    def is_new(self) -> bool:
        """Whether the output of the present merge has its name."""
        return is_one_of(self.out, self.wanted[self.method])

    def is_complete(self) -> bool:
        """Whether nothing is left to be done."""
        return self.is_new() and not (self.work / "plan.json").exists()

    def check(self) -> None:
        """The former output is there until the new one is."""
        if self.old:
            places = (
                is_one_of(self.out, self.old, self.wanted[self.method]),
                is_one_of(self.work / "old", self.old),
            )
            assert any(places)

    def finish(self) -> None:
        """The command to its end; the next merge is another one."""
        assert self.forks.run(*self.words()) == (0, "")
        assert contents(self.out) == self.wanted[self.method]
        left = {path.name for path in self.work.iterdir()} if self.work.exists() else set()
        assert left <= {"overlap.zarr", "lock"}
        self.old, self.done = contents(self.out), self.done + 1
        self.method = self.rng.choice([method for method in METHODS if method != self.method])
        if self.rng.random() < 0.4:
            shutil.rmtree(self.out)
            shutil.rmtree(self.work, ignore_errors=True)
            self.old = {}


def read(path: Path) -> bytes:
    """What is in a file, nothing where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_kills_at_random_moments_lose_nothing(number: int, tmp_path: Path) -> None:
    shapes = {
        "a": ("F8_E4M3", (10 * SMALL + 77,)),
        "ids": ("I64", (99,)),
        "b": ("BF16", (3, 501)),
        "c": ("F8_E4M3", (11 * SMALL,)),
    }
    paths = write_family(tmp_path / "in", *family(shapes, agents=2, seed=5), shards=2)
    with Forks(tmp_path / "forks") as forks:
        wanted = {}
        for method, words in METHODS.items():
            out = tmp_path / method
            assert forks.run("merge", *paths, "-o", out, "-q", "--device", "cpu", *words) == (0, "")
            wanted[method] = contents(out)
        victim = Victim(forks, paths, tmp_path / "place" / "out", wanted, random.Random(2026))
        victim.out.parent.mkdir()
        began, kills = time.monotonic(), 0
        while kills < number:
            killed = victim.kill()
            kills += killed
            victim.check()
            if not killed or victim.rng.random() < 0.2:
                victim.finish()
        victim.finish()
    print(
        f"{kills} kills in {time.monotonic() - began:.0f} s: {dict(victim.phases)}, {dict(victim.signals)}, "
        f"{victim.fresh} of fresh runs, {victim.done} merges ended"
    )
    if number == 200:
        assert {phase: n for phase, n in PHASES.items() if victim.phases[phase] < n} == {}
    assert len(victim.phases) >= 3
    assert min(victim.signals[end.name] for end in ENDS) >= number // 5
    assert victim.fresh >= number // 10
    assert victim.done >= number // 10


@pytest.mark.slow
def test_signals_while_all_is_loaded_and_later_end_a_run_at_once(tmp_path: Path) -> None:
    """Whole processes, from their first moment on; before `ramstream` is there the system's own end is as good."""
    rng, ended = random.Random(5), Counter[int]()
    shapes = {"a": ("F8_E4M3", (3 << 22,)), "b": ("BF16", (3, 501))}
    paths = write_family(tmp_path / "in", *family(shapes, agents=2, seed=5))
    words = ["merge", *paths, "-q", "--device", "cpu", "-o"]
    command = [sys.executable, "-m", "ramstream", *map(str, words)]
    # Coverage takes longer to start than Python, and knows nothing of signals.
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    subprocess.run([*command, tmp_path / "good"], check=True, capture_output=True)
    for attempt in range(12):
        number = (signal.SIGINT, signal.SIGTERM)[attempt % 2]
        heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(
            [*command, tmp_path / "out"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=heeding,
            env=unmeasured,
        )
        time.sleep(rng.uniform(0.05, 1.0))
        process.send_signal(number)
        sent = time.monotonic()
        said = process.communicate(timeout=30)[1].decode().strip()
        assert time.monotonic() - sent < 10
        ended[process.returncode] += 1
        if process.returncode == ENDS[number]:
            assert said == "stopped; the same command goes on from here"
        else:
            assert process.returncode in (0, -number) or said.startswith("Fatal Python error"), said
    subprocess.run([*command, tmp_path / "out"], check=True, capture_output=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "good")
    assert ended[130] + ended[143] >= 5, ended
