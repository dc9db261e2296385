"""One training by the AMP trainers, cut into four lanes, for any number of ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.amp import AMPConfig, AMPTrainer, DistributedAMPTrainer

LANES = 4
EVEN = (4, 4, 4, 4)
UNEVEN = (5, 2, 7, 3)
OVERFLOWING = 1e10
"""A target whose squared error is finite and whose gradient is not, in fp16."""

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """BatchNorm and dropout: what could make a training depend on its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.25)
        self.last = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(F.relu(self.norm(self.first(x)))))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def mean_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)


def lanes_of(
    steps: int, sizes: Sequence[int] = EVEN, overflow: tuple[int, int] | None = None, first: int = 0
) -> list[list[Batch | None]]:
    """Each step's batches, one per lane; None where a lane has no samples.

    With `overflow` (step, lane) one sample of that batch has a gradient that is infinite.
    """
    found: list[list[Batch | None]] = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        lanes: list[Batch | None] = []
        for lane, size in enumerate(sizes):
            x = torch.randn(size, 6, generator=generator)
            y = torch.randn(size, 2, generator=generator)
            if (step, lane) == overflow:
                y[0, 0] = OVERFLOWING
            lanes.append((x, y) if size else None)
        found.append(lanes)
    return found


def config_of(precision: str, **values: Any) -> AMPConfig:
    forced = {"bf16": AMPConfig.force_bf16, "fp16": AMPConfig.force_fp16}
    made = forced.get(precision)
    return AMPConfig(precision=precision, **values) if made is None else made(**values)


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_trainer(
    precision: str, model: nn.Module | None = None, log_dir: str | None = None, **values: Any
) -> AMPTrainer:
    """This process's trainer: the plain one alone, the distributed one as one of several ranks.

    Every rank starts from weights of its own, of which rank 0's must win.
    """
    rank, world = rank_and_world()
    model = net(seed=rank) if model is None else model
    options: dict[str, Any] = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.02),
        "accumulation_steps": LANES // world,
        "loss_fn": mean_loss,
        "log_dir": log_dir,
    }
    config = config_of(precision, **values)
    if world == 1:
        return AMPTrainer(model, config, **options)
    return DistributedAMPTrainer(model, config, rank=rank, world_size=world, backend="gloo", **options)


def run_lanes(trainer: AMPTrainer, steps: list[list[Batch | None]]) -> list[list[float]]:
    """Train on this rank's lanes of each step; gives their losses."""
    rank, world = rank_and_world()
    mine = range(rank * LANES // world, (rank + 1) * LANES // world)
    losses = []
    for lanes in steps:
        torch.manual_seed(rank)  # what the caller draws must not matter
        losses.append([trainer.training_step(lanes[lane]) for lane in mine])
    return losses


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def digest(trainer: AMPTrainer) -> str:
    """Of every bit of the weights, the buffers and the optimizer's state."""
    found = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        found.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    for number, entries in sorted(trainer.optimizer.state_dict()["state"].items()):
        for name, value in sorted(entries.items()):
            number_of = torch.as_tensor(value).cpu().contiguous().numpy().tobytes()
            found.update(f"{number} {name}".encode() + number_of)
    return found.hexdigest()
