"""A task of a second for the tests of sweeps, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TASK = """
import os
import signal
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Task

class Tiny(Task):
    def __init__(self, lr, fail="no", wait=""):
        self.lr, self.fail, self.wait = lr, fail, wait

    def data(self, samples, seed):
        x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, x @ torch.tensor([1.0, -2.0, 0.5]))

    def model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        return self.data(16, 1)

    def fold_labels(self, dataset):
        return [int(y > 0) for y in dataset.tensors[1]]

    def valid_data(self):
        return self.data(8, 2)

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        if self.fail == "raise" or self.fail == f"rank {os.environ.get('RANK')}":
            raise RuntimeError("I was told to")
        if self.fail == "memory":
            torch.empty(2**50)
        if self.fail == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.fail == "hang":
            time.sleep(0.02)
        while self.wait and not Path(self.wait).exists():
            Path(self.wait + ".waiting").touch()
            time.sleep(0.02)
        return (model(batch.x)[:, 0] - batch.y).square().sum(), len(batch)

    def evaluate(self, model, batch, metrics):
        total, count = (model(batch.x)[:, 0] - batch.y).square().sum(), len(batch)
        return (total * float("nan") if self.fail == "nan" else total), count

class Sized(Tiny):
    def predict(self, model, batch):
        time.sleep(0.02 * (self.lr == 0.31))
        return model(batch.x)[:, 0]

    def metrics(self):
        from torchmetrics import MaxMetric
        return {"size": MaxMetric()}

    def evaluate(self, model, batch, metrics):
        metrics["size"].update(model.weight.detach().abs().sum())
        return super().evaluate(model, batch, metrics)
"""


def write_sweep(folder: Path, task: str = "Tiny", **values: Any) -> Path:
    """The files of a sweep, with other values."""
    (folder / "tiny_sweep_task.py").write_text(TASK)
    (folder / "base.yaml").write_text(
        f"task: tiny_sweep_task.py:{task}\nglobal_batch: 8\nlanes: 2\nepochs: 3\n"
        "checkpoint: {every_steps: 1}\ndistributed: {device: cpu, threads_per_rank: 1, timeout: 600}\n"
    )
    document = {
        "base": "base.yaml",
        "space": {"params.lr": {"loguniform": [0.001, 0.5]}},
        "objective": {"metric": "val_loss"},
        "trials": 2,
        **values,
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(document))
    return path
