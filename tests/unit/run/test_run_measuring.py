"""What a custom loop measures: logged values, losses, evaluations, BatchNorm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import TaskError
from samestep.step.step import Step
from tests.unit.train.own_loops import Noisy, assert_equal, losses, prepared, rows, settings, squares, train


def test_logged_values_reach_metrics_jsonl_and_none_replaces_the_rows_step(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        run.log(4, {"value": 0.1 + 0.2, "name": "x", "tensor": torch.tensor(0.5)})
        with pytest.raises(TaskError, match="a value is called step"):
            run.log(4, {"step": 5})
        run.flush()
        assert rows(tmp_path, "value") == [{"step": 4, "value": 0.1 + 0.2, "name": "x", "tensor": 0.5}]


def test_losses_are_written_a_period_at_a_time_and_at_the_end(tmp_path: Path) -> None:
    written: list[int] = []

    def each(step: Step) -> None:
        written.append(len(losses(tmp_path)))

    with samestep.start(settings(tmp_path, log_every=4, checkpoint={"every_epochs": None})) as run:
        train(run, each=each)
    assert written == [0, 0, 0, 4, 4, 4]
    assert len(losses(tmp_path)) == 6


def test_flush_writes_what_was_measured_so_far(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path, log_every=100)) as run:

        def each(step: Step) -> None:
            run.flush()
            assert len(losses(tmp_path)) == step.index + 1

        train(run, each=each)


def test_an_evaluation_that_gives_nan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(model: nn.Module, batch: samestep.LaneBatch, metrics: Any) -> tuple[float, int]:
        return float("nan"), len(batch)

    with samestep.start(settings(tmp_path)) as run:
        prepared(run)
        found = run.evaluate(Noisy(), measure, step=7, prefix="test_")  # type: ignore[arg-type]
        assert list(found) == ["test_val_loss"]
    assert "evaluation at step 7 gave NaN" in capsys.readouterr().err


def test_an_evaluation_changes_no_later_draw(tmp_path: Path) -> None:
    results = []
    for name in ("plain", "measured"):
        with samestep.start(settings(tmp_path / name)) as run:

            def each(step: Step, run: samestep.Run = run, name: str = name) -> None:
                if name == "measured":
                    run.evaluate(Noisy(9), lambda m, batch, _: squares(m)(batch), step=step.index)
                    run.measure_batchnorm(Noisy(9), lambda m, batch: None)

            results.append(train(run, each=each))
    assert_equal(*results)
