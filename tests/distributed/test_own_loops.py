"""Loops as people write them: a DataLoader, epochs, mean losses, clipping of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from samestep.errors import StepError
from tests.distributed.running import digest
from tests.ranks import run_ranks
from tests.variations import variations

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


def _train(folder: str, form: str) -> tuple[str, list[float], list[int]]:
    import samestep

    losses: list[float] = []
    epochs: list[int] = []
    with samestep.start(**_keys(folder)) as run:
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(model, optimizer, _loader())
        for epoch in run.epochs():
            if form == "function":
                for step in run.steps(loader):
                    loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                    losses.append(loss.item())
            else:
                losses += _epoch(run, form, model, optimizer, loader)
            epochs.append(epoch)
            run.print(f"epoch {epoch} loss {losses[-1]:.4f}")
        return digest(model), losses, epochs


def _epoch(run: Any, form: str, model: nn.Module, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        assert x.device == run.device
        out = model(x)
        optimizer.zero_grad()
        if form == "sum":
            loss = run.backward(F.cross_entropy(out, y, reduction="sum"), count=y.size(0))
        elif form == "mean over":
            loss = run.backward(F.cross_entropy(out, y), mean_over=y.size(0))
        else:
            loss = run.backward(F.cross_entropy(out, y))
        if form == "own clipping":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "form", variations(["mean", "mean over", "function", "own clipping", "sum"], kept=["own clipping"])
)
def test_a_loop_over_epochs_is_one_run_at_any_size(form: str, tmp_path: Path) -> None:
    found = {}
    for world in (1, 2, 4):
        answers = run_ranks(_train, world, str(tmp_path / f"{form}-{world}"), form)
        assert len(set(map(repr, answers))) == 1, "the ranks of one run differ"
        found[world] = answers[0]
    assert found[1] == found[2] == found[4]
    _, losses, epochs = found[1]
    assert epochs == list(range(EPOCHS))
    assert len(losses) == EPOCHS * 3
    assert losses[-1] < losses[0]


def test_a_mean_is_the_sum_over_its_count(tmp_path: Path) -> None:
    mean = run_ranks(_train, 1, str(tmp_path / "mean"), "mean")[0]
    function = run_ranks(_train, 1, str(tmp_path / "function"), "function")[0]
    summed = run_ranks(_train, 1, str(tmp_path / "sum"), "sum")[0]
    assert mean == function
    assert mean[1] == pytest.approx(summed[1], rel=1e-4)


def _misuse(folder: str, kind: str) -> str:
    import samestep

    try:
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
                    return str(step.loss)
            if kind == "sum and mean":
                for _ in run.epochs():
                    for x, _ in loader:
                        run.backward(model(x).sum(), 4, mean_over=3)
    except StepError as error:
        return str(error)
    return "no error"


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
    assert words in run_ranks(_misuse, 1, str(tmp_path / "run"), kind)[0]


def _in_parts(folder: str, stop: int | None) -> tuple[str, list[int]]:
    import samestep
    from samestep.errors import Stopped

    epochs: list[int] = []
    model = _net()
    try:
        with samestep.start(**_keys(folder, checkpoint={"every_steps": 2})) as run:
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
            if stop is not None:
                run.pause_after(stop)
            for epoch in run.epochs():
                epochs.append(epoch)
                for step in run.steps(loader):
                    step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
    except Stopped:
        pass
    return digest(model), epochs


@pytest.mark.variation("test_it_resumes_at_another_size: with the loss as a function")
def test_a_loop_over_epochs_resumes_in_the_middle_of_one_at_another_size(tmp_path: Path) -> None:
    untouched = run_ranks(_in_parts, 1, str(tmp_path / "whole"), None)[0]
    folder = str(tmp_path / "parts")
    assert run_ranks(_in_parts, 2, folder, 4)[0][1] == [0, 1]
    assert run_ranks(_in_parts, 4, folder, 6)[0][1] == [1]
    ended = run_ranks(_in_parts, 1, folder, None)[0]
    assert ended == (untouched[0], [2])


def _mistaken(folder: str, form: str) -> str:
    import samestep

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
