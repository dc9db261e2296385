"""A checkpoint as one file of torch.save, for other projects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD, Adam

from samestep.checkpoint.manifest import MODEL, folder_name
from samestep.checkpoint.torch_file import write_torch_file
from samestep.errors import CheckpointError, OutputError
from tests.unit.checkpoint.checkpoints import Extra, Tied, flipped, run_with, same_bits, small_model, train


@pytest.mark.requirement("000-P2-12", "000-V-2")
def test_the_file_has_the_keys_that_others_read(tmp_path: Path) -> None:
    model = small_model()
    optimizer = Adam(model.parameters(), lr=0.05)
    train(model, optimizer, range(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    run = run_with(tmp_path, optimizer, model=model)
    written = write_torch_file(run, "best", tmp_path / "new" / "model.pt")
    assert written.step == 2
    found = torch.load(tmp_path / "new" / "model.pt", weights_only=True)
    assert list(found) == ["model_state_dict", "optimizer_state_dict", "epoch"]
    assert found["epoch"] == 1
    assert found["model_state_dict"].keys() == expected.keys()
    assert all(same_bits(found["model_state_dict"][name], expected[name]) for name in expected)
    other = small_model()
    other.load_state_dict(found["model_state_dict"])
    Adam(other.parameters()).load_state_dict(found["optimizer_state_dict"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.pt"]


def test_several_optimizers_are_written_as_a_list(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    pair = [SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.2)]
    write_torch_file(run_with(tmp_path, *pair, model=model), "last", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)["optimizer_state_dict"]
    assert [state["param_groups"][0]["lr"] for state in found] == [0.1, 0.2]


@pytest.mark.parametrize("model", [Tied(), Extra("saved")], ids=["tied weights", "extra state"])
def test_the_file_loads_strictly_into_the_model_it_came_from(tmp_path: Path, model: nn.Module) -> None:
    run = run_with(tmp_path, SGD(model.parameters(), lr=0.1), model=model)
    write_torch_file(run, "last", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    model.load_state_dict(found["model_state_dict"])


def test_damage_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    folder = run / "checkpoints" / folder_name(4)
    flipped(MODEL)(folder)
    with pytest.raises(CheckpointError, match=rf"{folder}: model.safetensors is not what"):
        write_torch_file(run, "last", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"model\.pt could not be written"):
        write_torch_file(run, "last", tmp_path / "file" / "model.pt")


def test_extra_keys_stand_beside_the_others_and_never_in_their_place(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    write_torch_file(run, "last", tmp_path / "model.pt", extra={"config": {"size": 32}})
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(found) == ["model_state_dict", "optimizer_state_dict", "epoch", "config"]
    assert found["config"] == {"size": 32}
    with pytest.raises(OutputError, match="has epoch already"):
        write_torch_file(run, "last", tmp_path / "other.pt", extra={"epoch": 3})


def test_averaged_weights_are_written_if_there_are_any(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    average = {"weight": torch.full((1, 1), 7.0), "bias": torch.full((1,), 8.0)}
    save_file(average, run / "average.safetensors")
    write_torch_file(run, "last", tmp_path / "model.pt", weights="average")
    found = torch.load(tmp_path / "model.pt", weights_only=True)["model_state_dict"]
    assert all(same_bits(found[name], value) for name, value in average.items())
    with pytest.raises(CheckpointError, match="holds no ema weights"):
        write_torch_file(run, "last", tmp_path / "other.pt", weights="ema")
    with pytest.raises(CheckpointError, match="no weights 'mean'"):
        write_torch_file(run, "last", tmp_path / "other.pt", weights="mean")
