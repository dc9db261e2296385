"""What a custom loop measures: logged values, losses, evaluations, BatchNorm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import samestep
from samestep.errors import TaskError
from samestep.step.step import Step
from tests.unit.train.own_loops import Noisy, assert_equal, losses, prepared, rows, settings, squares, train


def test_logged_values_reach_metrics_jsonl_in_full(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        run.log(4, {"value": 0.1 + 0.2, "name": "x"})
        run.flush()
        assert rows(tmp_path, "value") == [{"step": 4, "value": 0.1 + 0.2, "name": "x"}]


def test_a_logged_tensor_is_its_number_and_no_value_replaces_the_rows_step(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        run.log(4, {"value": torch.tensor(0.5)})
        with pytest.raises(TaskError, match="a value is called step"):
            run.log(4, {"step": 5})
        run.flush()
        assert rows(tmp_path, "value") == [{"step": 4, "value": 0.5}]


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


def test_an_evaluation_is_the_mean_over_every_sample_once(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(21.0)[:, None])
    seen: list[int] = []

    def measure(model: nn.Module, batch: samestep.LaneBatch, metrics: Any) -> tuple[Tensor, int]:
        seen.extend(batch.ids)
        assert not model.training
        return batch.x.sum(), len(batch)

    with samestep.start(settings(tmp_path)) as run:
        prepared(run)
        assert run.evaluate(data, measure, prefix="test_") == {"test_val_loss": 10.0}
    assert sorted(seen) == list(range(21))


def test_an_evaluation_that_gives_nan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(model: nn.Module, batch: samestep.LaneBatch, metrics: Any) -> tuple[float, int]:
        return float("nan"), len(batch)

    with samestep.start(settings(tmp_path)) as run:
        prepared(run)
        run.evaluate(Noisy(), measure, step=7)  # type: ignore[arg-type]
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


def test_batchnorm_is_measured_again_where_there_is_one(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        model, _ = prepared(run)
        assert run.measure_batchnorm(Noisy(), lambda m, batch: m(batch.x))
        statistics = model[1].running_mean  # type: ignore[index]
        assert statistics.abs().sum() > 0
    with samestep.start(settings(tmp_path / "plain")) as run:
        plain = nn.Linear(3, 1)
        run.prepare(plain, SGD(plain.parameters(), lr=0.1))
        assert not run.measure_batchnorm(Noisy(), lambda m, batch: m(batch.x))
