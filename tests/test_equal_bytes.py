"""The output's bytes depend on the plan alone, and they are the oracle's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from runs import (
    Model,
    cli,
    family,
    plan_of,
    promised,
    read_weights,
    run,
    sources,
    write_family,
    write_folder,
)

from ramstream import Limits, count
from ramstream.engine.limits import capacity
from ramstream.errors import BudgetError, CheckpointError
from ramstream.overlap import OverlapStore
from ramstream.plan import MatchOptions
from ramstream.types import GRAIN, Dtype

LARGE = {
    "embed.weight": ("BF16", (5003, 1001)),
    "norm.weight": ("BF16", (300,)),
    "mlp.weight": ("BF16", (2999, 3003)),
    "position_ids": ("I64", (700_001,)),
    "bias": ("BF16", (7,)),
    "head.weight": ("BF16", (3_000_001,)),
}
"""17 M elements: grains end inside `embed`, twice inside `mlp`, and inside `head`; others hold three tensors."""

MIXED = {
    "a": ("BF16", (257, 65)),
    "b": ("F32", (129, 33)),
    "scalar": ("F32", ()),
    "c": ("F16", (300, 70)),
    "ids": ("I64", (77,)),
    "empty": ("BF16", (0, 4)),
    "d": ("F8_E4M3", (100, 100)),
    "e": ("F64", (50, 60)),
    "f": ("F8_E5M2", (4099,)),
}


class Case:
    """A model of three agents, its folders, and the merge of it that all others must equal."""

    def __init__(self, root: Path, base: Model, agents: list[Model], shards: int) -> None:
        self.root, self.base, self.agents = root, base, agents
        self.paths = write_family(root, base, agents, shards)
        self.out = root / "first"
        run(plan_of(self.paths), self.out, Limits(workers=1, device="cpu"))
        self.store = root / "first.ramstream" / "overlap.zarr"

    def check(self, paths: list[Path] | None = None, limits: Limits | None = None, **options: Any) -> None:
        """Merge again and compare."""
        out = self.root / "again"
        outcome, _ = run(plan_of(paths or self.paths), out, limits, **options)
        assert not outcome.already_complete
        assert promised(out) == promised(self.out)
        shutil.rmtree(out)
        shutil.rmtree(self.root / "again.ramstream")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("large"), *family(LARGE), shards=3)


def check_against_oracle(case_out: Path, base: Model, agents: list[Model], **rule: Any) -> None:
    expected = reference.merge(sources(base), [sources(agent) for agent in agents], **rule)
    found = read_weights(case_out)
    assert found.keys() == base.keys()
    for name, tensor in base.items():
        bits = expected.bits.get(name, tensor.bits)
        assert found[name] == bits.tobytes(), name


# One model, many ways


def test_the_model_has_grains_that_cross_tensors(large: Case) -> None:
    plan = plan_of(large.paths).count
    assert plan.flat.units == 5
    assert plan.bytes.units == 2
    assert sum(length > GRAIN for length in plan.flat.lengths) == 2
    assert [len(list(plan.flat.pieces(unit))) for unit in range(5)] == [1, 3, 1, 3, 1]


def test_it_is_the_oracles(large: Case) -> None:
    check_against_oracle(large.out, large.base, large.agents)


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_any_memory(large: Case, workers: int) -> None:
    plan = plan_of(large.paths)
    just = capacity(Limits(memory="9GB", workers=workers, device="cpu"), plan.count, plan).projected
    with pytest.raises(BudgetError):
        large.check(limits=Limits(memory=10**8, device="cpu"))
    limits = Limits(memory=just, workers=9, device="cpu")
    assert capacity(limits, plan.count, plan).workers == workers
    large.check(limits=limits)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_any_workers_and_way_of_reading(large: Case, workers: int, io: Any) -> None:
    large.check(limits=Limits(workers=workers, io=io, device="cpu"))


@pytest.mark.parametrize("device", ["cpu", "cpu:torch"])
def test_kernel_and_torch_form(large: Case, device: str) -> None:
    large.check(limits=Limits(workers=2, device=device))


def test_agents_in_other_shards_order_and_alignment(large: Case) -> None:
    one, two, three = large.agents
    names = list(one)
    other = large.root / "resharded"
    write_folder(other / "agent-1", one, shards=1, order=names[::-1])
    write_folder(other / "agent-2", two, shards=5, order=[*names[2:], *names[:2]], pad=3)
    write_folder(other / "agent-3", three, shards=1, order=sorted(names), pad=1)
    paths = [other / "agent-1", other / "agent-2", other / "agent-3" / "model.safetensors"]
    for io in ("mmap", "pread"):
        large.check([large.paths[0], *paths], Limits(io=io, device="cpu"))  # type: ignore[arg-type]


def test_a_store_that_was_counted_before(large: Case) -> None:
    out = large.root / "reused"
    _, titles = run(plan_of(large.paths), out, store=large.store)
    assert titles == ["merging"]
    assert promised(out) == promised(large.out)


def test_ram_in_one_scan_or_from_a_store(large: Case) -> None:
    plan, one, two = plan_of(large.paths, "ram"), large.root / "ram-one", large.root / "ram-two"
    assert run(plan, one)[1] == ["counting and merging"]
    assert run(plan, two, store=large.store)[1] == ["merging"]
    assert promised(one) == promised(two)
    assert promised(one) != promised(large.out)
    check_against_oracle(one, large.base, large.agents, r=0.0)


def test_the_store_holds_the_oracles_counts(large: Case) -> None:
    plan, store = plan_of(large.paths).count, OverlapStore(large.store)
    tallies, bits = store.tallies(), store.bits[...]
    base, agents = sources(large.base), [sources(agent) for agent in large.agents]
    expected: list[dict[str, Any]] = [{} for _ in plan.merged]
    for unit in range(plan.flat.units):
        for piece in plan.flat.pieces(unit):
            name = plan.merged[piece.tensor].name
            cut = [source[name].head(piece.begin, piece.end) for source in (base, *agents)]
            counted, changed = reference.count(cut[0], cut[1:], steps=unit % 16 == 0)
            first = (plan.flat.starts[piece.tensor] + piece.begin) // 8
            packed = np.packbits(changed, axis=1, bitorder="little")
            assert np.array_equal(bits[:, first : first + packed.shape[1]], packed)
            total = expected[piece.tensor]
            for key, value in counted.items():
                total[key] = total[key] + value if key in total else value
    for record, total in zip(tallies, expected, strict=True):
        for key in set(total) - {"refused_first"}:
            assert np.array_equal(record[key], total[key]), key


def test_float_sums_are_added_in_grain_order(tmp_path: Path) -> None:
    base, _ = family({"a": ("F32", (4 * GRAIN,))}, agents=0, seed=8)
    agent, _ = family({"a": ("F32", (4 * GRAIN,))}, agents=0, seed=9)
    plan = plan_of(write_family(tmp_path, base, [agent])).count
    _, tallies = count(plan, Limits(workers=2))
    pieces = []
    for unit in range(4):
        cut = [sources(m)["a"].head(unit * GRAIN, (unit + 1) * GRAIN) for m in (base, agent)]
        pieces.append(reference.count(cut[0], cut[1:], steps=False)[0])
    orders = [pieces, [pieces[k] for k in (3, 1, 0, 2)]]
    one, other = ([sum(p[key] for p in order) for key in ("l1", "l2", "dots")] for order in orders)
    assert not all(map(np.array_equal, one, other)), "the order shows in the last bits"
    assert all(
        np.array_equal(tallies[0][key], value) for key, value in zip(("l1", "l2", "dots"), one, strict=True)
    )


# Many models, one way


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("ram", {"r": 0.0}),
        ("ram-plus", {}),
        ("ram-plus", {"scope": "tensor"}),
        ("ram-plus", {"ratio": "changed", "r": 0.3, "alpha": 1.0}),
        ("ram-plus", {"scope": "tensor", "ratio": "changed", "epsilon": 1e-4}),
    ],
)
def test_small_models_are_the_oracles(tmp_path: Path, dtype: str, method: str, rule: dict[str, Any]) -> None:
    shapes = {name: (dtype, shape) for name, (_, shape) in MIXED.items() if name != "ids"}
    base, agents = family(shapes, agents=4, seed=1)
    paths = write_family(tmp_path, base, agents, shards=2)
    parameters = {} if method == "ram" else rule
    run(plan_of(paths, method, **parameters), tmp_path / "out")
    check_against_oracle(tmp_path / "out", base, agents, **rule)


@pytest.mark.parametrize("out", [None, "F32", "BF16", "F64"])
@pytest.mark.parametrize("device", ["cpu", "cpu:torch"])
def test_a_model_of_many_dtypes_is_the_oracles(tmp_path: Path, out: str | None, device: str) -> None:
    base, agents = family(MIXED, seed=2)
    as_float32 = reference.widen(agents[1]["c"].bits, "F16", "F32").view(np.uint32)
    agents[1]["c"] = type(base["c"])("F32", base["c"].shape, as_float32)
    paths = write_family(tmp_path, base, agents)
    plan = plan_of(paths, dtype=Dtype[out] if out else None)
    run(plan, tmp_path / "out", Limits(device=device))
    check_against_oracle(tmp_path / "out", base, agents, out=out)
    config = (tmp_path / "out" / "config.json").read_text()
    wanted = {"F32": "float32", "F64": "float64"}.get(out or "", "bfloat16")
    assert config == f'{{"model_type": "test", "torch_dtype": "{wanted}"}}\n'


@pytest.mark.parametrize("rule", ["base", "keep"])
def test_non_finite_values_are_the_oracles(tmp_path: Path, rule: Any) -> None:
    base, agents = family({"a": ("BF16", (70, 70)), "b": ("F16", (999,))}, seed=3)
    for t, agent in enumerate(agents):
        agent["a"].bits[5 + t : 90 : 7 + t] = (0x7F80, 0xFF80, 0x7FC1)[t]
        agent["b"].bits[100 + t] = 0x7C00
    base["a"].bits[60:64] = 0x8000
    paths = write_family(tmp_path, base, agents)
    run(plan_of(paths, options=MatchOptions(on_nonfinite=rule)), tmp_path / "out")
    check_against_oracle(tmp_path / "out", base, agents, on_nonfinite=rule)


def test_non_finite_values_are_listed_by_their_place_in_the_tensor(tmp_path: Path) -> None:
    base, agents = family({"norm": ("BF16", (70,)), "a": ("F8_E4M3", (GRAIN + 1000,))}, agents=2)
    agents[1]["a"].bits[[GRAIN + 7, GRAIN + 500, GRAIN + 501]] = 0x7F
    agents[0]["norm"].bits[3] = 0x7F80
    paths = write_family(tmp_path, base, agents)
    with pytest.raises(CheckpointError) as refused:
        run(plan_of(paths), tmp_path / "out")
    assert f"agent-2: a has 3 NaN or Inf, the first at index {GRAIN + 7};" in str(refused.value)
    assert "agent-1: norm has 1 NaN or Inf, the first at index 3;" in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert cli("merge", *paths, "-o", tmp_path / "out", "-q") == 5
    words = ["-o", tmp_path / "out", "--on-nonfinite", "base", "-q", "--device", "cpu"]
    assert cli("merge", *paths, *words) == 0
    check_against_oracle(tmp_path / "out", base, agents, on_nonfinite="base")


def test_the_command_line_gives_the_same(tmp_path: Path) -> None:
    base, agents = family(MIXED, seed=4)
    paths = write_family(tmp_path, base, agents)
    run(plan_of(paths, dtype=Dtype.F32, r=0.25), tmp_path / "library")
    words = ["-o", tmp_path / "out", "-p", "r=0.25", "--dtype", "float32", "--device", "cpu", "-q"]
    assert cli("merge", *paths, *words) == 0
    assert promised(tmp_path / "out") == promised(tmp_path / "library")
    check_against_oracle(tmp_path / "out", base, agents, r=0.25, out="F32")
