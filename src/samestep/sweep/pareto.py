"""Sweeps with several objectives: the trials that no other one is better than in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from samestep.checkpoint.run_result import RunResult, read_result
from samestep.sweep.schema import SweepConfig
from samestep.sweep.storage import TrialRecord, best_of
from samestep.sweep.study_folder import trial_folder

_MOST_NAMED = 10


def front(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the complete trials that no other is at least as good as in all objectives and better in one.

    With one objective: the best, and those that are equal to it.
    """
    costs = {
        trial.number: [s * v for s, v in zip(sweep.signs, trial.objectives, strict=True)]
        for trial in trials
        if len(trial.objectives) == len(sweep.signs)
    }

    def is_beaten(own: list[float]) -> bool:
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in costs.values())

    return [t for t in trials if t.number in costs and not is_beaten(costs[t.number])]


def best_words(sweep: SweepConfig, trials: Sequence[TrialRecord]) -> str:
    """Return the best trial so far, or the front; empty if none is complete."""
    if sweep.further_objectives:
        numbers = [str(trial.number) for trial in front(sweep, trials)]
        more = ", ..." if len(numbers) > _MOST_NAMED else ""
        return f"Pareto front: {', '.join(numbers[:_MOST_NAMED])}{more}" if numbers else ""
    best = best_of(sweep, list(trials))
    known = best is not None and best.value is not None
    return f"best: {best.value:.6g} (trial {best.number})" if best and known else ""


def results_of(sweep: SweepConfig, folder: Path, number: int) -> list[RunResult]:
    """Return the results of a trial's runs, which are all done."""
    home = trial_folder(folder, number)
    folds = [home] if sweep.folds is None else [home / f"fold-{n}" for n in range(sweep.folds.k)]
    found = [read_result(run) for run in folds]
    return [result for result in found if result is not None]
