"""The README names every command, option, method, parameter and exit code, and the two commands exist."""

import importlib
import os
import re
import sys
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


BROKEN = {
    "branches": "if block.deltas[0] > 0:\n            return block.base\n        return block.deltas[0]",
    "none": "return None",
    "raises": "return block.deltas[7]",
    "one_number": "return block.p['scale']",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_method_of_ones_own_that_is_wrong_is_a_clear_error(tmp_path: Path, name: str) -> None:
    text = (
        "from dataclasses import dataclass\nfrom ramstream.methods import Method\n\n@dataclass(frozen=True)\n"
    )
    text += f"class Wrong(Method):\n    def merge(self, block):\n        {BROKEN[name]}\n"
    (tmp_path / f"{name}.py").write_text(text)
    with installed(tmp_path), pytest.raises(errors.UsageError, match=name.replace("_", "-")):
        merged(tmp_path / "in", np.ones((2, 8), np.float32), name.replace("_", "-"))


def test_a_method_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("class Half(Method:\n")
    with (
        installed(tmp_path),
        pytest.raises(errors.UsageError, match=r"half\.py cannot be loaded: SyntaxError"),
    ):
        methods.create("ram", {})


def test_other_code_under_the_same_name_does_not_go_on_with_the_work_of_the_former(tmp_path: Path) -> None:
    text = (
        "from dataclasses import dataclass\nfrom ramstream.methods import Method\n\n@dataclass(frozen=True)\n"
    )
    text += "class Changing(Method):\n    def merge(self, block):\n        return FACTOR * block.deltas[0]\n"
    base, agent = (Tensor("F32", (8,), np.full(8, x, np.float32).view(np.uint32)) for x in (0, 1))
    paths = write_family(tmp_path / "in", {"w": base}, [{"w": agent}])
    with installed(tmp_path):
        for factor in (1.0, 0.5):
            (tmp_path / "changing.py").write_text(text.replace("FACTOR", str(factor)))
            importlib.invalidate_caches()
            sys.modules.pop("ramstream.methods.changing", None)
            outcome, _ = run(plan_of(paths, "changing"), tmp_path / "out", overwrite=True)
            assert not outcome.already_complete
            assert np.frombuffer(read_weights(tmp_path / "out")["w"], np.float32).tolist() == [factor] * 8
            assert run(plan_of(paths, "changing"), tmp_path / "out")[0].already_complete
