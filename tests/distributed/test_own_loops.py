"""Loops as people write them: a DataLoader, epochs, mean losses, clipping of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.errors import StepError
from tests.distributed.running import digest
from tests.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 90, 32, 3


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def _loader(**values: Any) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(3)
    x, y = torch.randn(SAMPLES, 8, generator=made), torch.randint(4, (SAMPLES,), generator=made)
    return DataLoader(TensorDataset(x, y), **{"batch_size": BATCH, "shuffle": True, **values})


def _keys(folder: str, **values: Any) -> dict[str, Any]:
    return {
        "global_batch": BATCH, "epochs": EPOCHS, "lanes": 8, "seed": 1, "run_dir": folder,
        "distributed": {"device": "cpu", "threads_per_rank": 1}, **values,
    }  # fmt: skip


def prepared(run: samestep.Run, *more: Any) -> tuple[Any, ...]:
    model = _net()
    return run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), _loader(), *more)


def _train(folder: str, form: str) -> tuple[str, list[float]]:
    losses: list[float] = []
    with samestep.start(**_keys(folder)) as run:
        model, optimizer, loader = prepared(run)
        for _ in run.epochs():
            if form == "function":
                for step in run.steps(loader):
                    losses.append(step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y)).item())
                continue
            for x, y in loader:
                assert x.device == run.device
                optimizer.zero_grad()
                if form == "sum":
                    loss = run.backward(F.cross_entropy(model(x), y, reduction="sum"), count=y.size(0))
                else:
                    loss = run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                losses.append(loss.item())
        return digest(model), losses


def test_a_mean_is_the_sum_over_its_count(tmp_path: Path) -> None:
    mean = run_ranks(_train, 1, str(tmp_path / "mean"), "mean")[0]
    function = run_ranks(_train, 1, str(tmp_path / "function"), "function")[0]
    summed = run_ranks(_train, 1, str(tmp_path / "sum"), "sum")[0]
    assert mean == function
    assert mean[1][-1] < mean[1][0]
    assert mean[1] == pytest.approx(summed[1], rel=1e-4)


def _misuse(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder, checkpoint={"enabled": False})) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, _loader())

        def loss(batch: Any) -> Any:
            return F.cross_entropy(model(batch.x), batch.y)

        if kind == "epochs by range":
            for _ in range(2):
                for step in run.steps(loader):
                    step.train(loss)
        if kind == "two loops in an epoch":
            for _ in run.epochs():
                for _ in range(2):
                    for step in run.steps(loader):
                        step.train(loss)
        if kind == "break":
            for _ in run.epochs():
                for step in run.steps(loader):
                    step.train(loss)
                    break
        if kind == "nothing":
            for _ in run.epochs():
                pass
        if kind == "other data":
            for epoch in run.epochs():
                for step in run.steps(loader if epoch == 0 else _loader()):
                    step.train(loss)
        if kind == "loss before update":
            for step in run.steps(loader):
                step.loss.item()
        if kind == "sum and mean":
            for _ in run.epochs():
                for x, _ in loader:
                    run.backward(model(x).sum(), 4, mean_over=3)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("epochs by range", "for epoch in run.epochs()"),
        ("two loops in an epoch", "called twice in epoch 0"),
        ("break", "epoch 0 was left after step 0"),
        ("nothing", "nothing was trained in epoch 0"),
        ("other data", "other data than in the epoch before"),
        ("loss before update", "step.loss is known after step.train"),
        ("sum and mean", "a loss is a sum or a mean"),
    ],
)
def test_loops_that_would_train_something_else_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=re.escape(words)):
        _misuse(str(tmp_path / "run"), kind)


def _mistaken(folder: str, form: str) -> str:
    with samestep.start(**_keys(folder, epochs=1)) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, _loader())
        if form == "function":
            for step in run.steps(loader):
                step.train(lambda batch: (F.cross_entropy(model(batch.x), batch.y), len(batch)))
            return digest(model)
        for x, y in loader:
            reduction = "sum" if form == "right" else "mean"
            run.backward(F.cross_entropy(model(x), y, reduction=reduction), count=y.size(0))
            optimizer.step()
        return digest(model)


@pytest.mark.parametrize("form", ["loop", "function", "right"])
def test_a_mean_given_as_a_sum_is_warned_about_once(form: str, tmp_path: Path) -> None:
    run_ranks(_mistaken, 2, str(tmp_path / "run"), form)
    logs = [path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*"))]
    counts = [log.count("was given as a sum over 4, but it is a mean already") for log in logs]
    assert counts == ([0, 0] if form == "right" else [1, 0])
