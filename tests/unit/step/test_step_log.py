"""What steps measured becomes lines of metrics.jsonl, all of a period at once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.optim.update import Updated
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats
from samestep.step import step_log as step_log_module
from samestep.step.step_log import StepLog, StepRecord

FEW = Updated((0.1,))


def stats(*lanes: tuple[Tensor | float, Tensor | float]) -> LocalStats:
    return LocalStats([LaneStats(*lane) for lane in lanes], NO_FLAGS)


GOOD = stats((torch.tensor(6.0), 2.0), (2.0, torch.tensor(2)))


class Written:
    def __init__(self, every: int = 1) -> None:
        self.periods: list[list[StepRecord]] = []
        self.step_log = StepLog(every, self._write, Activity())

    def _write(self, records: Sequence[StepRecord]) -> None:
        self.periods.append(list(records))

    @property
    def steps(self) -> list[list[int]]:
        return [[record.step for record in period] for period in self.periods]

    def row(self, updated: Updated, measured: LocalStats = GOOD) -> dict[str, Any]:
        """The line of one step, as it comes back from the file."""
        self.step_log.add(7, 2, measured, updated)
        row: dict[str, Any] = json.loads(json.dumps(self.periods[-1][0].values()))
        assert row.pop("seconds") >= 0
        return row


def test_a_plain_step_says_only_what_there_is() -> None:
    row = Written().row(FEW)
    assert row == {"step": 7, "epoch": 2, "loss": 2.0, "count": 4.0, "lr": 0.1}


@pytest.mark.parametrize(
    ("norms", "told"),
    [(torch.tensor(5.0), 5.0), (torch.tensor([5.0, 0.5]), [5.0, 0.5]), (torch.tensor([5.0]), [5.0])],
    ids=["of all", "of each group", "of the only group"],
)
def test_norms_are_one_or_one_for_each_group(norms: Tensor, told: Any) -> None:
    assert Written().row(Updated((0.1, 0.2), norms)) == {
        "step": 7, "epoch": 2, "loss": 2.0, "count": 4.0, "lr": [0.1, 0.2], "grad_norm": told,
    }  # fmt: skip


def test_a_loss_scale_is_that_of_the_step_and_skips_are_said() -> None:
    row = Written().row(Updated((0.1,), None, torch.tensor(1.0), torch.tensor(1024.0)))
    assert (row["loss_scale"], row["skipped"]) == (1024.0, True)
    assert "grad_norm" not in row
    row = Written().row(Updated((0.1,), None, torch.tensor(0.0), torch.tensor(2048.0)))
    assert row["loss_scale"] == 2048.0
    assert "skipped" not in row


def test_lanes_whose_loss_is_not_finite_are_known() -> None:
    written = Written()
    written.row(FEW, stats((1.0, 1.0), (torch.tensor(math.nan), 1.0), (math.inf, 1.0), (2.0, 1.0)))
    assert written.periods[0][0].bad_lanes == (1, 2)


def test_a_step_that_counted_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="step 7 counted nothing"):
        Written().row(FEW, stats((0.0, 0.0), (0.0, torch.tensor(0))))


@pytest.mark.parametrize(("on_its_way", "before"), [(False, [[0, 1], [2, 3]]), (True, [[0, 1]])])
def test_steps_are_written_a_period_at_a_time_from_a_gpu_one_later_and_the_rest_by_a_flush(
    monkeypatch: pytest.MonkeyPatch, on_its_way: bool, before: list[list[int]]
) -> None:
    begin = step_log_module.begin_reading
    monkeypatch.setattr(step_log_module, "begin_reading", lambda values: (begin(values)[0], on_its_way))
    written = Written(every=2)
    for step in range(5):
        written.step_log.add(step, 0, GOOD, FEW)
    assert written.steps == before
    for _ in range(2):
        written.step_log.flush()
        assert written.steps == [[0, 1], [2, 3], [4]]
