"""Every method beside ram-plus, warm, in the same rounds; and methods with quantiles in a small budget."""

from __future__ import annotations

from make_checkpoint import Recipe

from benchmark.commands import merge
from benchmark.lines import Line, at_most
from benchmark.processes import Program, seconds_of, take_turns
from benchmark.setting import Bench
from ramstream import methods

ELEMENTWISE, QUANTILE = 1.5, 2.0
"""How many times as long as ram-plus a method may take."""
CASES = {
    "dare-linear": ("-p", "density=0.5"),
    "dare-ties": ("-p", "density=0.5"),
    "linear": (),
    "papo": (),
    "ram": (),
    "ram-ties": (),
    "ram-unique": (),
    "task-arithmetic": ("-p", "weight=0.4"),
    "ties": ("-p", "density=0.2"),
    "ties, whole model": ("-p", "density=0.2", "-p", "scope=model"),
}
"""Methods with their words, the name up to a comma."""
BUDGET = 512
"""MB allowed to merges whose largest tensor is larger."""
LARGEST, WITH_LARGEST = 10**9, 600_000_000
"""Bytes of that tensor, and elements of its model."""


def measure(bench: Bench) -> list[Line]:
    model = bench.main()
    beside = merge(bench, "ram-plus", model)
    programs = {
        case: merge(bench, case.split(",")[0], model, *words, name=f"ramstream {case}")
        for case, words in CASES.items()
    }
    bench.rounds(beside, *programs.values())
    return [
        *(_line(case, program, beside) for case, program in programs.items()),
        *_small_budgets(bench),
    ]


def _line(case: str, program: Program, beside: Program) -> Line:
    quantile = methods.available()[case.split(",")[0]].quantile
    goal = at_most(QUANTILE if quantile else ELEMENTWISE)
    note = f"{program.best:.2f} s, {program.peak / 1e6:.0f} MB"
    return Line(
        f"{case} / ram-plus", program.best / beside.best, "x", goal, note, seconds_of(program, beside)
    )


def _small_budgets(bench: Bench) -> list[Line]:
    scale = bench.options.scale
    recipe = Recipe(round(WITH_LARGEST * scale), largest=round(LARGEST * scale))
    lines = []
    with bench.models.briefly(recipe) as model:
        for case in ("ties", "ties, whole model", "dare-ties"):
            words = (*CASES[case], "--memory", f"{BUDGET}MB")
            program = merge(bench, case.split(",")[0], model, *words, name=f"small budget {case}")
            take_turns([program], 1, bench.say, warm_up=False)
            raw = {"peak": [program.peak], "projected": program.printed("projected_memory")}
            note = f"largest tensor {recipe.largest / 1e6:,.0f} MB"
            name = f"peak of {case} with --memory {BUDGET}MB"
            lines.append(Line(name, program.peak / 1e6, "MB", at_most(BUDGET), note, raw))
    return lines
