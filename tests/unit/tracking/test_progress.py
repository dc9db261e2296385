"""Progress in plain lines, and as a bar on a terminal."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.progress import Progress

from samestep.distributed.logging import RankLog
from samestep.step.step import Step
from samestep.step.step_log import StepRecord
from samestep.tracking.progress import CountedProgress, TrainingProgress
from tests.unit.clock import Clock


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def record(step: int, seconds: float = 0.5) -> StepRecord:
    return StepRecord(step, 0, 0.25, 8, (0.1,), None, seconds)


def follow(progress: TrainingProgress, wall: Clock, steps: int = 30, pace: float = 1, every: int = 1) -> None:
    """Steps of so many seconds, whose measurements are read every few steps."""
    with progress:
        for index in range(steps):
            wall.now += pace
            if (index + 1) % every == 0:
                progress.on_record(record(index))
            progress.on_step(cast(Step, SimpleNamespace(index=index)))


def test_a_line_comes_every_ten_seconds(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(TrainingProgress(100, 64, RankLog(0, 1), shown=True), wall)
    assert capsys.readouterr().err.splitlines() == [
        "step 11/100  loss 0.2500  128 samples/s  89 s left",
        "step 22/100  loss 0.2500  128 samples/s  78 s left",
    ]


def test_the_time_left_is_steady(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow first step is left out; one pause counts as one of many steps."""
    progress = TrainingProgress(20_000, 64, RankLog(0, 1), shown=True)
    step = [cast(Step, SimpleNamespace(index=index)) for index in range(1002)]
    progress.on_record(record(0))
    wall.now += 9
    progress.on_step(step[0])
    wall.now += 1000 * 1.0
    progress.on_step(step[1000])
    wall.now += 30
    progress.on_step(step[1001])
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("samples/s  ")[2] for line in lines] == ["5:16:39 left", "5:25:48 left"]


def test_without_a_known_end_there_is_no_time_left(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(TrainingProgress(None, 6400, RankLog(0, 1), shown=True), wall, steps=11)
    assert capsys.readouterr().err == "step 11  loss 0.2500  12,800 samples/s\n"


def test_steps_too_short_to_measure_have_no_rate(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingProgress(10, 8, RankLog(0, 1), shown=True) as progress:
        wall.now += 11
        progress.on_record(record(0, seconds=0.0))
        progress.on_step(cast(Step, SimpleNamespace(index=0)))
    assert capsys.readouterr().err == "step 1/10  loss 0.2500  0 samples/s\n"


def test_ranks_are_named_where_they_differ(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(None, 64, RankLog(0, 4), shown=True)
    for spread in (1.1, 1.62):
        progress.on_record(record(0))
        progress.on_times(0, {"slowest_rank": 3, "rank_spread": spread})
        wall.now += 11
        progress.on_step(cast(Step, SimpleNamespace(index=0)))
    assert capsys.readouterr().err.splitlines() == [
        "[Rank 0] step 1  loss 0.2500  128 samples/s",
        "[Rank 0] step 1  loss 0.2500  128 samples/s  rank 3 1.6x the fastest rank's work",
    ]


def test_other_ranks_show_nothing(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(TrainingProgress(100, 64, RankLog(1, 2), shown=False), wall)
    with CountedProgress("sample", 100, RankLog(1, 2), shown=False) as progress:
        wall.now += 100
        progress.add(5)
    assert capsys.readouterr().err == ""


def test_samples_are_counted(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with CountedProgress("sample", 500, RankLog(0, 1), shown=True) as progress:
        for _ in range(3):
            wall.now += 8
            progress.add(40)
    assert capsys.readouterr().err == "sample 80/500    84 s left\n"


def test_turns_are_shown_with_whose_they_are(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        with CountedProgress("turn", 2, RankLog(0, 1), shown) as progress:
            progress.begin("1 lane")
            wall.now += 11
            progress.add()
            progress.begin("2 lanes")
            progress.add()
    assert capsys.readouterr().err == "turn 1/2  1 lane  11 s left\n"


def watch_bar(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is done to the bar of a terminal, which stderr is from now on."""
    calls: list[Any] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Progress, "start", lambda self: calls.append("start"))
    monkeypatch.setattr(Progress, "stop", lambda self: calls.append("stop"))
    monkeypatch.setattr(Progress, "update", lambda self, row, completed, text: calls.append((completed, text)))
    return calls


def test_a_terminal_gets_a_bar_in_place_of_lines(
    wall: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It moves with every step, also where measurements are read every other step."""
    bar = watch_bar(monkeypatch)
    follow(TrainingProgress(100, 64, RankLog(0, 1), shown=True), wall, steps=3, every=2)
    text = "loss 0.2500  128 samples/s"
    left = [f"{text}  98 s left", f"{text}  97 s left"]
    assert bar == ["start", (1, ""), (2, left[0]), (3, left[1]), (3, text), "stop"]
    assert capsys.readouterr().err == ""


def test_short_steps_move_a_bar_ten_times_a_second(wall: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = watch_bar(monkeypatch)
    follow(TrainingProgress(None, 64, RankLog(0, 1), shown=True), wall, steps=1000, pace=0.001)
    moves = [call for call in bar if isinstance(call, tuple)]
    assert 8 <= len(moves) <= 11
    assert moves[-1][0] == 1000, "it ends where the run did"


def test_among_other_ranks_a_terminal_gets_lines(
    wall: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = watch_bar(monkeypatch)
    follow(TrainingProgress(None, 64, RankLog(0, 2), shown=True), wall, steps=11)
    assert not bar
    assert capsys.readouterr().err == "[Rank 0] step 11  loss 0.2500  128 samples/s\n"


def test_a_bar_is_stopped_also_after_an_error(wall: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = watch_bar(monkeypatch)
    with pytest.raises(ZeroDivisionError), TrainingProgress(100, 64, RankLog(0, 1), shown=True):
        raise ZeroDivisionError
    assert (bar[0], bar[-1]) == ("start", "stop")
