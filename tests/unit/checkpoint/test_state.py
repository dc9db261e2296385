"""A run's state: put into a checkpoint, loaded back, the training continues to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from samestep.checkpoint.format import read_model, read_training
from samestep.checkpoint.manifest import MODEL
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import RunState
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import Extra, Tied, put, same_bits, small_model, state_of, train


def test_tied_weights_are_written_once_and_load_into_both(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = Tied(), Tied()
    state = state_of(model)
    assert list(state.model_tensors()) == ["first.weight"]
    folder = put(tmp_path, state.model_tensors(), state.training())

    missing, unexpected = safetensors.torch.load_model(other, folder / MODEL)
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(other.last.weight, model.first.weight)

    third = Tied()
    state_of(third).load(read_model(folder), read_training(folder))
    assert torch.equal(third.last.weight, model.first.weight)
    assert third.last.weight is third.first.weight


def test_empty_tensors_are_not_mistaken_for_shared_ones(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.empty(0))
    model.register_buffer("known", torch.empty(0))
    state = state_of(model)
    assert {"seen", "known"} <= state.model_tensors().keys()
    folder = put(tmp_path, state.model_tensors(), state.training())
    state.load(read_model(folder), read_training(folder))
    safetensors.torch.load_model(model, folder / MODEL)


SCHEDULES: dict[str, Callable[[Optimizer], lr.LRScheduler]] = {
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 6, 6], gamma=0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 9)], [3]),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, total_iters=4), lr.ExponentialLR(o, 0.9)]),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="exp_range", gamma=0.9),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_resumes_where_it_was(tmp_path: Path, kind: str) -> None:
    def start() -> tuple[nn.Module, Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULES[kind](optimizer)

    def take_steps(optimizer: Optimizer, schedule: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            optimizer.step()
            schedule.step(*([1.0 + step] if kind == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, schedule = start()
    take_steps(optimizer, schedule, range(4))
    state = RunState([model], [optimizer], [schedule], {})
    copy = Snapshot().take({"model": state.model_tensors(), "training": state.training()})
    folder = put(tmp_path, copy["model"], copy["training"])
    expected = take_steps(optimizer, schedule, range(4, 12))
    assert len(set(expected)) > 1

    model, optimizer, schedule = start()
    RunState([model], [optimizer], [schedule], {}).load(read_model(folder), read_training(folder))
    assert take_steps(optimizer, schedule, range(4, 12)) == expected


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda m: Adam(m.parameters(), lr=0.05),
    "AdamW amsgrad": lambda m: AdamW(m.parameters(), lr=0.05, amsgrad=True),
    "SGD": lambda m: SGD(m.parameters(), lr=0.05),
    "SGD momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "groups": lambda m: AdamW([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(m.parameters())]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    model = small_model(dtype)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(3))
    state = state_of(model, optimizer)
    copy = Snapshot().take({"model": state.model_tensors(), "training": state.training()})
    folder = put(tmp_path, copy["model"], copy["training"])
    train(model, optimizer, range(3, 6))

    other = small_model(dtype)
    again = OPTIMIZERS[kind](other)
    state_of(other, again).load(read_model(folder), read_training(folder))
    train(other, again, range(3, 6))
    for (name, left), right in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert same_bits(left, right), name


@pytest.mark.parametrize("kind", ["Adam", "AdamW amsgrad", "SGD momentum"])
def test_float32_moments_of_bf16_weights_stay_float32(tmp_path: Path, kind: str) -> None:
    model = small_model(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(1))
    fine: dict[int, dict[str, Tensor]] = {}
    for number, entries in enumerate(optimizer.state.values()):
        for key in [k for k, v in entries.items() if isinstance(v, Tensor) and v.dim()]:
            entries[key] = entries[key].float() + 2.0**-20  # more digits than bf16 has
            fine.setdefault(number, {})[key] = entries[key]
    assert fine
    state = state_of(model, optimizer)
    folder = put(tmp_path, state.model_tensors(), state.training())

    other = small_model(torch.bfloat16)
    again = OPTIMIZERS[kind](other)
    state_of(other, again).load(read_model(folder), read_training(folder))
    for number, entries in enumerate(again.state.values()):
        for key, value in fine[number].items():
            assert same_bits(entries[key], value), key
        for key, value in entries.items():
            if key == "step":
                assert value.dtype == torch.float32


def test_added_objects_and_other_modules_are_restored(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(1, 3)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    state = RunState([model, other], [optimizer], [], {"ema": nn.Linear(1, 1)})
    folder = put(tmp_path, state.model_tensors(), state.training())
    expected = other.weight.detach().clone()
    nn.init.zeros_(other.weight)
    state.load(read_model(folder), read_training(folder))
    assert torch.equal(other.weight, expected)
    assert list(read_training(folder)["kept"]) == ["ema"]


def test_every_name_and_shape_that_does_not_fit_is_reported_at_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1), "c": nn.Linear(1, 1)})
    was = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(3, 1).double(), "d": nn.Linear(1, 1)})
    optimizer = SGD(was.parameters(), lr=0.1)
    saved = RunState([was, nn.Linear(1, 1)], [optimizer], [lr.ConstantLR(optimizer)], {})
    with pytest.raises(CheckpointError) as caught:
        state_of(model).load(saved.model_tensors(), saved.training())
    assert str(caught.value).splitlines() == [
        "the checkpoint does not fit this task's objects:",
        "  - c.bias is not in the checkpoint",
        "  - c.weight is not in the checkpoint",
        "  - d.bias is only in the checkpoint",
        "  - d.weight is only in the checkpoint",
        "  - a.bias is (3,) float32, in the checkpoint (4,) float32",
        "  - a.weight is (3, 2) float32, in the checkpoint (4, 2) float32",
        "  - b.bias is (1,) float32, in the checkpoint (1,) float64",
        "  - b.weight is (1, 3) float32, in the checkpoint (1, 3) float64",
        "  - ...",
    ]


def test_another_number_of_objects_is_reported() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    saved = RunState([model, nn.Linear(1, 1)], [optimizer], [lr.ConstantLR(optimizer)], {})
    with pytest.raises(CheckpointError) as caught:
        state_of(model).load(saved.model_tensors(), saved.training())
    assert str(caught.value).splitlines()[1:] == [
        "  - modules besides the model: 0 here, 1 in the checkpoint",
        "  - optimizers: 0 here, 1 in the checkpoint",
        "  - schedules: 0 here, 1 in the checkpoint",
    ]


def test_nothing_changes_when_the_model_does_not_fit() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    saved = state_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError):
        state_of(nn.Sequential(layer)).load(saved.model_tensors(), saved.training())
    assert torch.equal(layer.weight, before)


def test_an_optimizer_with_other_groups_is_reported() -> None:
    model = nn.Linear(2, 2)
    saved = state_of(model, SGD(model.parameters(), lr=0.1))
    here = state_of(model, SGD([{"params": [p]} for p in model.parameters()], lr=0.1))
    with pytest.raises(CheckpointError, match="the state of an optimizer does not fit this SGD"):
        here.load(saved.model_tensors(), saved.training())


def test_a_modules_extra_state_is_restored(tmp_path: Path) -> None:
    state = state_of(Extra("saved"))
    folder = put(tmp_path, state.model_tensors(), state.training())
    other = Extra("new")
    state_of(other).load(read_model(folder), read_training(folder))
    assert other.note == "saved"


def test_a_missing_extra_state_is_reported() -> None:
    saved = state_of(Extra("saved"))
    training = {**saved.training(), "model": {}}
    with pytest.raises(CheckpointError, match="_extra_state is not in the checkpoint"):
        state_of(Extra("new")).load(saved.model_tensors(), training)
