"""What a person sees: progress on a terminal and off it, plans, outcomes."""

import io
import re

import pytest
from rich.console import Console

from ramstream import console, report
from ramstream.engine.events import Advanced, Event, Note, PassBegan, PassEnded
from ramstream.statistics import lambda_text

EVENTS: list[Event] = [
    Note("look here"),
    PassBegan("counting", 120),
    Advanced(90, 2_000_000_000),
    Advanced(30, 1_000_000_000),
    PassEnded(),
]


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool, **how: bool) -> str:
    """What the listener prints about EVENTS."""
    out = io.StringIO()
    fake = Console(file=out, force_terminal=terminal, width=80)
    monkeypatch.setattr(console, "Console", lambda **_: fake)
    with console.progress(**{"quiet": False, **how}) as listener:
        for event in EVENTS:
            listener(event)
    return out.getvalue()


def test_off_a_terminal_a_pass_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert lines[0] == "note: look here"
    assert re.fullmatch(r"counting: 3 GB read, [\d.e+]+ .B/s, \d+ MB memory", lines[1])
    assert len(lines) == 2


def test_verbose_is_a_line_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=True, verbose=True).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "note: look here",
        "counting: 75 %",
        "counting: 100 %",
        "counting: 3 GB read",
    ]


def test_quiet_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, terminal=True, quiet=True) == ""


def test_a_terminal_shows_a_bar_rate_memory_and_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=True)
    for word in ("look here", "counting", "100 %", "B/s", "memory", "━"):
        assert word in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (4_200_000_000, "4.2 GB"), (5e12, "5 TB"), (5e16, "5e+04 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert report.size(nbytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (12_000, "12 k"), (494e6, "494 M"), (7.6e9, "7.6 G"), (1.2e13, "1.2e+04 G")]
)
def test_numbers(count: float, text: str) -> None:
    assert report.number(count) == text


def test_a_lambda_of_each_tensor_is_shown_as_a_range() -> None:
    assert lambda_text({"a": [1.0, 1.1], "b": [1.2, 1.05]}, 1) == "1.0500 to 1.1000"
    assert lambda_text([], 0) == "none"
