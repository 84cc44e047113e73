"""The worked example of the specification, through the whole program: files in, files out."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ramstream import Checkpoint, OverlapStore, Ram, RamPlus, merge, plan_merge, stats_of
from ramstream.queries import overlap_counts

EXAMPLE = {
    "base": (0, 0, 0, 0, 0),
    "A": (1, 2, 0, 3, 0),
    "B": (3, 0, 0, 1, 0),
    "C": (0, 0, 5, 2, 0),
}
MERGED = {"ram": (2, 2, 5, 2, 0), "ram-plus": (2, 2.4, 5.5, 2, 0)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Checkpoint]:
    """Base and agents of one float32 tensor each."""
    for name, values in EXAMPLE.items():
        (tmp_path / name).mkdir()
        tensors = {"w": np.array(values, np.float32)}
        safetensors.numpy.save_file(tensors, tmp_path / name / "model.safetensors")
    return [Checkpoint.open(tmp_path / name) for name in EXAMPLE]


@pytest.mark.parametrize("method", [Ram(), RamPlus(r=0.1, alpha=2.0)], ids=lambda method: method.name())
def test_the_worked_example_to_the_bit(checkpoints: list[Checkpoint], tmp_path: Path, method: Ram) -> None:
    base, *agents = checkpoints
    outcome = merge(plan_merge(base, agents, method), tmp_path / "out")
    merged = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert merged.tobytes() == np.array(MERGED[method.name()], np.float32).tobytes()
    assert outcome.summary["moved_by_lambda"] == (2 if method.needs_counts else 0)
    stats = outcome.summary["statistics"]
    assert stats["counts"] == [1, 2, 1, 1]
    assert [agent["shared"] for agent in stats["agents"]] == [2, 2, 1]
    assert [agent["unique"] for agent in stats["agents"]] == [1, 0, 1]
    assert [agent["rho"] for agent in stats["agents"]] == [2.0, "inf", 1.0]
    assert stats["lambda"] == ([1.2, 1.2, 1.1] if method.needs_counts else [1.0, 1.0, 1.0])
    store = OverlapStore(tmp_path / "out.ramstream" / "overlap.zarr")
    assert overlap_counts(store, "w").compute().tolist() == [2, 1, 1, 3, 0]
    assert stats_of(tmp_path / "out") == stats
