"""The structure that design and README promise: imports point down, modules stay small, start-up stays light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ramstream

PACKAGE = Path(ramstream.__file__).parent

RANKS = {
    "errors": 0,
    "priority": 1,
    "settings": 1,
    "types": 1,
    "tallies": 2,
    "memory": 2,
    "durable": 2,
    "methods": 2,
    "quantiles": 2,
    "kernels": 3,
    "manual": 3,
    "checkpoint": 3,
    "journal": 3,
    "plan": 4,
    "config": 5,
    "statistics": 5,
    "overlap": 5,
    "writer": 5,
    "folder": 5,
    "record": 6,
    "planning": 7,
    "queries": 7,
    "verify": 7,
    "engine": 7,
    "report": 8,
    "console": 9,
    "commands": 10,
    "cli": 11,
    "__main__": 12,
}
"""A module imports only modules of a lower rank; inside a package, its own. `__init__` names its exports lazily."""

SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py" and "__pycache__" not in path.parts
)


def home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """First components below `ramstream` that a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "ramstream":
            names = [f"ramstream.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("ramstream.")}
    return found


def test_every_module_has_a_rank() -> None:
    assert {home(path) for path in SOURCES} == set(RANKS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = home(path)
    for other in imported(path) - {here}:
        assert RANKS[other] < RANKS[here], (
            f"{here} (rank {RANKS[here]}) imports {other} (rank {RANKS[other]})"
        )


def test_methods_and_kernels_know_no_files() -> None:
    for path in SOURCES:
        if home(path) in ("methods", "kernels", "statistics", "memory"):
            assert not {"checkpoint", "overlap", "writer", "folder", "journal", "durable"} & imported(path)


def test_a_method_imports_no_other_method_but_what_it_extends() -> None:
    inherits = {"ram_plus": {"ram"}, "ram_ties": {"ram"}, "dare_ties": {"dare_linear"}}
    for path in (PACKAGE / "methods").glob("*.py"):
        modules = {
            node.module.rsplit(".", 1)[-1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ramstream.methods.")
        }
        pieces = {"_sums"}  # formulas that several methods are made of, and no method
        assert modules - pieces <= inherits.get(path.stem, set())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_is_longer_than_350_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350


def loaded_after(code: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after `code`."""
    script = (
        f"import sys\n{code}\nimport json\nprint(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not {"torch", "numba", "numpy", "zarr", "dask", "yaml"} & loaded_after("import ramstream")


def test_help_loads_nothing_heavy() -> None:
    code = (
        "from ramstream.cli import cli\n"
        "for words in ([], ['merge'], ['methods'], ['stats'], ['verify']):\n"
        "    try: cli([*words, '--help'])\n"
        "    except SystemExit: pass"
    )
    assert not {"torch", "numba", "numpy", "zarr", "dask", "yaml"} & loaded_after(code)


def test_planning_and_running_on_the_cpu_load_no_torch() -> None:
    assert "torch" not in loaded_after("import ramstream.planning, ramstream.engine.worker, ramstream.verify")


def test_a_question_to_a_store_loads_no_kernels() -> None:
    assert not {"torch", "numba", "dask"} & loaded_after("import ramstream.commands, ramstream.queries")


def test_public_names_exist_and_are_listed() -> None:
    for name in ramstream.__all__:
        assert getattr(ramstream, name) is not None
    assert sorted(ramstream.__all__) == sorted(ramstream._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ramstream.nonsense
