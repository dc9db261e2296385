"""A config's task, trained from its file to its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samestep.config import load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import Stopped, TaskError
from samestep.train.loop import Outcome
from samestep.train.train_once import train_once
from tests.unit.train.own_loops import losses, settings

TASK = """
import torch
from torch import nn
from samestep import Task
from tests.unit.train.own_loops import Noisy, net, squares

class Small(Task):
    def model(self):
        return net()

    def train_data(self):
        return Noisy()

    def valid_data(self):
        return Noisy(9)

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(self, model, batch):
        return squares(model)(batch)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "small_task_file.py").write_text(TASK)
    yield f"{tmp_path}/small_task_file.py:Small"
    sys.modules.pop("small_task_file", None)


def once(task: str, folder: Path, *more: Any, **values: Any) -> Outcome:
    config = load_config(settings(folder, task=task, **values))
    with SingleProcessContext(threads=1) as context:
        return train_once(config, context, *more)


@pytest.mark.requirement("001-D-9", "001-D-10", "001-S2-6", "001-S3-4")
def test_a_training_reports_how_far_it_got(task: str, tmp_path: Path) -> None:
    outcome = once(task, tmp_path / "run")
    assert (outcome.steps, outcome.stopped) == (6, "done")
    assert outcome.loss == losses(tmp_path / "run")[-1]
    assert outcome.best.value is not None
    assert outcome.best.value <= outcome.metrics["val_loss"]  # type: ignore[operator]


def test_a_training_can_be_stopped_after_so_many_steps_and_resumed(task: str, tmp_path: Path) -> None:
    whole = once(task, tmp_path / "whole")
    with pytest.raises(Stopped, match="--stop-after stopped the run after step 4"):
        once(task, tmp_path / "parts", None, 4)
    parts = once(task, tmp_path / "parts")
    assert (parts.steps, parts.loss, parts.metrics) == (whole.steps, whole.loss, whole.metrics)
    assert vars(parts.best) == vars(whole.best)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_task_that_cannot_be_loaded_frees_the_run_directory(task: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        once("missing.py:Small", tmp_path / "run")
    assert once(task, tmp_path / "run", epochs=1).steps == 3
