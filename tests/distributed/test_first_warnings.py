"""What a new user's script does wrong without knowing it, and is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.errors import TaskError
from tests.cli.processes import run as run_command
from tests.distributed.test_own_loops import _keys, _loader, _net
from tests.ranks import run_ranks


def _whole_loader(folder: str, prepared: bool) -> tuple[int, str]:
    with samestep.start(**_keys(folder, epochs=1)) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(32.0 * 8).view(32, 8).sin()
        valid: Any = DataLoader(TensorDataset(x, torch.arange(32) % 4), batch_size=4)
        if prepared:
            model, optimizer, loader, valid = run.prepare(model, optimizer, _loader(), valid)
        else:
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
        for step in run.steps(loader):
            step.train(lambda b: F.cross_entropy(model(b.x), b.y))
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in valid)
        return run.reduce(right), (run.run_dir / "logs" / f"rank-{run.rank}.log").read_text()


def test_a_validation_loader_that_was_not_prepared_is_noticed(tmp_path: Path) -> None:
    [(alone, _)] = run_ranks(_whole_loader, 1, str(tmp_path / "alone"), False)
    for total, log in run_ranks(_whole_loader, 2, str(tmp_path / "two"), False):
        assert total == 2 * alone > 0
        assert f"run.reduce got the same value on all 2 ranks ({alone})" in log
        assert "give its DataLoader to run.prepare" in log
    for total, log in run_ranks(_whole_loader, 2, str(tmp_path / "prepared"), True):
        assert total == alone
        assert "same value" not in log


SCRIPT = """
import torch, samestep
{before}
run = samestep.start(epochs=1, distributed={{"device": "cpu"}})
{after}
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1),
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 2)), batch_size=8))
"""


def test_a_model_made_before_the_run_is_named(tmp_path: Path) -> None:
    made = "model = torch.nn.Linear(2, 2)"
    for number, (before, after) in enumerate([(made, ""), ("", made)]):
        (tmp_path / f"{number}.py").write_text(SCRIPT.format(before=before, after=after))
        done = run_command([sys.executable, f"{number}.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told = "Linear was made before samestep.start" in done.stderr
        assert told == (number == 0), done.stderr


class DistributedDataParallel(nn.Module):
    """Looks like torch's own, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    model = DistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        samestep.start(**_keys(str(tmp_path))) as run,
        pytest.raises(TaskError, match="the model is wrapped in DistributedDataParallel"),
    ):
        run.prepare(model, optimizer, _loader())


class Observer(nn.Module):
    """Learns its shape from the first batch, as those of quantization-aware training do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.largest.resize_(x.shape[1]).copy_(x.amax(0))
        return x


def test_a_buffer_that_changes_its_shape_is_refused_by_name(tmp_path: Path) -> None:
    def train() -> None:
        with samestep.start(**_keys(str(tmp_path))) as run:
            model: Any = nn.Sequential(Observer(), _net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
            for step in run.steps(loader):
                step.train(lambda b: F.cross_entropy(model(b.x), b.y))

    with pytest.raises(TaskError, match=r"buffer 0.largest had the shape \(0,\).*gave it \(8,\)"):
        train()
