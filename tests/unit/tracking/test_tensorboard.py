"""TensorBoard's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.tracking.tensorboard import TensorBoard
from tests.unit.tracking.running import a_figure, tracked


class Writer:
    """What we use of TensorBoard's writer."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_tensorboard_gets_the_numbers_of_a_row_by_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = TensorBoard.__new__(TensorBoard)
    writer = Writer()
    monkeypatch.setattr(tracker, "_writer", writer, raising=False)
    tracker.write({"step": 7, "loss": 0.5, "epoch": 1, "lr": [1, 2], "name": "x"})
    tracker.flush()
    tracker.close()
    scalars = [("loss", 0.5, 7), ("epoch", 1, 7), ("lr/0", 1, 7), ("lr/1", 2, 7)]
    assert writer.calls == [*scalars, "flush", "close"]


def test_tensorboard_takes_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path)
    tracker.start(tracked(tmp_path))
    tracker.write({"step": 3, "curve": a_figure(), "loss": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["images"] == ["curve"]
    assert events.Tags()["scalars"] == ["loss"]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((0, 1.0), (1, 2.0)):
        tracker = TensorBoard(tmp_path)
        tracker.start(tracked(tmp_path, start=start))
        for step in range(start, 3):
            tracker.write({"step": step, "loss": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1.0), (1, 2.0), (2, 2.0)]
