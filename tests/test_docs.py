"""The README names every command, option, method, parameter and exit code, and the two commands exist."""

import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import click
import numpy as np
import pytest
from numpy.typing import NDArray
from runs import Tensor, plan_of, read_weights, run, write_family

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


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#)", README, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def merged(root: Path, agents: NDArray[np.float32], method: str, **parameters: object) -> NDArray[np.float32]:
    """A base of zeros and one tensor, merged; a row of deltas an agent."""
    folders = [
        {"w": Tensor("F32", row.shape, row.view(np.uint32))} for row in (np.zeros_like(agents[0]), *agents)
    ]
    paths = write_family(root, folders[0], folders[1:])
    run(plan_of(paths, method, **parameters), root / "out")
    return np.frombuffer(read_weights(root / "out")["w"], np.float32)


def test_the_priorities_in_the_readme_are_what_merges_give(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (?:agree|conflict|alone) \|(.*)\|$", section("Priorities"), re.MULTILINE)
    table = np.array([[float(cell) for cell in row.split("|")] for row in rows], np.float32)
    assert table.shape == (4, 4)
    assert (table[:, 0] * table[:, 1] < 0).sum() == 2
    agents = np.ascontiguousarray(table[:, :2].T)
    ram, papo = merged(tmp_path / "ram", agents, "ram"), merged(tmp_path / "papo", agents, "papo", primary=1)
    np.testing.assert_allclose(ram, table[:, 2], rtol=1e-6)
    np.testing.assert_allclose(papo, table[:, 3], rtol=1e-6)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Methods in a folder beside the others."""
    methods.__path__.append(str(folder))
    try:
        yield
    finally:
        methods.__path__.remove(str(folder))


def test_the_method_in_the_readme_is_one_file_that_works(tmp_path: Path) -> None:
    code = re.search(
        r"(^    \"\"\"Larger:.*?return best$)", section("A method of your own"), re.MULTILINE | re.DOTALL
    )
    assert code
    assert len(textwrap.dedent(code[1]).splitlines()) <= 14
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "larger.py").write_text(textwrap.dedent(code[1]))
    agents = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    with installed(tmp_path / "methods"):
        found = merged(tmp_path, agents, "larger", scale=0.5)
    largest = agents[np.abs(agents).argmax(axis=0), np.arange(1000)]
    assert np.array_equal(found, largest * np.float32(0.5))
