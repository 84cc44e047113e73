"""The synthetic checkpoints that the bench and the slow tests run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import make_checkpoint  # noqa: E402
from make_checkpoint import FORMATS, PUBLISHED, Recipe, write  # noqa: E402

SMALL = 200_000


def flat(folder: Path) -> torch.Tensor:
    """All elements of a checkpoint in float64, tensor names in order."""
    tensors = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def patterns(base: Path, agents: list[Path]) -> torch.Tensor:
    """Percent of elements by set of agents that moved them by more than 1e-5."""
    before = flat(base)
    sets = sum(((flat(agent) - before).abs() > 1e-5).long() << t for t, agent in enumerate(agents))
    return torch.bincount(sets, minlength=1 << len(agents)) / before.numel() * 100


def header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.mark.parametrize("dtype", FORMATS)
def test_scattered_changes_follow_the_published_profile(dtype: str, tmp_path: Path) -> None:
    found = patterns(*write(tmp_path, Recipe(SMALL, dtype=dtype)))
    assert torch.allclose(found, torch.tensor(PUBLISHED), atol=0.4)


def test_clustered_changes_keep_the_profile_but_not_its_evenness(tmp_path: Path) -> None:
    base, agents = write(tmp_path, Recipe(2_000_000, clustered=True, seed=3))
    assert torch.allclose(patterns(base, agents), torch.tensor(PUBLISHED), atol=8)
    moved = (flat(agents[1]) != flat(base)).double()
    shares = moved[: len(moved) // 1000 * 1000].reshape(-1, 1000).mean(1)
    assert shares.std() > 0.1  # independent elements would give 0.016


def test_agents_move_in_small_steps_and_weights_look_trained(tmp_path: Path) -> None:
    base, agents = write(tmp_path, Recipe(SMALL))
    name = "model.layers.0.mlp.up_proj.weight"
    before, after = (load_file(folder / "model.safetensors")[name] for folder in (base, agents[2]))
    steps = (after.view(torch.int16).int() - before.view(torch.int16).int()).abs()
    assert sorted(steps.unique().tolist()) == [0, 1, 2, 3, 4]
    assert before.double().std().item() == pytest.approx(0.02, rel=0.1)
    norms = load_file(base / "model.safetensors")["model.norm.weight"]
    assert norms.double().mean().item() == pytest.approx(1, rel=0.1)


def test_files_of_base_and_agents_differ_in_data_only(tmp_path: Path) -> None:
    base, agents = write(tmp_path, Recipe(SMALL, agents=2, dtype="f16", shard_size=100_000))
    index = json.loads((base / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(files) > 2
    assert files == sorted(set(index["weight_map"].values()))
    for agent in agents:
        assert sorted(path.name for path in agent.iterdir()) == sorted(path.name for path in base.iterdir())
        assert all(header(agent / name) == header(base / name) for name in files)
        assert all((agent / name).stat().st_size == (base / name).stat().st_size for name in files)
    assert {t.dtype for name in files for t in load_file(base / name).values()} == {torch.float16}


def test_size_largest_and_tiny_are_as_asked(tmp_path: Path) -> None:
    usual = make_checkpoint.tensors(Recipe(500_000_000))
    assert sum(tensor.size for tensor in usual) == pytest.approx(5e8, rel=1e-3)
    huge = make_checkpoint.tensors(Recipe(600_000_000, largest=10**9))
    assert max(tensor.size * 2 for tensor in huge) == pytest.approx(1e9, rel=1e-3)
    base, _ = write(tmp_path, Recipe(20_000, agents=1, tiny=500))
    tensors = load_file(base / "model.safetensors")
    assert len(tensors) == 500
    assert {t.dim() for t in tensors.values()} == {0, 1, 2}


def test_command_gives_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    for out in ("one", "two"):
        options = ["--parameters", "0.1M", "--agents", "1", "--seed", "7"]
        subprocess.run(
            [sys.executable, TOOLS / "make_checkpoint.py", tmp_path / out, *options], check=True, stdout=-3
        )
    for name in ("base", "agent-1"):
        one, two = (tmp_path / out / name / "model.safetensors" for out in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
