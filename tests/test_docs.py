"""The README names every command, option, method, parameter and exit code, and the two commands exist."""

import os
from dataclasses import fields
from pathlib import Path

import click
import pytest

from ramstream import cli, errors, methods

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = cli.cli.commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_readme(name: str) -> None:
    assert f"ramstream {name}" in README
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option):
            for spelling in (*parameter.opts, *parameter.secondary_opts):
                assert f"`{spelling}" in README or f" {spelling}" in README, f"{name} {spelling}"


def test_every_method_and_parameter_is_in_the_readme() -> None:
    for name, method in methods.available().items():
        assert f"`{name}`" in README
        for field in fields(method):
            assert f"{field.name}=" in README, f"{name}: {field.name}"


def test_every_exit_code_is_in_the_readme() -> None:
    kinds = errors.RamstreamError.__subclasses__()
    assert sorted(kind.exit_code for kind in kinds) == [3, 4, 5, 6, 7, 8]
    for kind in kinds:
        assert f"\n| {kind.exit_code} |" in README


@pytest.mark.parametrize("command", ["tools/demo", "tools/check"])
def test_the_two_commands_exist_and_ci_runs_the_second(command: str) -> None:
    assert f"./{command}" in README
    assert os.access(ROOT / command, os.X_OK)
    assert "./tools/check" in (ROOT / ".ci/run").read_text()
