"""Where the time of steps goes: measured, and read from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment

from samestep.distributed.health.activity import (
    BETWEEN_STEPS,
    COMPUTE,
    DATA,
    EVALUATE,
    EXCHANGE,
    READING,
    SAVE,
    Activity,
)
from samestep.reduce.stats import RankFlags
from samestep.run.time_report import read_times
from samestep.tracking.step_times import StepTimes, peak_memory
from tests.unit.clock import Clock


def spend(activity: Activity, clock: Clock, **seconds: float) -> None:
    phases = {
        "data": DATA, "compute": COMPUTE, "exchange": EXCHANGE, "save": SAVE, "reading": READING,
        "evaluate": EVALUATE, "between": BETWEEN_STEPS,
    }  # fmt: skip
    for name, spent in seconds.items():
        activity.enter(phases[name])
        clock.now += spent


def test_a_row_splits_the_time_of_its_steps(clock: Clock) -> None:
    activity = Activity()
    activity.begin_step(0)
    spend(activity, clock, data=50, compute=50)  # before it is looked at
    activity.end_step()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(8)
    spend(activity, clock, data=1, compute=4, exchange=2, reading=3, save=5, evaluate=100, between=7)
    row = times.row(steps=2, seconds=0.5, samples=64)
    memory = row.pop("peak_memory_mb")
    assert row == {
        "samples_per_second": 128.0,
        "time_data": 1.0,  # in one of the two_ranks steps, the one that was timed
        "time_compute": 4.0 + 3.0 / 2,
        "time_exchange": 2.0,
        "time_save": 5.0 / 2,  # timed whenever it happens
    }
    assert memory > 10
    # The next row starts over.
    activity.begin_step(16)
    spend(activity, clock, data=8)
    clock.now += 2
    row = times.row(steps=1, seconds=1.0, samples=64)
    assert (row["time_data"], row["time_compute"], row["time_save"]) == (10.0, 0.0, 0.0)


def test_the_time_of_the_phase_that_goes_on_counts(clock: Clock) -> None:
    activity = Activity()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(0)
    clock.now += 3
    assert times.row(1, 1.0, 1)["time_compute"] == 3
    assert activity.phase == COMPUTE
    clock.now += 4
    assert "time_compute" not in times.row(1, 1.0, 1), "no timed step began meanwhile"


def test_the_rank_that_others_wait_for_is_the_one_that_worked_most(clock: Clock) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    for busy in ([1.0, 8.0, 2.0], [1.0, 0.5, 4.0], [1.0, 0.5, 2.0]):  # once was enough for rank 1
        times.add_busy([RankFlags(0, seconds) for seconds in busy])
    row = times.row(3, 1.0, 1)
    assert (row["slowest_rank"], row["rank_spread"]) == (1, 3.0)
    times.add_busy([RankFlags(0, 2.0), RankFlags(0, 1.0), RankFlags(0, 1.0)])
    assert times.row(3, 1.0, 1)["slowest_rank"] == 0
    assert "slowest_rank" not in times.row(1, 1.0, 1)  # nothing was heard


@pytest.mark.parametrize(("busy", "spread"), [([0.0, 0.0], 1.0), ([0.0, 2.0], 1.0)])
def test_a_rank_that_did_nothing_does_not_divide_by_zero(clock: Clock, busy: list[float], spread: float) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    times.add_busy([RankFlags(0, seconds) for seconds in busy])
    assert times.row(1, 0.0, 1)["rank_spread"] == spread


def test_one_rank_alone_is_not_compared(clock: Clock) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    times.add_busy([RankFlags(0, 2.0)])
    assert "rank_spread" not in times.row(1, 1.0, 1)


def test_a_note_tells_what_was_done_since_the_last(clock: Clock) -> None:
    activity = Activity()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(0)
    spend(activity, clock, data=1, compute=2, exchange=50, between=9)
    assert times.since_last_flags() == 3
    assert times.since_last_flags() == 0
    spend(activity, clock, compute=5, exchange=1)
    assert times.since_last_flags() == 5


def test_the_peak_memory_is_in_bytes() -> None:
    assert 2**24 < peak_memory(torch.device("cpu")) < 2**40


def time_row(step: int, per_second: float, data: float, **more: Any) -> str:
    row = {"step": step, "samples_per_second": per_second, "time_data": data, **more}
    return json.dumps(row) + "\n"


def test_times_are_the_median_and_the_worst(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "loss": 1.0, "seconds": 9.0}\n'
        + time_row(0, 100.0, 0.5, slowest_rank=1, rank_spread=1.5)
        + time_row(1, 300.0, 0.125, slowest_rank=3, rank_spread=1.25)
        + time_row(2, 200.0, 0.25, slowest_rank=3, rank_spread=2.0)
        + '{"step": 3, "val_loss": 2.0}\n'
        + '[]\nnull\n{"step": 4, "samples_per_sec'
    )
    assert read_times(tmp_path) == {
        "samples_per_second": {"median": 200.0, "worst": 100.0},
        "time_data": {"median": 0.25, "worst": 0.5},
        "rank_spread": {"median": 1.5, "worst": 2.0},
        "slowest_rank": 3,
    }


def test_a_run_alone_has_no_slowest_rank(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(time_row(0, 100.0, 0.5))
    assert set(read_times(tmp_path)) == {"samples_per_second", "time_data"}


@pytest.mark.parametrize("text", [None, "", '{"step": 0, "loss": 1.0}\n'])
def test_a_run_without_times_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert read_times(tmp_path) == {}
