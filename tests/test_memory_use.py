"""Real runs stay inside what was projected, and what was projected inside what was allowed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder that does not outlive the test: these are gigabytes."""
    yield tmp_path / "data"
    shutil.rmtree(tmp_path / "data")


def make(data: Path, *words: str) -> list[str]:
    subprocess.run(
        [sys.executable, TOOLS / "make_checkpoint.py", data, *words], check=True, capture_output=True
    )
    return [str(data / "base"), *sorted(str(path) for path in data.glob("agent-*"))]


def merge(data: Path, sources: list[str], *words: str, cache: Path | None = None) -> dict[str, Any]:
    """Run `ramstream merge` as a process of its own; its JSON, with memory read inside the process."""
    command = [sys.executable, "-m", "ramstream", "merge", *sources, "-o", str(data / "out"), "--json", "-q"]
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": str(cache)} if cache else {})}
    run = subprocess.run([*command, *words], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


CASES = {
    "bf16": (("--parameters", "20M"), ()),
    "f32, mapped": (("--parameters", "20M", "--dtype", "f32"), ("--io", "mmap")),
    "f64": (("--parameters", "10M", "--dtype", "f64"), ()),
    "f8 to f64": (("--parameters", "20M", "--dtype", "f8"), ("--dtype", "f64")),
    "16 agents": (("--parameters", "10M", "--agents", "16"), ()),
    "40 agents": (("--parameters", "5M", "--agents", "40"), ("--workers", "1")),
    "ram in one scan": (("--parameters", "20M"), ("-m", "ram")),
    "the torch form": (("--parameters", "10M"), ("--device", "cpu:torch")),
    "five workers": (("--parameters", "40M"), ("--workers", "5")),
    "thousands of tensors": (("--parameters", "10M", "--tiny", "5000"), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "words"), CASES.values(), ids=CASES.keys())
def test_measured_is_at_most_projected(data: Path, model: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = merge(data, make(data, *model), *words)
    assert done["peak_memory"] <= done["projected_memory"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f64"])
def test_a_first_run_that_compiles_its_kernels_is_inside_too(data: Path, tmp_path: Path, dtype: str) -> None:
    done = merge(data, make(data, "--parameters", "5M", "--dtype", dtype), cache=tmp_path / "cache")
    assert done["peak_memory"] <= done["projected_memory"]


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["", "first run"])
@pytest.mark.parametrize("kind", ["adapter", "float8"])
def test_computed_tensors_are_inside_too(kind: str, first: bool, data: Path, tmp_path: Path) -> None:
    """A rank-64 adapter, or float8 with scales, of a tensor larger than what is left of the budget."""
    rows, columns = 48_000, 2048
    rng = np.random.default_rng(5)
    weight = rng.integers(0, 1 << 15, (rows, columns), np.uint16) & np.uint16(0x3FFF)
    data.mkdir()
    for name in ("base", "agent-1"):
        (data / name).mkdir()
    if kind == "adapter":
        save(data / "base" / "model.safetensors", {"m.weight": ("BF16", weight)})
        a, b = rng.standard_normal((64, columns)), rng.standard_normal((rows, 64))
        factors = {"A": a.astype(np.float32), "B": b.astype(np.float32)}
        tensors = {f"base_model.model.m.lora_{side}.weight": ("F32", f) for side, f in factors.items()}
        save(data / "agent-1" / "adapter_model.safetensors", tensors)
        config = {"peft_type": "LORA", "r": 64, "lora_alpha": 64, "target_modules": ["m"]}
        (data / "agent-1" / "adapter_config.json").write_text(json.dumps(config))
    else:
        for k, name in enumerate(("base", "agent-1")):
            scale = np.full((rows // 128, columns // 128), 0.01, np.float32)
            stored = (weight >> 8).astype(np.uint8) ^ np.uint8(k)
            tensors = {"m.weight": ("F8_E4M3", stored), "m.weight_scale_inv": ("F32", scale)}
            save(data / name / "model.safetensors", tensors)
    sources = [str(data / name) for name in ("base", "agent-1")]
    done = merge(data, sources, cache=tmp_path / "cache" if first else None)
    assert done["peak_memory"] <= done["projected_memory"]


def save(path: Path, tensors: dict[str, tuple[str, Any]]) -> None:
    table, end = {}, 0
    for name, (dtype, values) in tensors.items():
        begin, end = end, end + values.nbytes
        table[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, values in tensors.values():
            file.write(values.tobytes())


@pytest.mark.slow
def test_a_tensor_larger_than_the_budget_merges_inside_it(data: Path) -> None:
    sources = make(data, "--parameters", "0.51B", "--largest", "1GB")
    done = merge(data, sources, "--memory", "512MB")
    assert done["peak_memory"] <= done["projected_memory"] <= 512 * 10**6
    assert done["bytes_written"] > 10**9
