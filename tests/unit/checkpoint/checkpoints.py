"""What the checkpoint tests share: checkpoints on disk, models, damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import write_checkpoint
from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.manifest import MANIFEST, MODEL, TRAINING, Best, Manifest, folder_name
from samestep.checkpoint.state import RunState


def manifest(step: int = 4, **changes: Any) -> Manifest:
    usual = Manifest(
        step=step,
        epoch=1,
        world=2,
        saved_at=1.7e9,
        metrics={"val_loss": 0.25},
        best=None,
        ended=None,
        config={"seed": 0},
        plan={"lanes": 8},
        versions={"samestep": "0.1.0"},
    )
    return replace(usual, **changes)


def put(
    folder: Path,
    model: Mapping[str, Tensor] | None = None,
    training: Mapping[str, Any] | None = None,
    saved: Manifest | None = None,
) -> Path:
    """A checkpoint on the disk."""
    saved = saved or manifest()
    path = folder / folder_name(saved.step)
    model = {"weight": torch.arange(6.0).view(2, 3)} if model is None else model
    training = {"optimizers": [], "position": {"step": saved.step}} if training is None else training
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(Files(), path, model, training, saved)
    return path


def saved_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints."""
    return [item.step for item in list_checkpoints(run / "checkpoints", checksums=True)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


class Tied(nn.Module):
    """A language model's first and last matrix are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 3)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight


class Extra(nn.Module):
    """Has a state that is no tensor, as torchmetrics and quantised layers do."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def state_of(model: nn.Module, *optimizers: Optimizer) -> RunState:
    return RunState([model], list(optimizers), [], {})


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        kind = next(model.parameters()).dtype
        optimizer.zero_grad()
        model(torch.randn(8, 3, dtype=kind)).square().mean().backward()
        optimizer.step()


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def longer(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b"x")

    return act


def flipped(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return act


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (missing(MANIFEST), "it has no manifest.json"),
    (missing(MODEL), "model.safetensors cannot be read: No such file"),
    (missing(TRAINING), "training.pt cannot be read: No such file"),
    (cut(MODEL), r"model.safetensors has \d+ bytes and was written with \d+"),
    (cut(TRAINING), r"training.pt has \d+ bytes and was written with \d+"),
    (longer(MODEL), r"model.safetensors has \d+ bytes and was written with \d+"),
    (flipped(MODEL), r"model.safetensors is not what was written \(checksum\)"),
    (flipped(TRAINING), r"training.pt is not what was written \(checksum\)"),
]


DAMAGED = pytest.mark.parametrize(
    ("damage", "words"), DAMAGE, ids=[words.split(" ")[0] + str(n) for n, (_, words) in enumerate(DAMAGE)]
)


def run_with(tmp_path: Path, *optimizers: Optimizer, model: nn.Module) -> Path:
    state = state_of(model, *optimizers)
    best = Best(2, "val_loss", 0.5)
    for step in (2, 4):
        saved = manifest(step, best=best, epoch=step // 2)
        put(tmp_path / "checkpoints", state.model_tensors(), state.training(), saved)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    return tmp_path
