"""Whose optimizers and schedules train: the task's or the config's, never both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import samestep
from samestep.errors import TaskError
from samestep.train.task import Task
from samestep.train.task_optim import choose_optimizers, choose_schedules
from tests.unit.train.own_loops import Noisy, settings


class Own(Task):
    """A task whose optimizers and schedules the test gives."""

    def __init__(self, optimizers: Any = None, schedules: Any = ()) -> None:
        self._optimizers, self._schedules = optimizers, schedules
        self.steps: int | None = -1

    def optimizers(self, model: nn.Module) -> Any:
        return self._optimizers

    def schedules(self, optimizers: Any, steps: int | None) -> Any:
        self.steps = steps
        return self._schedules


def sgd(lr: Any = 0.1) -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=lr)


def optimizers(tmp_path: Path, task: Task, **values: Any) -> list[Any]:
    with samestep.start(settings(tmp_path, task="task.py:Own", **values)) as run:
        return choose_optimizers(run, task, [nn.Linear(1, 1), nn.Linear(1, 1)])


def schedules(tmp_path: Path, task: Task, evaluates: bool = True, **values: Any) -> list[Any]:
    with samestep.start(settings(tmp_path, task="task.py:Own", **values)) as run:
        return choose_schedules(run, task, [sgd()], run.source(Noisy()), evaluates)


# -- optimizers -----------------------------------------------------------------------------------


def test_a_task_gives_one_optimizer_or_several(tmp_path: Path) -> None:
    one, other = sgd(), sgd()
    assert optimizers(tmp_path, Own(one)) == [one]
    assert optimizers(tmp_path, Own((one, other))) == [one, other]


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"optimizers\(\) gave a str: it must give Optimizer"):
        optimizers(tmp_path, Own([sgd(), "adam"]))


def test_the_configs_optimizer_trains_all_modules_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = optimizers(tmp_path, Task(), optimizer={"name": "sgd", "lr": 0.5})
    assert sum(len(group["params"]) for opt in found for group in opt.param_groups) == 4
    assert "Optimizers: " in capsys.readouterr().err


def test_optimizers_of_both_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"section optimizer, and Own defines optimizers\(\)"):
        optimizers(tmp_path, Own(sgd()), optimizer={"name": "sgd"})


@pytest.mark.parametrize("section", [None, {"name": "sgd", "lr": 0.1}])
def test_rates_are_scaled_whoever_set_them(tmp_path: Path, section: Any, capsys: pytest.CaptureFixture[str]) -> None:
    task = Own(sgd()) if section is None else Task()
    values = {"optimizer": section, "lr_scaling": "linear", "base_batch": 2}
    found = optimizers(tmp_path, task, **values)
    rates = [group["lr"] for opt in found for group in opt.param_groups]
    assert rates == [pytest.approx(0.4)] * len(rates)
    assert "multiplied by 4" in capsys.readouterr().err


def test_a_rate_in_a_tensor_is_scaled_in_place(tmp_path: Path) -> None:
    rate = torch.tensor(0.1)
    optimizers(tmp_path, Own(sgd(rate)), lr_scaling="linear", base_batch=4)
    assert rate.item() == pytest.approx(0.2)


# -- schedules ------------------------------------------------------------------------------------


def test_a_task_gives_one_schedule_several_or_none(tmp_path: Path) -> None:
    one = samestep.Schedule(StepLR(sgd(), 1))
    task = Own(schedules=one)
    assert schedules(tmp_path, task) == [one]
    assert task.steps == 6, "it is given the length of the run"
    assert schedules(tmp_path, Own(schedules=[one, one])) == [one, one]
    assert schedules(tmp_path, Own(schedules=None)) == []


def test_a_bare_scheduler_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"schedules\(\) gave a StepLR: it must give Schedule"):
        schedules(tmp_path, Own(schedules=[StepLR(sgd(), 1)]))


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (lambda: samestep.Schedule(ReduceLROnPlateau(sgd()), "step"), "ReduceLROnPlateau"),
        (lambda: samestep.Schedule(StepLR(sgd(), 1), "evaluation"), "StepLR"),
    ],
)
def test_a_schedule_at_the_wrong_pace_is_refused(tmp_path: Path, schedule: Any, name: str) -> None:
    with pytest.raises(TaskError, match=rf"gave a {name} with every=.*only it, has every="):
        schedules(tmp_path, Own(schedules=schedule()))


@pytest.mark.parametrize("by", ["task", "config"])
def test_a_schedule_that_follows_evaluations_needs_some(tmp_path: Path, by: str) -> None:
    plateau = samestep.Schedule(ReduceLROnPlateau(sgd()), "evaluation")
    task = Own(schedules=plateau) if by == "task" else Task()
    values = {} if by == "task" else {"schedule": {"name": "plateau"}}
    assert len(schedules(tmp_path / "with", task, **values)) == 1
    with pytest.raises(TaskError, match="moves on with every evaluation, and there is none"):
        schedules(tmp_path / "without", task, evaluates=False, **values)


def test_schedules_of_both_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"section schedule, and Own defines schedules\(\)"):
        schedules(tmp_path, Own(), schedule={"name": "cosine"})


def test_the_configs_schedule_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [found] = schedules(tmp_path, Task(), schedule={"name": "linear"})
    assert found.every == "step"
    assert "Schedule: " in capsys.readouterr().err
