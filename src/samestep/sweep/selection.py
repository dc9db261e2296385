"""Which trial to take: the best one, or the fastest of those that are nearly as good."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import RunDirError
from samestep.foreign.files import is_file
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.reading import best_trial, trials_of
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord
from samestep.sweep.study_folder import trial_folder

MODEL = "model.safetensors"


@dataclass(frozen=True)
class Choice:
    """A trial, and what it was preferred to."""

    trial: TrialRecord
    best: TrialRecord
    margin: float
    measure: str
    """What its cost is: seconds per sample, or parameters."""
    cost: float
    best_cost: float

    def as_json(self) -> dict[str, Any]:
        """For `best --json`."""
        best = {"number": self.best.number, "value": self.best.value, "cost": self.best_cost}
        return {"margin": self.margin, "measure": self.measure, "cost": self.cost, "best": best}

    def words(self, metric: str) -> str:
        """Why this trial, in one sentence."""
        within = f"within {self.margin:g} of the best, {metric} {self.best.value:.6g} (trial {self.best.number})"
        if self.trial.number == self.best.number:
            return f"no trial {within}, has fewer {self.measure}: {self.cost:.4g}"
        costs = f"{self.cost:.4g} {self.measure}, where that has {self.best_cost:.4g}"
        return f"trial {self.trial.number} is {within}, and has the fewest: {costs}"


def prefer_faster(loaded: LoadedSweep, margin: float) -> Choice:
    """The fastest trial whose value is within a margin of the best.

    Args:
        loaded: The sweep.
        margin: How much worse a value may be, as a share of the best one.

    Raises:
        RunDirError: if no trial is complete, or one within the margin has left no measurement.
    """
    best = best_trial(loaded)
    assert best.value is not None, "it is complete"
    # 0.985 is within 0.015 of 1, which floats deny.
    allowed = margin * abs(best.value) * (1 + 1e-9)
    near = [
        trial
        for trial in trials_of(loaded)
        if trial.state == "complete"
        and trial.value is not None
        and abs(trial.value - best.value) <= allowed
    ]
    for measure, cost_of in _MEASURES.items():
        costs = {trial.number: cost_of(loaded.sweep, trial) for trial in near}
        known = {number: cost for number, cost in costs.items() if cost is not None}
        if len(known) < len(near):
            continue  # compared by one measure, or not at all
        # Of equal ones the better, and of those the first.
        order = [(known[t.number], abs((t.value or 0.0) - best.value), t.number, t) for t in near]
        chosen = min(order, key=lambda entry: entry[:3])[3]
        return Choice(chosen, best, margin, measure, known[chosen.number], known[best.number])
    without = ", ".join(str(number) for number, cost in costs.items() if cost is None)
    raise RunDirError(
        f"nothing tells how fast the trials {without} are: the directories of their runs have neither times "
        f"in metrics.jsonl nor a {MODEL}. Leave out --prefer-faster-within"
    )


def seconds_per_sample(sweep: SweepConfig, trial: TrialRecord) -> float | None:
    """What a sample costs in training, the mean of a trial's folds; None if a run has not measured it.

    Not of a step: batches of trials may differ.
    """
    from samestep.train.time_report import read_times

    found = []
    for run in runs_of(sweep, trial):
        try:
            speed = read_times(run).get("samples_per_second", {}).get("median")
        except RunDirError:
            return None
        if not speed:
            return None
        found.append(1 / speed)
    return math.fsum(found) / len(found) if found else None


def parameters(sweep: SweepConfig, trial: TrialRecord) -> float | None:
    """How many numbers a trial's model has; None if it has left no model."""
    from safetensors import SafetensorError, safe_open

    path = runs_of(sweep, trial)[0] / MODEL
    if not is_file(path):
        return None
    try:
        with safe_open(path, framework="np") as file:
            return float(
                sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
            )
    except (SafetensorError, OSError):
        return None


_MEASURES: dict[str, Callable[[SweepConfig, TrialRecord], float | None]] = {
    "seconds per sample": seconds_per_sample,
    "parameters": parameters,
}


def runs_of(sweep: SweepConfig, trial: TrialRecord) -> Sequence[Path]:
    """The directories of a trial's runs, one for each fold."""
    home = trial_folder(sweep.path, trial.number)
    if sweep.folds is None:
        return [home]
    return [home / f"fold-{fold}" for fold in range(sweep.folds.k)]
