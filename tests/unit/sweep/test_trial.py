"""A trial while it runs: what a pruner sees of its folds, and what it came to."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.checkpoint.run_result import RunResult
from samestep.errors import TaskError
from samestep.sweep.schema import SweepConfig
from samestep.sweep.trial import LiveTrial, objective_of


def sweep(**objective: Any) -> SweepConfig:
    return SweepConfig(
        base="b.yaml", space={}, objective={"metric": "f1", "mode": "max", **objective}
    )


def test_folds_are_compared_by_their_mean_so_far_at_equal_places() -> None:
    trial = LiveTrial(0, {})
    trial.add(9, 0.2)
    trial.add(19, 0.4)
    trial.add(9, 0.3)  # again, after a resume
    assert trial.reports() == [(1, 0.3), (2, 0.4)]
    trial.folds.append(0.4)
    trial.add(9, 0.5)
    trial.add(19, 0.6)
    trial.add(29, 0.8)  # one more than the first fold had
    assert trial.reports() == [(10_001, 0.4), (10_002, 0.5), (10_003, pytest.approx(0.6))]


def test_the_value_is_of_the_best_evaluation_or_the_last() -> None:
    best = {"step": 3, "metric": "f1", "value": 0.75, "metrics": {}}
    result = RunResult("finished", metrics={"f1": 0.5}, best=best)
    assert objective_of(sweep(), result) == 0.75
    assert objective_of(sweep(value="last"), result) == 0.5


@pytest.mark.parametrize(
    "result",
    [
        RunResult("finished", best={"step": 1, "metric": "f1", "value": float("nan")}),
        RunResult("finished", best={"step": 1, "metric": "val_loss", "value": 1.0}),
        RunResult("finished", metrics={"f1": 1.0}),
    ],
)
def test_a_trial_without_a_number_fails(result: RunResult) -> None:
    with pytest.raises(TaskError, match="a trial needs a number"):
        objective_of(sweep(), result)
