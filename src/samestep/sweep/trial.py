"""A trial while it runs: its folds one after the other, their evaluations, and its value."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_result import RunResult
from samestep.errors import TaskError
from samestep.sweep.children import Child
from samestep.sweep.probe_task import folds_file
from samestep.sweep.run_spec import RunSpec, override
from samestep.sweep.schema import SweepConfig, seconds_of
from samestep.sweep.storage import CURVES, FOLDS, PRUNED, TrialRecord
from samestep.sweep.study_folder import trial_folder

_STRIDE = 10_000
"""Evaluations that a fold may have: Optuna has one number for fold and evaluation."""

Curve = list[tuple[int, float]]
"""Steps and values of one run's evaluations, in order."""


@dataclass
class LiveTrial:
    """One trial that is not over."""

    number: int
    values: Mapping[str, Any]
    curves: list[Curve] = field(default_factory=list)
    """By fold."""
    folds: list[float] = field(default_factory=list)
    """Results of the folds that are done."""
    pruned: str = ""
    """Why it ends before its end; empty if it does not."""
    failures: int = 0
    stopped_at: tuple[int, int] = (-1, -1)
    """The fold and the step at which a run of it stopped by itself, saved."""
    is_late: bool = False
    """Whether its run was ended for taking too long."""
    slot: int | None = None
    """Which of the trials side by side it is; None while it waits for its turn."""
    child: Child | None = None
    began: float = field(default_factory=time.monotonic)
    """When its present run was started."""

    @classmethod
    def of(cls, record: TrialRecord) -> LiveTrial:
        """Return a trial that an earlier process had begun."""
        curves = [[(int(s), float(v)) for s, v in curve] for curve in record.kept.get(CURVES, [])]
        pruned, folds = record.kept.get(PRUNED, ""), list(record.kept.get(FOLDS, []))
        return cls(record.number, record.values, curves, folds, pruned)

    @property
    def fold(self) -> int:
        """The fold that it is at."""
        return len(self.folds)

    @property
    def name(self) -> str:
        return f"trial {self.number}"

    def spec(self, sweep: SweepConfig, folder: Path, ranks: int) -> RunSpec:
        """Its present run: the base with its values merged in, and no more."""
        objective = sweep.objective
        home = trial_folder(folder, self.number)
        overrides = [override(key, value) for key, value in self.values.items()]
        overrides += [override("best.metric", objective.metric), f"best.mode={objective.mode}"]
        name = f"trial {self.number:04d}"
        if sweep.folds is not None:
            place = {"file": str(folds_file(sweep, folder)), "number": self.fold}
            overrides.append(override("fold", place))
            home, name = home / f"fold-{self.fold}", f"{name} fold {self.fold}"
        plain = name.replace(" ", "-")
        # Trackers show their runs by this.
        overrides.append(override("name", f"{sweep.name[:60]}-{plain}"))
        prune_dir = folder / "pruning" / plain
        return RunSpec(
            name,
            sweep.base_path,
            tuple(overrides),
            home,
            ranks,
            prune_dir.resolve(),
            hang_timeout=seconds_of(sweep.hang_timeout),
            start_timeout=seconds_of(sweep.start_timeout),
        )

    def add(self, step: int, value: float) -> None:
        """An evaluation of the present run; one that comes again after a resume replaces itself."""
        while len(self.curves) <= self.fold:
            self.curves.append([])
        others = [entry for entry in self.curves[self.fold] if entry[0] != step]
        self.curves[self.fold] = sorted([*others, (step, value)])

    def reports(self) -> list[tuple[int, float]]:
        """Return what a pruner gets: after each evaluation of this fold the mean of the folds so far, at equal
        places. Not those of earlier folds: their ends are better than the beginning of any."""
        found = []
        for at in range(len(self.curves[self.fold])):
            so_far = [c[min(at, len(c) - 1)][1] for c in self.curves[: self.fold + 1] if c]
            found.append((self.fold * _STRIDE + at, math.fsum(so_far) / len(so_far)))
        return found

    def got_further(self, result: RunResult | None) -> bool:
        """Return whether its run has stopped, saved, and further than it had before: then it is resumed."""
        if result is None or result.status != "preempted":
            return False
        before, self.stopped_at = self.stopped_at, (self.fold, result.steps)
        return self.stopped_at > before

    def mean(self) -> float:
        """Its value: of its run, or of its folds."""
        return math.fsum(self.folds) / len(self.folds)


def objective_of(sweep: SweepConfig, result: RunResult) -> float:
    """Return a run's value of the sweep's objective.

    Raises:
        TaskError: if that is no number.
    """
    rule = sweep.objective
    value: Any = result.metrics.get(rule.metric)
    if rule.value == "best":
        best = result.best
        value = best["value"] if best is not None and best["metric"] == rule.metric else None
    return _number(rule.metric, value)


def further_of(sweep: SweepConfig, results: Sequence[RunResult]) -> list[float]:
    """Return the values of a trial's runs for the further objectives, at the evaluations that the first takes.

    Raises:
        TaskError: if that is no number.
    """
    at_best = sweep.objective.value == "best"
    taken = [r.best["metrics"] if at_best and r.best is not None else r.metrics for r in results]
    found = []
    for rule in sweep.further_objectives:
        numbers = [_number(rule.metric, values.get(rule.metric)) for values in taken]
        found.append(math.fsum(numbers) / len(numbers))
    return found


def _number(metric: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or math.isnan(value):
        shown = "NaN" if isinstance(value, float) else "not measured"
        raise TaskError(f"{metric} is {shown}: a trial needs a number")
    return float(value)
