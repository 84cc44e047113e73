"""Plans are pure data: spaces cover every element once, digests name what decides, headers are valid."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from ramstream.checkpoint import Checkpoint
from ramstream.errors import PlanError
from ramstream.methods.ram import Ram
from ramstream.methods.ram_plus import RamPlus
from ramstream.plan import MatchOptions, MergePlan, Space, differences, plan_output
from ramstream.planning import plan_counts, plan_merge
from ramstream.types import Dtype

lengths = st.lists(st.integers(0, 300), max_size=12)


@given(lengths, st.sampled_from([1, 8, 64]), st.sampled_from([64, 128, 192]))
def test_units_cover_every_element_of_every_tensor_once_and_in_order(
    sizes: list[int], alignment: int, unit: int
) -> None:
    space = Space.lay(sizes, alignment, unit)
    seen: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for index in range(space.units):
        for piece in space.pieces(index):
            seen[piece.tensor] += range(piece.begin, piece.end)
            first, last = (space.starts[piece.tensor] + at for at in (piece.begin, piece.end))
            assert index * unit <= first < last <= (index + 1) * unit
    assert seen == {i: list(range(size)) for i, size in enumerate(sizes)}
    assert all(start % alignment == 0 for start in space.starts)


def write(folder: Path, **tensors: np.ndarray) -> Path:
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"torch_dtype": "float32"}')
    return folder


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    values = np.arange(100, dtype=np.float32)
    return [
        write(tmp_path / name, a=values + k, b=(values * 2).reshape(10, 10), n=np.arange(3))
        for k, name in enumerate(("base", "one", "two"))
    ]


def planned(paths: list[Path], method: Ram | None = None, **options: object) -> MergePlan:
    base, *agents = map(Checkpoint.open, paths)
    return plan_merge(base, agents, method or RamPlus(), **options)  # type: ignore[arg-type]


def test_digests_do_not_depend_on_where_the_inputs_lie(three: list[Path], tmp_path: Path) -> None:
    before = planned(three)
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in three]
    after = planned(moved)
    assert after.digest == before.digest
    assert after.count.digest == before.count.digest


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epsilon": 1e-3}, "epsilon"),
        ({"options": MatchOptions(exclude=("b",))}, "exclude"),
        ({"options": MatchOptions(on_nonfinite="keep")}, "on_nonfinite"),
        ({"options": MatchOptions(compare_dtype=Dtype.BF16)}, "compare_dtype"),
        ({"options": MatchOptions(map_prefix=(("a", "a"),))}, "map_prefix"),
    ],
)
def test_what_decides_the_counts_is_in_the_count_digest(
    three: list[Path], change: dict[str, object], field: str
) -> None:
    base, *agents = map(Checkpoint.open, three)
    one, two = plan_counts(base, agents), plan_counts(base, agents, **change)  # type: ignore[arg-type]
    assert one.digest != two.digest
    assert field in differences(one.identity, two.identity)


def test_another_order_of_agents_is_another_merge(three: list[Path]) -> None:
    base, one, two = three
    assert planned([base, one, two]).digest != planned([base, two, one]).digest


@pytest.mark.parametrize("method", [Ram(), RamPlus(r=0.2), RamPlus(alpha=1.0), RamPlus(scope="tensor")])
def test_method_and_parameters_decide_the_merge_digest_only(three: list[Path], method: Ram) -> None:
    one, two = planned(three), planned(three, method)
    assert one.count.digest == two.count.digest
    assert one.digest != two.digest


def test_output_dtypes_decide_the_merge_digest(three: list[Path]) -> None:
    assert planned(three).digest != planned(three, dtype=Dtype.BF16).digest


def test_the_output_header_is_one_that_safetensors_reads(three: list[Path], tmp_path: Path) -> None:
    plan = planned(three, dtype=Dtype.BF16)
    (file,) = plan.outputs
    path = tmp_path / "empty.safetensors"
    path.write_bytes(file.header + bytes(file.size - len(file.header)))
    assert len(file.header) % 4096 == 0
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {name: opened.get_slice(name).get_dtype() for name in opened.keys()} == {  # noqa: SIM118
            "a": "BF16",
            "b": "BF16",
            "n": "I64",
        }


def test_shard_size_cuts_the_output_anew(three: list[Path]) -> None:
    plan = planned(three, shard_size=410)  # a and b have 400 bytes each, n has 24
    assert [file.name for file in plan.outputs] == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.name for file in planned(three, shard_size=10**9).outputs] == ["model.safetensors"]


def test_a_plan_counts_with_its_methods_epsilon(three: list[Path]) -> None:
    base, *agents = map(Checkpoint.open, three)
    with pytest.raises(PlanError, match=r"epsilon 0.5, the method 1e-05"):
        plan_output(plan_counts(base, agents, 0.5), Ram())


def test_one_to_64_agents(three: list[Path]) -> None:
    base = Checkpoint.open(three[0])
    for agents in ([], [base] * 65):
        with pytest.raises(PlanError, match=f"{len(agents)} agents"):
            plan_counts(base, agents)
