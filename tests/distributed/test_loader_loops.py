"""Loops over the loader itself, which step their own optimizer: a turn for each lane, the same at any size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.errors import StepError, Stopped
from tests.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 98, 32, 3
"""The last batch has two samples: of four ranks, three have no lane in it."""


def _net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    )


def _data() -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=made), torch.randint(4, (SAMPLES,), generator=made)
    )


def _keys(folder: str, **values: Any) -> dict[str, Any]:
    return {
        "epochs": EPOCHS, "lanes": 8, "seed": 1, "run_dir": folder,
        "distributed": {"device": "cpu", "threads_per_rank": 1}, **values,
    }  # fmt: skip


def _digest(model: nn.Module) -> str:
    state = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        state.update(tensor.numpy().tobytes())
    return state.hexdigest()


class Loop:
    """A script's objects, prepared."""

    def __init__(self, run: samestep.Run, batch_norm: bool = False) -> None:
        self.run = run
        self.model = _net()
        if batch_norm:
            self.model.insert(1, nn.BatchNorm1d(16))  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 1, 0.5)
        loader = DataLoader(_data(), batch_size=BATCH, shuffle=True)
        valid = DataLoader(_data(), batch_size=20)
        self.model, self.optimizer, self.scheduler, self.loader, self.valid = run.prepare(
            self.model, self.optimizer, self.scheduler, loader, valid, every="call"
        )

    def evaluate(self) -> tuple[float, int]:
        total, right = 0.0, 0
        for x, y in self.valid:
            out = self.model(x)
            total += F.cross_entropy(out, y, reduction="sum").item()
            right += int((out.argmax(1) == y).sum())
        return self.run.reduce(total), self.run.reduce(right)


def _over_loader(folder: str, stop: int | None = None) -> tuple[str, list[Any]]:
    """As people write it."""
    found: list[Any] = []
    run = samestep.start(**_keys(folder))
    loop = Loop(run, batch_norm=True)
    if stop is not None:
        run.pause_after(stop)
    try:
        for _ in run.epochs():
            for i, (x, y) in run.enumerate(loop.loader):
                loop.optimizer.zero_grad()
                loss = F.cross_entropy(loop.model(x), y)
                loss = run.backward(loss)
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
                loop.optimizer.step()
                if run.ends_step:
                    found.append((i, loss.item()))
            loop.scheduler.step()
            found.append((*loop.evaluate(), loop.scheduler.get_last_lr()))
    except Stopped as stopped:
        run.__exit__(type(stopped), stopped, None)
    else:
        run.__exit__(None, None, None)
    return _digest(loop.model), found


def _over_steps(folder: str) -> tuple[str, list[Any]]:
    """The same training, step by step."""
    found: list[Any] = []
    with samestep.start(**_keys(folder)) as run:
        loop = Loop(run, batch_norm=True)
        for _ in run.epochs():
            for step in run.steps(loop.loader):
                for x, y in step.batches():
                    step.backward(F.cross_entropy(loop.model(x), y))
                step.reduce()
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
                step.update()
                found.append((step.epoch_step, step.loss.item()))
            loop.scheduler.step()
            found.append((*loop.evaluate(), loop.scheduler.get_last_lr()))
    return _digest(loop.model), found


def test_a_loop_over_the_loader_is_one_run_at_any_size(tmp_path: Path) -> None:
    [expected] = run_ranks(_over_steps, 1, str(tmp_path / "steps"))
    assert len(expected[1]) == EPOCHS * 5
    for world in (1, 2, 4):
        ranks = run_ranks(_over_loader, world, str(tmp_path / str(world)))
        assert ranks == [expected] * world


def test_it_resumes_in_the_middle_of_an_epoch_at_another_size(tmp_path: Path) -> None:
    [untouched] = run_ranks(_over_loader, 1, str(tmp_path / "whole"))
    run_ranks(_over_loader, 4, str(tmp_path / "parts"), 6)
    run_ranks(_over_loader, 2, str(tmp_path / "parts"), 7)  # then comes the tail of two samples
    resumed = run_ranks(_over_loader, 4, str(tmp_path / "parts"))
    assert [state for state, _ in resumed] == [untouched[0]] * 4
    assert resumed[0][1] == untouched[1][8:]


def _misuse(folder: str, kind: str) -> str:
    values = {"same": "samples"} if kind == "lanes in .grad" else {}
    try:
        with samestep.start(**_keys(folder, **values)) as run:
            loop = Loop(run, batch_norm=True)
            if kind == "outside":
                run.backward(torch.zeros(()))
            if kind == "no epochs":
                next(iter(loop.loader))
            for _ in run.epochs():
                for i, (x, y) in enumerate(loop.loader):
                    _turn(kind, i, run, loop, x, F.cross_entropy(loop.model(x), y))
                    if kind == "break" and i == 4:
                        return "left"
    except StepError as error:
        return str(error)
    return "nothing was refused"


def _turn(
    kind: str, i: int, run: samestep.Run, loop: Loop, x: torch.Tensor, loss: torch.Tensor
) -> None:
    weight = loop.model[0].weight  # type: ignore[index]
    if kind == "step first":
        loop.optimizer.step()
    if kind in ("plain backward", "backward before"):
        loss.backward(retain_graph=True)
    if kind == "plain backward":
        return
    run.backward(loss)
    if kind == "backward twice":
        run.backward(loss)
    if kind == "backward after":
        loop.model(x).sum().backward()
    if kind == "gathers in a lane":
        run.gather(loss.reshape(1))
    if kind == "rates by batches":
        loop.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
    if kind == "decay by batches":
        loop.optimizer.param_groups[0]["weight_decay"] = 0.1 * i
    if kind == "a closure":
        loop.optimizer.step(lambda: 0.0)
    if kind != "no step" and not (kind == "accumulates by itself" and i % 2 == 0):
        loop.optimizer.step()
    if kind == "two updates" and run.ends_step:
        loop.optimizer.step()
    if kind == "schedule by batches":
        loop.scheduler.step(i / 10)  # type: ignore[arg-type]
    if kind == "changes weights":
        with torch.no_grad():
            weight.mul_(0.99)
    if kind == "changes data":
        weight.data.mul_(0.99)
    if kind == "forward after" and run.ends_step:
        loop.model(x)


REFUSED = {
    "outside": "run.backward belongs inside a loop over the training loader",
    "no epochs": "has the turns of all 3 epochs if nobody asks for epochs",
    "break": "the loop was left in turn 1 of 4 of step 1",
    "step first": "AdamW.step() came before run.backward(loss)",
    "plain backward": "was left without run.backward(loss): call it in place of loss.backward()",
    "backward before": "loss.backward() was called besides run.backward(loss)",
    "backward after": "loss.backward() was called besides run.backward(loss)",
    "backward twice": "run.backward was called twice for one batch",
    "gathers in a lane": "run.gather was called inside the loop over a step's lanes",
    "rates by batches": "AdamW (lr 0.01) at first, then AdamW (lr 0.005)",
    "decay by batches": "step other optimizers or schedulers, or with other settings",
    "schedule by batches": "AdamW (lr 0.01) and StepLR (0.0) at first, then AdamW (lr 0.01) and StepLR (0.1)",
    "accumulates by itself": "none at first, then AdamW (lr 0.01)",
    "a closure": "AdamW.step got a closure",
    "no step": "step 0 was left without optimizer.step()",
    "two updates": "a step has one update",
    "changes weights": "the loop changed weights in a turn of step 0 that is not its last",
    "changes data": "the loop changed weights in a turn of step 0 that is not its last",
    "forward after": "something changed buffers, such as BatchNorm's statistics",
    "lanes in .grad": "same: samples adds up the gradients of a rank's 4 lanes in .grad",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_loops_that_would_train_something_else_are_refused(kind: str, tmp_path: Path) -> None:
    for said in run_ranks(_misuse, 2, str(tmp_path / "run"), kind):
        assert REFUSED[kind] in said
