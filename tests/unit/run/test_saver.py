"""When a run is saved, and what goes into a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import nn
from torch.optim import SGD

from samestep.checkpoint.format import read_model
from samestep.checkpoint.listing import list_checkpoints
from samestep.config import Config, load_config
from samestep.data.batch import Position
from samestep.distributed.context import SingleProcessContext
from samestep.errors import StepError
from samestep.run.saver import Saver
from tests.unit.checkpoint.checkpoints import saved_steps
from tests.unit.clock import Clock

NAN, INFINITE = float("nan"), float("inf")


def config_in(tmp_path: Path, *overrides: str) -> Config:
    base = {"task": "task.py:Good", "epochs": 3, "global_batch": 8, "run_dir": str(tmp_path)}
    return load_config(base, overrides)


def saver_in(tmp_path: Path, context: SingleProcessContext, *overrides: str) -> Saver:
    saver = Saver(config_in(tmp_path, *overrides), context, tmp_path, None)
    model = nn.Linear(1, 1)
    saver.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    return saver


def _pass(clock: Clock, seconds: float) -> None:
    clock.now += seconds


def test_saves_after_epochs_take_little_of_the_time(
    tmp_path: Path, context: SingleProcessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of one second, of which a save keeps the run waiting for nine tenths."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    saver = saver_in(tmp_path, context)
    monkeypatch.setattr(saver._store, "write", lambda *_: _pass(clock, 0.9))
    saved = []
    for epoch in range(1, 401):
        _pass(clock, 0.1)
        if saver.is_due(epoch, epoch, ends_epoch=True):
            saver.save(Position(step=epoch), {}, None)
            saved.append(epoch)
        else:
            _pass(clock, 0.9)
    assert saved[:6] == [1, 2, 3, 4, 5, 6], "some seconds do not matter"
    took = 0.9 * len(saved)
    assert 0.04 < took / 400 < 0.06
    saver.remember(401, {"loss": 1.0}, best=True)
    assert saver.is_due(401, 401, ends_epoch=True)


@pytest.mark.parametrize(
    ("overrides", "due"),
    [
        ([], {4, 8, 12}),
        (["checkpoint.every_epochs=null"], set()),
        (["checkpoint.every_epochs=2"], {8}),
        (["checkpoint.every_steps=5"], {4, 5, 8, 10, 12}),
        (["checkpoint.every_steps=6", "checkpoint.every_epochs=null"], {6, 12}),
    ],
)
def test_a_save_is_due_by_steps_and_by_epochs(
    tmp_path: Path, context: SingleProcessContext, overrides: list[str], due: set[int]
) -> None:
    saver = saver_in(tmp_path, context, *overrides)
    found = {
        steps
        for steps in range(1, 13)  # epochs of four steps
        if saver.is_due(steps, (steps - 1) // 4 + 1, ends_epoch=steps % 4 == 0)
    }
    assert found == due


def test_one_step_is_saved_once(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context)
    saver.save(Position(2), {}, None)
    saver.wait()
    before = (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").stat().st_mtime_ns
    saver.save(Position(2), {}, None)
    saver.close()
    after = (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").stat().st_mtime_ns
    assert before == after


def test_nothing_is_saved_where_saving_is_off(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context, "checkpoint.enabled=false")
    saver.save(Position(2), {}, None)
    saver.close()
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("behind", ["true", "false"])
def test_a_save_holds_what_was_there_when_it_was_asked_for(
    tmp_path: Path, context: SingleProcessContext, behind: str
) -> None:
    saver = Saver(config_in(tmp_path, f"checkpoint.asynchronous={behind}"), context, tmp_path, None)
    model = nn.Linear(1, 1)
    saver.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    for step in (1, 2):
        nn.init.constant_(model.weight, float(step))
        saver.save(Position(step), {}, None)
        nn.init.constant_(model.weight, NAN)  # the next step begins at once
        if behind == "false":
            assert saved_steps(tmp_path)[-1] == step
    saver.close()
    for item in list_checkpoints(tmp_path / "checkpoints", checksums=True):
        assert read_model(item.folder)["weight"].item() == item.step


def test_two_things_cannot_be_kept_under_one_name(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context)
    saver.keep("ema", nn.Linear(1, 1))
    with pytest.raises(StepError, match=r"run\.register was called twice for 'ema'"):
        saver.keep("ema", nn.Linear(1, 1))


def test_the_clock_asks_for_a_save(
    tmp_path: Path, context: SingleProcessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    saver = saver_in(tmp_path, context, "checkpoint.every_minutes=2")
    context.activity.begin_step(0)
    clock.now += 119
    assert not saver.wants_time()
    clock.now += 2
    assert saver.wants_time()
    assert not saver.wants_time(), "it is told once"
    saver.save(Position(1), {}, None)
    assert not saver.wants_time()
    saver.close()
    assert not saver_in(tmp_path, context, "checkpoint.every_minutes=null").wants_time()


def test_metrics_that_are_tensors_are_refused_by_name(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context)
    with pytest.raises(StepError, match=r"val_loss is a Tensor.*\.item\(\)"):
        saver.remember(1, {"val_loss": torch.tensor(0.5)}, best=True)
