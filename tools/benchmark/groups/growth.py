"""What grows with agents, elements and tensors, and what must not."""

from __future__ import annotations

from make_checkpoint import Recipe

from benchmark.commands import merge
from benchmark.floors import Floor
from benchmark.lines import Line, at_most, skipped, spread
from benchmark.models import Model, write_many
from benchmark.processes import Program, seconds_of, take_turns
from benchmark.setting import SMALL, Bench

AGENTS = (1, 2, 4, 8, 16)
ROUNDS = 3
"""Enough for a tendency."""
SIZES = (0.2, 1.0, 6.0)
"""Times the usual number of elements: 0.1, 0.5 and 3 B."""
LONG = 500_000_000
"""The largest size is left out where the usual one is less."""
TENSORS, MEAN = 10_000, 2080
PASSES = 2


def measure(bench: Bench) -> list[Line]:
    return [*_agents(bench), *_elements(bench), _tensors(bench)]


def _agents(bench: Bench) -> list[Line]:
    """Cold ram-plus to reading once and writing, for 1 to 16 agents, with start-up and without."""
    lines: list[Line] = []
    whole, work = [], []
    for agents in AGENTS:
        with bench.models.briefly(Recipe(round(bench.options.parameters * SIZES[0]), agents)) as model:
            floor, ours, start = _beside(bench, model)
        whole.append(ours.best / floor.one)
        work.append((ours.best - start.best) / floor.one)
        raw = {**floor.raw, **seconds_of(ours, start)}
        note = f"{work[-1]:.2f} x without start-up"
        lines.append(
            Line(f"cold ram-plus, T = {agents} / read once and write", whole[-1], "x", None, note, raw)
        )
    raw = {"agents": list(AGENTS), "whole": whole, "without start-up": work}
    name = f"spread over T = {AGENTS[0]} .. {AGENTS[-1]}"
    lines.append(Line(name, spread(whole), "%", at_most(20), raw=raw))
    if min(work) <= 0:
        return [*lines, skipped(f"{name}, without start-up", "%", at_most(20), "start-up takes all the time")]
    return [*lines, Line(f"{name}, without start-up", spread(work), "%", at_most(20), raw=raw)]


def _beside(bench: Bench, model: Model) -> tuple[Floor, Program, Program]:
    """The floor, a merge, and a merge of 1 MB with as many agents, all equally cold."""
    before = bench.caches.cold(model.inputs)
    floor, ours = Floor(bench, model, before), merge(bench, "ram-plus", model, before=before)
    with bench.models.briefly(Recipe(SMALL, len(model.folders) - 1)) as small:
        cold = bench.caches.cold(small.inputs)
        start = merge(bench, "ram-plus", small, name="merge of 1 MB", before=cold)
        bench.rounds(*floor.programs, ours, start, at_most=ROUNDS)
    return floor, ours, start


def _elements(bench: Bench) -> list[Line]:
    """Peak memory by size; the kernels are compiled before."""
    usual = bench.options.parameters
    sizes = [round(usual * times) for times in SIZES if times <= 1 or usual >= LONG]
    take_turns([merge(bench, "ram-plus", bench.small(), name="merge of 1 MB")], 1, bench.say, False)
    peaks = {f"{size / 1e9:g} B": _peak(bench, size) for size in sizes}
    lines = [Line(f"peak memory, {size}", peak / 1e6, "MB", raw={size: peak}) for size, peak in peaks.items()]
    name = "spread of peak memory over sizes"
    if len(sizes) < len(SIZES):
        return [*lines, skipped(name, "%", at_most(10), "needs the full size")]
    return [*lines, Line(name, spread(list(peaks.values())), "%", at_most(10), raw=peaks)]


def _peak(bench: Bench, size: int) -> int:
    if size == bench.options.parameters:
        return _merged_once(bench, bench.main())
    with bench.models.briefly(Recipe(size)) as model:
        return _merged_once(bench, model)


def _merged_once(bench: Bench, model: Model) -> int:
    bench.models.need(2 * model.output)
    program = merge(bench, "ram-plus", model)
    take_turns([program], 1, bench.say, warm_up=False)
    return program.peak


def _tensors(bench: Bench) -> Line:
    """What one more tensor costs in a pass."""
    tensors = max(round(TENSORS * min(bench.options.scale, 1)), 100)
    with bench.models.briefly(Recipe(tensors * MEAN, tiny=tensors), write_many) as model:
        many = merge(bench, "ram-plus", model, name=f"merge of {tensors:,} tensors")
        start = merge(bench, "ram-plus", bench.small(), name="merge of 1 MB")
        bench.rounds(many, start)
    each = 1e6 * (many.best - start.best) / tensors / PASSES
    return Line(f"one of {tensors:,} tensors, a pass", each, "µs", at_most(100), raw=seconds_of(many, start))
