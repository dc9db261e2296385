"""A model on the meta device gets memory only for what this rank holds, and only where a checkpoint fills it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.errors import TaskError
from samestep.step.run_objects import give_memory


def _made(persistent: bool = True) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        model.register_buffer("table", torch.zeros(2), persistent=persistent)
        model[1].weight = model[0].bias = nn.Parameter(torch.zeros(4, 4).t())
    return model


def test_parameters_stay_the_same_objects() -> None:
    model = _made()
    model[0].weight.is_scaled = True
    params = list(model.parameters())
    give_memory(model, lambda param: param is not model[1].bias, True)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model[1].weight is model[0].bias
    assert model[1].weight.stride() == (1, 4)
    assert model[0].weight.is_scaled
    sizes = [param.untyped_storage().nbytes() for param in params]
    assert sizes == [48, 64, 0]
    assert model.table.device.type == "cpu"
    assert all(param.device.type == "cpu" and param.requires_grad for param in params)


def test_a_model_with_weights_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.data_ptr()
    give_memory(model, lambda param: False, False)
    assert model.weight.data_ptr() == before


def test_what_no_checkpoint_fills_is_refused() -> None:
    with pytest.raises(TaskError, match="no checkpoint is resumed"):
        give_memory(_made(), lambda param: True, False)
    with pytest.raises(TaskError, match="table is in no checkpoint"):
        give_memory(_made(persistent=False), lambda param: True, True)


def test_what_would_be_lost_is_refused() -> None:
    with torch.device("meta"):
        hooked = nn.Linear(2, 2)
    hooked.weight.register_hook(lambda grad: grad)
    with pytest.raises(TaskError, match="weight has hooks, which a model on the meta device would"):
        give_memory(hooked, lambda param: True, True)


def test_recurrent_layers_and_shared_buffers_stay_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LSTM(2, 3), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        model[2].running_mean = model[1].running_mean
    assert give_memory(model, lambda param: True, True)
    assert model[1].running_mean is model[2].running_mean
    for param in model.parameters():
        nn.init.ones_(param)
    assert model[0](torch.ones(1, 1, 2))[0].shape == (1, 1, 3)
