"""TensorBoard's events."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.tracking.tensorboard import TensorBoard
from tests.unit.tracking.running import a_figure, tracked


def test_tensorboard_takes_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(tmp_path)
    tracker.start(tracked(tmp_path))
    tracker.write({"step": 3, "curve": a_figure(), "loss": 0.5, "epoch": 1, "lr": [1, 2], "name": "x"})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["images"] == ["curve"]
    assert sorted(events.Tags()["scalars"]) == ["epoch", "loss", "lr/0", "lr/1"]


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
