"""A training's EMA and SWA, and their absence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import samestep
from samestep.errors import Stopped
from samestep.run.run import Run
from samestep.train.training_averages import TrainingAverages
from tests.unit.train.own_loops import Noisy, settings


def averages_of(run: Run, dataset: Any = None) -> tuple[TrainingAverages, nn.Linear]:
    model = nn.Linear(3, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    source = run.source(dataset or Noisy())
    return TrainingAverages(run, [optimizer], source, run.total_steps(source)), model


def train(run: Run, averages: TrainingAverages, model: nn.Module) -> list[torch.Tensor]:
    """Train, and return the weights after each update."""
    seen = []
    for step in run.steps(Noisy()):
        step.train(lambda batch: (model(batch.x).sum(), len(batch)))
        averages.end_step(step)
        seen.append(model.weight.detach().clone())  # type: ignore[union-attr, operator]
    return seen


def test_without_a_section_there_is_no_average(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        averages, model = averages_of(run)
        train(run, averages, model)
        assert averages.weights() == {}
        assert averages.measure(lambda prefix: pytest.fail("nothing to measure")) == {}
        assert averages.finish(lambda: True, lambda prefix: pytest.fail("nothing")) == {}


def test_the_moving_average_is_measured_in_the_models_place(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path, ema={"decay": 0.5})) as run:
        averages, model = averages_of(run)
        train(run, averages, model)
        own = model.weight.detach().clone()

        def measure(prefix: str) -> dict[str, Any]:
            assert torch.equal(model.weight, averages.weights()["ema.weight"])
            return {f"{prefix}val_loss": 1.0}

        assert averages.measure(measure) == {"ema_val_loss": 1.0}
        assert torch.equal(model.weight, own)


@pytest.mark.parametrize("has_batchnorm", [False, True])
def test_the_mean_is_measured_once_at_the_end(tmp_path: Path, has_batchnorm: bool) -> None:
    calls: list[str] = []

    def statistics() -> bool:
        calls.append("statistics")
        return has_batchnorm

    with samestep.start(settings(tmp_path, swa={"start": 2, "every": 1})) as run:
        averages, model = averages_of(run)
        seen = train(run, averages, model)
        assert averages.measure(lambda prefix: pytest.fail("only at the end")) == {}
        found = averages.finish(statistics, lambda prefix: calls.append(prefix) or {f"{prefix}val_loss": 1.0})
        mean = averages.weights()["swa.weight"]
    assert found == {"swa_val_loss": 1.0}
    assert calls == ["statistics", "swa_"], "its statistics come first"
    assert torch.allclose(mean, torch.stack(seen[2:]).mean(0), rtol=1e-4)


def test_averages_resume_with_their_run(tmp_path: Path) -> None:
    values = {"ema": {"decay": 0.5}, "swa": {"start": 1, "every": 1}}

    def run_once(folder: Path, pause: int | None) -> dict[str, torch.Tensor]:
        with samestep.start(settings(folder, **values)) as run:
            averages, model = averages_of(run)
            if pause is not None:
                run.pause_after(pause)
            train(run, averages, model)
            return {name: tensor.clone() for name, tensor in averages.weights().items()}

    whole = run_once(tmp_path / "whole", None)
    with pytest.raises(Stopped):
        run_once(tmp_path / "parts", 3)
    parts = run_once(tmp_path / "parts", None)
    assert set(parts) == set(whole) == {"ema.weight", "swa.weight"}
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
