"""What a captured step holds as it was, and whether it is still so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from samestep.step.captured_constants import CapturedConstants, loss_code

WEIGHT = 0.5


class Task:
    def __init__(self) -> None:
        self.weight, self.calls, self.table, self.seen = 1.0, 0, torch.ones(2), [0]

    def loss(self, batch: Any) -> float:
        self.calls += 1
        return self.weight * WEIGHT


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))


def of_task(task: Task) -> CapturedConstants:
    return CapturedConstants.of_loss(task.loss, [])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda task: setattr(task, "weight", 2.0), "Task.weight"),
        (lambda task: task.loss(None), "Task.calls"),
        (lambda task: setattr(task, "table", torch.ones(2)), "Task.table"),
        (lambda task: setattr(task, "weight", float("1.0")), None),
        (lambda task: task.table.add_(1), None),  # a replay reads it there
        (lambda task: None, None),
    ],
)
def test_what_a_loss_reads_from_its_task_is_followed(change: Callable[[Task], Any], name: str | None) -> None:
    task = Task()
    values = of_task(task)
    change(task)
    assert values.changed() == name


def test_a_method_inside_a_partial_is_found() -> None:
    task = Task()
    values = CapturedConstants.of_loss(partial(task.loss, batch=None), [])
    task.weight = 3.0
    assert values.changed() == "Task.weight"


def test_a_global_number_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = of_task(Task())
    assert values.changed() is None
    monkeypatch.setitem(globals(), "WEIGHT", 0.25)
    assert values.changed() == f"{__name__}.WEIGHT"


def test_a_closure_is_followed_and_a_lambda_made_anew_is_the_same_loss() -> None:
    scale = 1.0

    def made() -> Callable[[Any], float]:
        return lambda batch: scale

    values, code = CapturedConstants.of_loss(made(), []), loss_code(made())
    assert loss_code(made()) == code
    assert values.changed() is None
    scale = 2.0
    assert values.changed() == "scale (which the loss function refers to)"


def test_modules_modes_and_numbers_are_followed() -> None:
    net = model()
    for change, name in (
        (lambda: setattr(net[1], "p", 0.3), "Sequential.1.p"),
        (lambda: net[0].eval(), "Sequential.0.training"),
    ):
        values = CapturedConstants.of_loss(lambda batch: 0.0, [net])
        assert values.changed() is None
        change()
        assert values.changed() == name


def test_groups_are_followed_but_for_their_rates() -> None:
    optimizer = AdamW(model().parameters())
    values = CapturedConstants.of_optimizers([optimizer])
    optimizer.param_groups[0]["lr"] = 0.5
    assert values.changed() is None
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    assert values.changed() == "AdamW's group 0.betas"


def test_values_are_put_back_after_a_trial() -> None:
    task, scale = Task(), 1.0

    def loss(batch: Any) -> float:
        nonlocal scale
        scale += 1
        return scale

    of_closure, values = CapturedConstants.of_loss(loss, []), of_task(task)
    loss(None)
    task.loss(None)
    assert values.changed()
    assert of_closure.changed()
    values.put_back()
    of_closure.put_back()
    assert (task.calls, scale) == (0, 1.0)
    assert values.changed() is None
    assert of_closure.changed() is None
