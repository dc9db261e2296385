"""What steps measured, on its way to trackers and listeners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import NonFiniteLoss
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Updated
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats
from samestep.run.run_log import RunLog
from samestep.run_setup import RunSetup
from samestep.step.step_log import StepRecord
from samestep.tracking.contract import Tracker
from samestep.tracking.listeners import RunListener
from samestep.tracking.trackers import Trackers

FEW = Updated((0.1,))
SKIPPED = Updated((0.1,), None, torch.tensor(1.0))


class Notes(Tracker, RunListener):
    """A tracker and a listener that note their calls in one list."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write(self, row: dict[str, Any]) -> None:
        self.events.append(("write", row))

    def flush(self) -> None:
        self.events.append("flush")

    def close(self) -> None:
        self.events.append("close")

    def on_record(self, record: StepRecord) -> None:
        self.events.append(("record", record.step))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [event[1] for event in self.events if event[0] == "write"]


class Update:
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def sync_update(self) -> None:
        self._events.append("sync")


def log_of(context: SingleProcessContext, log_every: int = 2) -> tuple[RunLog, Notes]:
    config = load_config({"global_batch": 8, "lanes": 2, "epochs": 1, "log_every": log_every})
    notes = Notes()
    log = RunLog(RunSetup.create(config, context), Trackers([notes]), notes)
    guard = FiniteGuard(context, [], 3, Scaling())
    log.follow(Update(notes.events), guard)  # type: ignore[arg-type]
    return log, notes


def add(log: RunLog, step: int, loss: float = 1.0, updated: Updated = FEW) -> None:
    log.steps.add(step, 0, LocalStats([LaneStats(loss, 1.0)], NO_FLAGS), updated)


def test_a_period_is_written_record_by_record_and_then_its_costs(context: SingleProcessContext) -> None:
    log, notes = log_of(context)
    add(log, 0)
    assert notes.events == []
    add(log, 1)
    kinds = [event if isinstance(event, str) else event[0] for event in notes.events]
    assert kinds == ["write", "record", "write", "record", "write", "flush"]
    assert [row["step"] for row in notes.rows] == [0, 1, 1]
    assert "loss" in notes.rows[0]
    assert {"samples_per_second", "peak_memory_mb"} <= set(notes.rows[2])


def test_a_flush_first_waits_for_the_last_update(context: SingleProcessContext) -> None:
    log, notes = log_of(context)
    add(log, 0)
    log.flush()
    assert notes.events[0] == "sync"
    assert notes.rows[0]["step"] == 0
    assert notes.events[-1] == "flush"


def test_nothing_is_synchronised_before_there_is_an_update(context: SingleProcessContext) -> None:
    config = load_config({"global_batch": 8, "epochs": 1})
    notes = Notes()
    log = RunLog(RunSetup.create(config, context), Trackers([notes]), notes)
    log.sync_update()
    log.flush()
    assert notes.events == ["flush"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_bad_loss_ends_the_run_before_it_is_written(context: SingleProcessContext, loss: float) -> None:
    log, notes = log_of(context)
    add(log, 0)
    with pytest.raises(NonFiniteLoss, match="the loss of step 1 is NaN or infinite in lane 0"):
        add(log, 1, loss)
    assert [row["step"] for row in notes.rows] == [0]


def test_a_skipped_step_with_a_bad_loss_is_written(context: SingleProcessContext) -> None:
    log, notes = log_of(context, log_every=1)
    add(log, 0, float("nan"), SKIPPED)
    assert notes.rows[0]["skipped"] is True


@pytest.mark.parametrize(("log_every", "timed"), [(3, 3), (100, 8)])
def test_at_least_one_step_of_a_period_is_timed(context: SingleProcessContext, log_every: int, timed: int) -> None:
    log_of(context, log_every)
    assert context.activity.timed_every == timed
