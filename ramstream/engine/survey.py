"""The survey: what a merge has to know of all deltas beside their counts, found in scans before it.

coarse, fine   quantiles of |δ|, exactly, in at most two scans (`ramstream.quantiles`)
norms          the norm of the merged delta, where `max_norm` bounds it

A scan of the survey counts on the way what is not yet counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ramstream.engine.inputs import Stats
from ramstream.engine.ledgers import Ledger
from ramstream.engine.worker import UnitResult, Work
from ramstream.errors import PlanError
from ramstream.journal import Line
from ramstream.plan import CountPlan, MergePlan
from ramstream.quantiles import Part, Queries, Stage, combined, decode, encode, queries, thresholds

if TYPE_CHECKING:
    from ramstream.methods import Method

COARSE, FINE, NORMS = "coarse", "fine", "norms"

TITLES = {COARSE: "selecting", FINE: "selecting", NORMS: "measuring"}
"""What a scan is called."""

SHORT = ("BF16", "F16", "F8_E4M3", "F8_E5M2")
"""Dtypes whose differences rarely need the fine stage."""


def asked(plan: MergePlan) -> Queries:
    """The quantiles that a merge needs; perhaps none."""
    count, method = plan.count, plan.method
    density = np.ones((len(count.merged), count.agents))
    if method.quantile:
        density = plan.settings[method.quantile]
    scope = str(method.parameters().get("scope", "tensor"))
    return queries(density, [tensor.elements for tensor in count.merged], scope)


def scans(plan: MergePlan, counted: bool) -> list[str]:
    """Titles of the scans over the inputs that a merge takes; `counted` where a store has the counts.

    Whether quantiles need a second scan is only known after the first; it is expected unless all dtypes are short.
    """
    stages: list[str] = []
    if asked(plan).any:
        sources = chain.from_iterable(tensor.sources for tensor in plan.count.merged)
        short = all(s is None or (s.dtype in SHORT and s.recipe is None) for s in sources)
        stages = [COARSE] if short else [COARSE, FINE]
    if plan.method.max_norm != "none" and plan.count.merged:
        stages.append(NORMS)
    titles = [*(TITLES[stage] for stage in stages), "merging"]
    if counted:
        return titles
    if plan.method.needs_counts and COARSE not in stages:
        return ["counting", *titles]
    return [f"counting and {titles[0]}", *titles[1:]]


class SurveyLedger(Ledger):
    """What the survey found: histograms as long as they are needed, answers, and squares.

    A line is about a batch of units of one stage; done is what any stage has looked at.
    """

    kind = "survey"

    def __init__(self, path: Path, plan: MergePlan) -> None:
        super().__init__(path, plan.digest, plan.count)
        self._method = plan.method
        self._coarse = _Search(plan.count, asked(plan))
        self._measured = np.zeros(plan.count.units, bool)
        self._squares: dict[int, Sequence[tuple[int, float]]] = {}
        self.replay()

    @cached_property
    def _fine(self) -> _Search:
        assert not self._coarse.left.any(), "the fine stage needs the coarse one's answers"
        return _Search(self._plan, self._coarse.stage.fine())

    def _search(self, stage: str) -> _Search:
        return self._coarse if stage == COARSE else self._fine

    def note_inputs(self, inputs: Stats) -> None:
        """Begin the journal, unless there is nothing to survey."""
        if self._coarse.stage.queries.any or self._method.max_norm != "none":
            super().note_inputs(inputs)

    def take(self, position: int, line: Line) -> None:
        """Note a batch of units, once."""
        if not self.left(line["stage"])[line["units"]].any():
            return
        super().take(position, line)
        if line["stage"] == NORMS:
            self._measured[line["units"]] = True
            self._squares.update(zip(line["units"], line["squares"], strict=True))
        else:
            self._search(line["stage"]).add(line["units"], *decode(line["found"]))

    def vouch(self, stage: str, results: Iterable[UnitResult]) -> None:
        """Vouch for surveyed units: on disk when this returns."""
        found = [(result, result.surveyed) for result in results if result.surveyed is not None]
        units = [result.unit for result, _ in found]
        line: Line = {"units": units, "stage": stage, "inputs": [result.inputs for result, _ in found]}
        if found and stage == NORMS:
            self.add([{**line, "squares": [surveyed.squares for _, surveyed in found]}])
        elif found:
            parts = combined(chain.from_iterable(surveyed.parts for _, surveyed in found))
            answers = np.concatenate([surveyed.answers for _, surveyed in found])
            self._journal.append([{**line, "found": encode(parts, answers)}])
            super().take(0, line)
            self._search(stage).add(units, parts, answers)

    def left(self, stage: str) -> NDArray[np.bool_]:
        """(units,): what a stage has yet to look at."""
        if stage != NORMS:
            return self._search(stage).left.copy()
        grains = np.arange(self._plan.units) < self._plan.flat.units
        return np.asarray(grains & ~self._measured & (self._method.max_norm != "none"))

    def queries(self, stage: str) -> Queries | None:
        """What a stage asks; None for the one that measures."""
        return None if stage == NORMS else self._search(stage).stage.queries

    def work(self, stage: str, work: Work) -> Work:
        """A unit's work and the survey of it. Where it is counted already, only agents that matter are read."""
        matter = self._search(stage).agents(work.unit) if stage != NORMS else None
        if work.count or matter is None:
            return replace(work, survey=True)
        others = frozenset(map(int, np.flatnonzero(~matter) + 1))
        return replace(work, survey=True, unchanged=work.unchanged | others)

    def thresholds(self) -> NDArray[np.float64]:
        """The least magnitudes that agents keep, (tensors, T), when both stages of the search are complete."""
        wide = np.array([tensor.wide for tensor in self._plan.merged], bool)
        return thresholds(self._coarse.stage, self._fine.stage, wide)

    def factors(self, l2: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the merged deltas of each tensor are to be multiplied by to obey `max_norm`, (tensors,).

        l2 (tensors, T): Σδ² of the agents. PlanError where a norm is not finite.
        """
        squares = np.zeros(len(l2))
        for unit in sorted(self._squares):
            for tensor, value in self._squares[unit]:
                squares[tensor] += value
        return norm_factors(self._method, l2, squares)


class _Search:
    """One stage of the search for quantiles: the units it needs, and the groups that are not yet complete."""

    def __init__(self, plan: CountPlan, queries: Queries) -> None:
        self.stage = Stage(queries)
        self.left = np.zeros(plan.units, bool)
        """(units,): what is not looked at yet and has to be."""
        self._plan, self._queries = plan, queries
        self._missing = np.zeros(len(queries.ranks), np.int64)
        """(groups,): in how many units there is something left of it."""
        for unit in range(plan.flat.units if queries.any else 0):
            groups = self._groups(unit)
            self.left[unit] = bool(groups)
            self._missing[groups] += 1

    def _groups(self, unit: int) -> list[int]:
        """The groups that are in a unit, and wanted."""
        tensors = (piece.tensor for _, piece in self._plan.pieces(unit))
        return sorted({self._queries.group(i) for i in tensors if self._queries.wanted(i).any()})

    def agents(self, unit: int) -> NDArray[np.bool_]:
        """(T,): whose deltas in a unit matter."""
        return np.asarray(self._queries.sets[self._groups(unit)].any(axis=0))

    def add(self, units: Sequence[int], parts: Iterable[Part], answers: NDArray[np.void]) -> None:
        """Take what was found in some units."""
        self.stage.choose(answers)
        for part in parts:
            self.stage.add(part)
        for unit in units:
            self.left[unit] = False
            for group in self._groups(unit):
                self._missing[group] -= 1
                if self._missing[group] == 0:
                    self.stage.close(group)


def norm_factors(
    method: Method, l2: NDArray[np.float64], squares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The least of 1 and limit / norm for each tensor: sums in order, so that nothing depends on how numpy adds.

    l2 (tensors, T) and squares (tensors,): Σδ² of the agents and of the merged delta. PlanError where a norm is
    not finite.
    """
    tensors = len(squares)
    if method.norm_scope == "model":
        l2, squares = np.cumsum(l2, axis=0)[-1:], np.cumsum(squares)[-1:]
    agents, norm = np.sqrt(l2), np.sqrt(squares)
    mean = np.cumsum(agents, axis=1)[:, -1] / agents.shape[1]
    limit = agents.max(axis=1) if method.max_norm == "largest" else mean
    if not (np.isfinite(limit) & np.isfinite(norm)).all():
        raise PlanError(
            f"{method.name()}: max_norm needs finite norms, and a delta's is not; leave max_norm out, or use "
            "--on-nonfinite base"
        )
    factors = np.minimum(1.0, np.divide(limit, norm, out=np.ones_like(norm), where=norm > 0))
    return np.broadcast_to(factors, tensors).copy()
