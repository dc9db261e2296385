"""Runs in one process, driven by a loop as users write it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

import samestep
from samestep.run.run import Run
from samestep.step.step import Step
from tests.distributed.running import rows_of


class Noisy(Dataset[Any]):
    """Samples with an augmentation that draws while they are read."""

    def __init__(self, samples: int = 22) -> None:
        self.x = torch.linspace(-1, 1, 3 * samples).view(samples, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + 0.1 * torch.randn(3), x.sum()


class Streams:
    """Noisy samples as lane streams; with a state of their own if `stateful`."""

    def __init__(self, samples: int = 22, stateful: bool = False) -> None:
        self.data, self.stateful = Noisy(samples), stateful

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[Any]:
        # In pairs: BatchNorm takes no lane of one sample.
        indices = [i for i in range(len(self.data)) if i // 2 % lanes == lane]
        return Placed(self.data, indices) if self.stateful else (self.data[i] for i in indices)


class Placed:
    """A stream that can be put to where it was."""

    def __init__(self, data: Noisy, indices: list[int]) -> None:
        self.data, self.indices, self.done = data, indices, 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < len(self.indices):
            self.done += 1
            yield self.data[self.indices[self.done - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def settings(run_dir: Path, **values: Any) -> dict[str, Any]:
    """A config of 6 steps over 22 samples: three lanes of two, and an uneven tail."""
    return {
        "global_batch": 8,
        "lanes": 4,
        "epochs": 2,
        "seed": 3,
        "log_every": 2,
        "run_dir": str(run_dir),
        "distributed": {"device": "cpu", "threads_per_rank": 1},
        **values,
    }


def net() -> nn.Module:
    """A model that draws, and whose buffers change."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


def prepared(run: Run) -> tuple[nn.Module, SGD]:
    model = net()
    return run.prepare(model, SGD(model.parameters(), lr=0.05, momentum=0.9))


def squares(model: nn.Module) -> Callable[[samestep.LaneBatch], tuple[Tensor, int]]:
    return lambda batch: ((model(batch.x)[:, 0] - batch.y).square().sum(), batch.size)


def train(
    run: Run,
    dataset: Any = None,
    each: Callable[[Step], None] = lambda step: None,
    listener: samestep.RunListener | None = None,
) -> dict[str, Tensor]:
    """Run a loop to its end, calling `each` after every update; returns the final state."""
    if listener is not None:
        run.add_listener(listener)
    model, optimizer = prepared(run)
    for step in run.steps(Noisy() if dataset is None else dataset):
        step.train(squares(model))
        each(step)
    states = optimizer.state_dict()["state"].values()
    momenta = {f"momentum {n}": state["momentum_buffer"] for n, state in enumerate(states)}
    return {name: value.clone() for name, value in {**model.state_dict(), **momenta}.items()}


def train_part(
    config: dict[str, Any], steps: int, dataset: Any = None, listener: samestep.RunListener | None = None
) -> None:
    """Run a loop that is stopped after so many steps, as by a signal."""
    with samestep.start(config) as run:
        run.pause_after(steps)
        train(run, dataset, listener=listener)


def rows(run_dir: Path, key: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that hold this value."""
    return [row for row in rows_of(run_dir) if key in row]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir, "loss")]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same tensors to the bit."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
