"""Progress in plain lines, and as a bar on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from rich.progress import Progress

from samestep.distributed.logging import RankLog
from samestep.step.step_log import StepRecord
from samestep.train.progress import SampleProgress, TrainingProgress, TurnProgress
from tests.unit.clock import Clock


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def record(step: int, seconds: float = 0.5) -> StepRecord:
    return StepRecord(step, 0, 0.25, 8, (0.1,), None, seconds)


def follow(progress: TrainingProgress, wall: Clock, steps: int = 30) -> None:
    with progress:
        for step in range(steps):
            wall.now += 1
            progress.on_record(record(step))


def test_a_line_comes_every_ten_seconds(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(TrainingProgress(100, 64, RankLog(0, 1), shown=True), wall)
    assert capsys.readouterr().err.splitlines() == [
        "step 11/100  loss 0.2500  128 samples/s  44 s left",
        "step 22/100  loss 0.2500  128 samples/s  39 s left",
    ]


def test_without_a_known_end_there_is_no_time_left(
    wall: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    follow(TrainingProgress(None, 6400, RankLog(0, 1), shown=True), wall, steps=11)
    assert capsys.readouterr().err == "step 11  loss 0.2500  12,800 samples/s\n"


def test_steps_too_short_to_measure_have_no_rate(
    wall: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingProgress(10, 8, RankLog(0, 1), shown=True) as progress:
        wall.now += 11
        progress.on_record(record(0, seconds=0.0))
    assert capsys.readouterr().err == "step 1/10  loss 0.2500  0 samples/s  0 s left\n"


def test_other_ranks_show_nothing(wall: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    follow(TrainingProgress(100, 64, RankLog(1, 2), shown=False), wall)
    with SampleProgress(100, RankLog(1, 2), shown=False) as progress:
        wall.now += 100
        progress.add(5)
    assert capsys.readouterr().err == ""


def test_samples_are_counted_with_their_rate(
    wall: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with SampleProgress(500, RankLog(0, 1), shown=True) as progress:
        for _ in range(3):
            wall.now += 8
            progress.add(40)
    assert capsys.readouterr().err == "sample 80/500  5 samples/s\n"


def test_turns_are_shown_with_whose_they_are(
    wall: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for shown in (True, False):
        with TurnProgress(2, RankLog(0, 1), shown) as progress:
            progress.begin("1 lane")
            wall.now += 11
            progress.end()
            progress.begin("2 lanes")
            progress.end()
    assert capsys.readouterr().err == "turn 1/2  1 lane\n"


def test_a_terminal_gets_a_bar_in_place_of_lines(
    wall: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Progress, "start", lambda self: calls.append("start"))
    monkeypatch.setattr(Progress, "stop", lambda self: calls.append("stop"))
    monkeypatch.setattr(
        Progress, "update", lambda self, row, completed, text: calls.append((completed, text))
    )
    follow(TrainingProgress(100, 64, RankLog(0, 1), shown=True), wall, steps=2)
    text = "loss 0.2500  128 samples/s"
    assert calls == ["start", (1, text), (2, text), "stop"]
    assert capsys.readouterr().err == ""


def test_a_bar_is_stopped_also_after_an_error(wall: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(Progress, "start", lambda self: calls.append("start"))
    monkeypatch.setattr(Progress, "stop", lambda self: calls.append("stop"))
    with (
        pytest.raises(ZeroDivisionError),
        TrainingProgress(100, 64, RankLog(0, 1), shown=True),
    ):
        raise ZeroDivisionError
    assert calls == ["start", "stop"]
