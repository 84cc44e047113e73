"""Exit codes stand on the classes, and the command line turns every error into one message."""

import signal
import sys

import pytest

from ramstream import cli, errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.RamstreamError, 1),
        (errors.PlanError, 3),
        (errors.BudgetError, 4),
        (errors.CheckpointError, 5),
        (errors.JournalError, 6),
        (errors.IntegrityError, 7),
        (errors.DiskFullError, 8),
    ],
)
def test_an_error_ends_with_its_code_and_message(
    kind: type[errors.RamstreamError],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, kind("what is wrong")) == code
    assert capsys.readouterr().err == "error: what is wrong\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, KeyboardInterrupt()) == 130
    assert "goes on" in capsys.readouterr().err


def test_a_usage_error_is_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ramstream", "merge", "--nonsense"])
    assert exit_code() == 2
    assert "No such option" in capsys.readouterr().err


def test_sigterm_is_143(monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(**_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cli, "cli", terminated)
    assert exit_code() == 143


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "cli", fail)
    return exit_code()


def exit_code() -> int:
    before, hook = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    try:
        with pytest.raises(SystemExit) as exited:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook
    assert isinstance(exited.value.code, int)
    return exited.value.code
