"""Runs that leave the global batch to their DataLoader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from samestep.errors import Stopped, UserError
from tests.distributed.test_own_loops import _digest, _keys, _loader, _net
from tests.ranks import run_ranks
from tests.variations import variations


class Counter:
    """State of the loop's own, registered before the run knows its batch."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def _train(folder: str, batch: int | None, stop: int | None = None) -> tuple[str, list[float], int]:
    import samestep

    losses: list[float] = []
    counter, model = Counter(), _net()
    keys = _keys(folder, global_batch=batch, trackers={"csv": True})
    try:
        with samestep.start(**keys) as run:
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            run.register("counter", counter)
            if stop is not None:
                run.pause_after(stop)
            valid = DataLoader(TensorDataset(torch.zeros(3, 8)), batch_size=7)
            model, optimizer, loader, valid = run.prepare(model, optimizer, _loader(), valid)
            assert run.batch.global_batch == run.config.global_batch == 32
            for _ in run.epochs():
                for step in run.steps(loader):
                    counter.count += 1
                    losses.append(step.train(lambda b: F.cross_entropy(model(b.x), b.y)).item())
    except Stopped:
        pass
    return _digest(model), losses, counter.count


def test_the_loaders_batch_is_the_global_batch_at_any_size(tmp_path: Path) -> None:
    given = run_ranks(_train, 1, str(tmp_path / "given"), 32)[0]
    for world in (1, 2, 4):
        folder = tmp_path / f"world-{world}"
        for answer in run_ranks(_train, world, str(folder), None):
            assert answer == given
        assert json.loads((folder / "config.json").read_text())["global_batch"] == 32
        manifests = list(folder.glob("checkpoints/*/*.json"))
        assert manifests
        assert all(json.loads(m.read_text())["config"]["global_batch"] == 32 for m in manifests)


def test_it_resumes_at_another_size(tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "whole"), None)[0]
    folder = str(tmp_path / "parts")
    run_ranks(_train, 2, folder, None, 4)
    ended = run_ranks(_train, 4, folder, None)[0]
    assert (ended[0], ended[1], ended[2]) == (whole[0], whole[1][4:], whole[2])


def _start(folder: str, kind: str) -> str:
    import samestep

    lanes = 5 if kind == "lanes" else 8
    try:
        with samestep.start(**_keys(folder, global_batch=None, lanes=lanes)) as run:
            model = _net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "batch":
                return str(run.batch)
            if kind == "no loader":
                run.prepare(model, optimizer)
            if kind == "lanes":
                run.prepare(model, optimizer, _loader())
            if kind == "other loader":
                run.prepare(model, optimizer, _loader(batch_size=16))
                next(iter(run.steps(_loader())))
            if kind == "source":
                source = run.source(_loader())
                return f"{run.total_steps(source)} steps"
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    variations(
        [
            ("batch", "StepError: the global batch is not known yet"),
            ("no loader", "with the training DataLoader among its arguments first, or set global_batch"),
            ("lanes", "PlanError: global_batch 32 cannot be cut into 5 equal lanes"),
            ("other loader", "TaskError: the DataLoader has batch_size=32, and global_batch is 16"),
            ("source", "9 steps"),
        ],
        kept=["batch", "no loader"],
    ),
)
def test_what_needs_the_batch_before_it_is_known(kind: str, words: str, tmp_path: Path) -> None:
    assert words in run_ranks(_start, 1, str(tmp_path / "run"), kind)[0]
    if kind in ("batch", "no loader", "lanes"):
        assert not (tmp_path / "run").exists()


def test_another_batch_size_is_another_run(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(_train, 1, folder, None, 2)
    assert "global_batch" in run_ranks(_resume_with, 1, folder, 16)[0]


def _resume_with(folder: str, batch: int) -> str:
    import samestep
    from samestep.errors import CheckpointError

    try:
        with samestep.start(**_keys(folder, global_batch=None)) as run:
            model = _net()
            run.prepare(model, torch.optim.AdamW(model.parameters()), _loader(batch_size=batch))
    except CheckpointError as error:
        return str(error)
    return "nothing"
