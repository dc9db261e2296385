"""Evaluation loops as people write them: shares of the samples, gathered and reduced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

import samestep
from samestep.errors import UserError
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _loader, _net, prepared
from tests.ranks import run_ranks

VALID, VALID_BATCH = 45, 4


def _valid(**values: Any) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(5)
    x, y = torch.randn(VALID, 8, generator=made), torch.randint(4, (VALID,), generator=made)
    x[:, 0] = torch.arange(VALID)
    return DataLoader(TensorDataset(x, y), **{"batch_size": VALID_BATCH, **values})


def _measured(run: Any, model: nn.Module, loader: DataLoader[Any]) -> tuple[Any, ...]:
    outputs: list[Any] = []
    targets: list[Any] = []
    losses: list[Any] = []
    numbers: list[Any] = []
    right = 0
    for x, y in run.eval_batches(loader):
        assert x.device == run.device
        assert not model.training
        assert not torch.is_grad_enabled()
        out = model(x)
        outputs.append(out)
        targets.append(y)
        numbers.append(x[:, 0])
        losses.append(F.cross_entropy(out, y, reduction="sum"))
        right += int((out.argmax(1) == y).sum())
    assert model.training
    rows, labels = run.gather(outputs), run.gather(targets)
    assert run.gather(numbers).tolist() == list(range(VALID)), "each sample once, in order"
    seen = SumMetric(sync_on_compute=False)
    seen.update(torch.ones(len(rows)))
    accuracy = MulticlassAccuracy(4, average="micro", sync_on_compute=False)
    accuracy.update(rows, labels)
    draws = torch.rand(2).tolist()
    return (
        rows.tolist(), run.reduce(losses).item(), run.reduce(losses, "mean").item(),
        run.reduce(right), run.reduce(losses, "max").item(), run.reduce([len(t) for t in targets], "min"),
        accuracy.compute().item(), seen.compute().item(), draws,
    )  # fmt: skip


def _train(folder: str, evaluates: bool, **values: Any) -> tuple[Any, ...]:
    found = []
    with samestep.start(**_keys(folder, global_batch=None)) as run:
        model, _, loader = prepared(run)
        for _ in run.epochs():
            for step in run.steps(loader):
                step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
            if evaluates:
                found.append(_measured(run, model, _valid(**values)))
        return digest(model), found


def test_an_evaluation_loop_measures_the_same_at_any_size(tmp_path: Path) -> None:
    alone = run_ranks(_train, 1, str(tmp_path / "1"), True)[0]
    for world in (2, 4):
        for answer in run_ranks(_train, world, str(tmp_path / str(world)), True):
            assert answer == alone
    measured = alone[1][-1]
    assert measured[3] / VALID == pytest.approx(measured[6])
    assert measured[5] == VALID % VALID_BATCH == 1
    assert measured[7] == VALID, "no sample twice"
    assert alone[0] == run_ranks(_train, 1, str(tmp_path / "without"), False)[0][0]


def _wrapped(folder: str, same: str) -> tuple[Any, ...]:
    with samestep.start(**_keys(folder, same=same, epochs=1, checkpoint={"enabled": False})) as run:
        for model in _stepped(run):
            rows = [model(x) for x, _ in run.eval_batches(_valid(batch_size=40))]
        return len(run.gather(rows)), run.reduce(len(rows))


def _stepped(run: Any) -> Iterator[nn.Module]:
    """The model after each step of a training."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, _loader())
    for step in run.steps(loader):
        step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
        yield model


@pytest.mark.parametrize("same", ["bits", "rounding", "samples"])
def test_a_wrapped_model_evaluates_shares_of_any_size(same: str, tmp_path: Path) -> None:
    # Two batches: the second of two ranks has none, and must not be waited for in forward.
    assert run_ranks(_wrapped, 2, str(tmp_path / "run"), same) == [(VALID, 2)] * 2


class Restless(nn.Module):
    """Changes a buffer in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.seen += len(x)
        return self.inner(x)  # type: ignore[no-any-return]


def _misuse(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder, checkpoint={"enabled": False})) as run:
        model = Restless() if kind == "buffer" else _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "unprepared":
            next(iter(run.eval_batches(_valid())))
        run.prepare(model, optimizer)
        if kind == "in a lane":
            for step in run.steps(_loader()):
                step.train(lambda batch: run.gather(batch.x).sum())
        if kind == "list without a loop":
            run.reduce([1.0])
        values: dict[str, Any] = {}
        if kind == "drop_last":
            values = {"drop_last": True}
        if kind == "sampler":
            values = {"sampler": SubsetRandomSampler([1, 2])}
        rows = []
        for x, _ in run.eval_batches(_valid(**values)):
            rows.append(model(x))
            if kind == "inside":
                run.gather(rows)
            if kind == "break":
                break
        if kind == "too few rows":
            run.gather(rows[1:])
        if kind == "too few values":
            run.reduce([0.0])
        if kind == "scalars":
            run.gather([row.sum() for row in rows])
        if kind == "op":
            run.reduce(1.0, "product")  # type: ignore[call-overload]
        if kind == "break":
            run.reduce(1.0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("unprepared", "run.eval_batches came before run.prepare"),
        ("in a lane", "run.gather was called inside the loop over a step's lanes"),
        ("list without a loop", "there was no loop over run.eval_batches"),
        ("inside", "run.gather was called inside a loop over run.eval_batches"),
        ("break", "after a break out of one"),
        ("too few rows", "got 41 rows, and the loop over run.eval_batches gave this rank 45 samples"),
        ("too few values", "got 1 values, and the loop over run.eval_batches gave this rank 12 batches"),
        ("scalars", "run.reduce is for single numbers"),
        ("op", "it takes sum, mean, max, min"),
        ("drop_last", "an evaluation takes every sample once"),
        ("sampler", "SubsetRandomSampler: an evaluation takes every sample once"),
        ("buffer", "changed buffers in evaluation mode: model.seen"),
    ],
)
def test_what_cannot_be_gathered_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        _misuse(str(tmp_path / "run"), kind)


def _afterwards(folder: str) -> list[float]:
    with samestep.start(**_keys(folder, steps=2, epochs=None, checkpoint={"enabled": False})) as run:
        for _ in _stepped(run):
            rows = [x[:, 0] for x, _ in run.eval_batches(_valid())]
        return run.gather(rows).tolist()  # type: ignore[no-any-return]


def test_rows_are_in_order_after_the_last_step_too(tmp_path: Path) -> None:
    assert run_ranks(_afterwards, 2, str(tmp_path / "run")) == [list(map(float, range(VALID)))] * 2


def _in_a_step(folder: str) -> list[Any]:
    found = []
    keys = _keys(folder, steps=2, epochs=None, checkpoint={"enabled": False})
    with samestep.start(**keys) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, _loader())
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            found.append([run.gather(x).tolist(), run.sum(torch.ones_like(y).sum()).item()])
            found.append(run.reduce(0.5, "max"))
    return found


def test_rows_of_a_step_are_in_the_order_of_its_samples(tmp_path: Path) -> None:
    alone = run_ranks(_in_a_step, 1, str(tmp_path / "1"))
    for world in (2, 4):
        assert run_ranks(_in_a_step, world, str(tmp_path / str(world))) == alone * world
