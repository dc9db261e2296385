"""Runs that leave the global batch to their DataLoader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.errors import CheckpointError, PlanError, StepError, Stopped, TaskError
from tests.distributed.loop_bodies import Counter
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _loader, _net
from tests.ranks import run_ranks
from tests.variations import variations


def _train(folder: str, batch: int | None, stop: int | None = None) -> tuple[str, list[float], int]:
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
    return digest(model), losses, counter.count


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


def _start(folder: str, kind: str) -> None:
    lanes = 5 if kind == "lanes" else 8
    with samestep.start(**_keys(folder, global_batch=None, lanes=lanes)) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "batch":
            _ = run.batch
        if kind == "no loader":
            run.prepare(model, optimizer)
        if kind == "lanes":
            run.prepare(model, optimizer, _loader())
        if kind == "other loader":
            run.prepare(model, optimizer, _loader(batch_size=16))
            next(iter(run.steps(_loader())))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    variations(
        [
            ("batch", StepError, "the global batch is not known yet"),
            ("no loader", StepError, "with the training DataLoader among its arguments first, or set global_batch"),
            ("lanes", PlanError, "global_batch 32 cannot be cut into 5 equal lanes"),
            ("other loader", TaskError, "the DataLoader has batch_size=32, and global_batch is 16"),
        ],
        kept=["batch", "no loader"],
    ),
)
def test_what_needs_the_batch_before_it_is_known(kind: str, error: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=re.escape(words)):
        _start(str(tmp_path / "run"), kind)
    if kind in ("batch", "no loader", "lanes"):
        assert not (tmp_path / "run").exists()


@pytest.mark.variation("test_the_loaders_batch_is_the_global_batch_at_any_size: of a source that the run makes")
def test_a_source_of_a_loader_knows_its_steps(tmp_path: Path) -> None:
    with samestep.start(**_keys(str(tmp_path / "run"), global_batch=None)) as run:
        assert run.total_steps(run.source(_loader())) == 9


def test_another_batch_size_is_another_run(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_ranks(_train, 1, folder, None, 2)
    with pytest.raises(CheckpointError, match="global_batch"):
        _start(folder, "other loader")
