"""Schedulers of custom loops: by steps, by epochs, or by the loop's own calls; never twice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler as lr

import samestep
from samestep.errors import StepError, Stopped
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _loader, _net
from tests.ranks import run_ranks
from tests.variations import variations

STEPS = 3
"""In an epoch; there are three."""


def _scheduler(kind: str, optimizer: Any) -> Any:
    if kind == "plateau":
        return lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs")
    if kind == "cosine":
        return lr.CosineAnnealingLR(optimizer, T_max=9)
    return lr.StepLR(optimizer, 1, gamma=0.5)


def _train(folder: str, kind: str, every: Any, stop: int | None = None) -> Any:
    model, rates = _net(), []
    try:
        with samestep.start(**_keys(folder, global_batch=None)) as run:
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = _scheduler(kind, optimizer)
            given = scheduler if every == "call" else samestep.Schedule(scheduler, every=every)
            model, optimizer, _, loader = run.prepare(model, optimizer, given, _loader())
            if stop is not None:
                run.pause_after(stop)
            for _ in run.epochs():
                for step in run.steps(loader):
                    rates.append(optimizer.param_groups[0]["lr"])
                    loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                if every == "call":
                    scheduler.step(loss.item()) if kind == "plateau" else scheduler.step()
    except Stopped:
        pass
    return digest(model), rates


BY_EPOCHS = [1e-2] * STEPS + [5e-3] * STEPS + [2.5e-3] * STEPS


@pytest.mark.parametrize(
    ("kind", "every", "expected"),
    variations(
        [
            ("step", "epoch", BY_EPOCHS),
            ("step", "call", BY_EPOCHS),
            ("step", "step", [1e-2 * 0.5**n for n in range(9)]),
            # The first value is the best so far, every other one is not better by 10.
            ("plateau", "call", [1e-2] * 2 * STEPS + [5e-3] * STEPS),
            ("cosine", "step", None),
        ],
        kept=["plateau", "cosine"],
    ),
)
def test_schedulers_move_when_it_was_said_at_any_size(
    kind: str, every: str, expected: list[float] | None, tmp_path: Path
) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "1"), kind, every)[0]
    if expected is None:
        assert len(set(whole[1])) == 9
    else:
        assert whole[1] == pytest.approx(expected)
    folder = str(tmp_path / "parts")
    # In the middle of an epoch, and with the last step of one.
    first = run_ranks(_train, 2, folder, kind, every, 4)[0]
    second = run_ranks(_train, 4, folder, kind, every, 6)[0]
    third = run_ranks(_train, 1, folder, kind, every)[0]
    if every == "call":
        # A stop with the last step of an epoch comes when the loop's body is through.
        assert len(second[1]) == 2
    assert first[1] + second[1] + third[1] == whole[1]
    assert third[0] == whole[0]


def _misuse(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder, checkpoint={"enabled": False})) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler: Any = lr.StepLR(optimizer, 1)
        given: Any = samestep.Schedule(scheduler, every="epoch")
        if kind == "plateau":
            given = samestep.Schedule(lr.ReduceLROnPlateau(optimizer), every="evaluation")
        if kind == "twice by steps":
            scheduler = lr.CosineAnnealingLR(optimizer, 9)
            given = samestep.Schedule(scheduler)
        if kind == "in a lane":
            given = scheduler
        model, optimizer, _, loader = run.prepare(model, optimizer, given, _loader())

        def loss(batch: Any) -> Any:
            if kind == "in a lane":
                scheduler.step()
            return F.cross_entropy(model(batch.x), batch.y)

        for _ in run.epochs():
            for step in run.steps(loader):
                step.train(loss)
                if kind == "twice by steps":
                    scheduler.step()
            if kind == "twice by epochs":
                scheduler.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plateau", "ReduceLROnPlateau moves on with a value that your loop measures"),
        ("twice by steps", "on with every step: remove the call, or give run.prepare the scheduler"),
        ("twice by epochs", "StepLR.step() was called, but the run moves this scheduler on with every"),
        ("in a lane", "scheduler.step() was called in the middle of step 0"),
    ],
)
def test_schedulers_that_would_move_otherwise_than_meant_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=re.escape(words)):
        _misuse(str(tmp_path / "run"), kind)
