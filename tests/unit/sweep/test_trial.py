"""A trial while it runs: what a pruner sees of its folds, and its result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.run_result import RunResult
from samestep.errors import TaskError, TextError
from samestep.sweep.run_spec import RunSpec
from samestep.sweep.schema import SweepConfig, parse_duration
from samestep.sweep.trial import LiveTrial, objective_of


def sweep(**objective: Any) -> SweepConfig:
    return SweepConfig(base="b.yaml", space={}, objective={"metric": "f1", "mode": "max", **objective})


def test_folds_are_compared_by_their_mean_so_far_at_equal_places() -> None:
    trial = LiveTrial(0, {})
    trial.add(9, 0.2)
    trial.add(19, 0.4)
    trial.add(9, 0.3)  # again, after a resume
    assert trial.reports() == [(0, 0.3), (1, 0.4)]
    trial.folds.append(0.4)
    trial.add(9, 0.5)
    trial.add(19, 0.6)
    trial.add(29, 0.8)  # one more than the first fold had
    assert trial.reports() == [(10_000, 0.4), (10_001, 0.5), (10_002, pytest.approx(0.6))]


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


@pytest.mark.requirement("001-D-10")
def test_a_run_on_one_rank_is_started_with_its_time_limits(tmp_path: Path) -> None:
    spec = RunSpec("a", tmp_path / "c.yaml", (), tmp_path, hang_timeout=90.0, start_timeout=600.0)
    assert (spec.words()[0], replace(spec, ranks=2).words()[0]) == ("train", "launch")
    words = " ".join(spec.words())
    assert "--hang-timeout 90 --start-timeout 600" in words
    assert "timeout" not in " ".join(replace(spec, ranks=2).words()), "several ranks watch each other"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("none", None)])
def test_a_duration_of_a_command_line(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds


def test_what_is_no_duration_is_refused() -> None:
    with pytest.raises(TextError, match="'soon' is not a duration"):
        parse_duration("soon")
