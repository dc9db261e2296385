"""Whether a model fits, from shapes alone: nothing of its size is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.check.machine.facts import Load, Space
from samestep.check.machine.findings import Finding
from samestep.check.machine.fit import check_fit
from samestep.check.machine.machine import GB
from samestep.config import Config, load_config
from tests.unit.check.machine.test_doctor import MACHINE, is_reported

_TASK = """
import torch
from torch import nn
import samestep

class Large(samestep.Task):
    def __init__(self, reads=False):
        self._reads = reads

    def model(self):
        blocks = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(16)))
        if self._reads:
            blocks[0].weight.sum().item()
        return blocks

    def train_data(self):
        raise AssertionError("not asked for")

    def optimizers(self, model):
        return torch.optim.AdamW(model.parameters())
"""
P = 16 * (8192 + 1) * 8192 * 4 / GB
"""GB of its weights."""


def _config(folder: Path, **values: Any) -> Config:
    (folder / "large.py").write_text(_TASK)
    task = {"task": f"{folder}/large.py:Large", "global_batch": 64, "lanes": 8, "steps": 5}
    return load_config({**task, **values})


def _found(config: Config, ranks: int, gigabytes: float) -> Finding:
    """What is found where each rank has so much memory."""
    machine = replace(MACHINE, memory=Space(int(gigabytes * GB), GB))
    [finding] = check_fit(config, Load(world=ranks, nodes=ranks), machine)
    return finding


def test_a_model_that_fits_is_told_its_size(tmp_path: Path) -> None:
    found = _found(_config(tmp_path, lanes=1), 1, 32)
    assert is_reported(found, "ok", "optimizer states take 16 GB per rank, of 32 GB")


@pytest.mark.parametrize(
    ("ranks", "times", "advice"),
    [
        (4, 5.0, "set distributed.shard: optimizer, which takes"),
        (4, 2.0, "set distributed.shard: weights, which takes"),
        (1, 6.0, "set distributed.shard: optimizer on 2 ranks, which takes"),
        (1, 2.0, "set distributed.shard: weights on 4 ranks, which takes"),
        (2, 0.1, "no distributed.shard makes it fit"),
    ],
)
def test_the_first_mode_that_fits_is_named(tmp_path: Path, ranks: int, times: float, advice: str) -> None:
    found = _found(_config(tmp_path), ranks, times * P)
    assert is_reported(found, "error", "distributed.shard: none")
    assert found.advice.startswith(advice), found.advice


def test_a_mode_that_was_chosen_is_the_one_that_is_checked(tmp_path: Path) -> None:
    config = _config(tmp_path, lanes=4, **{"distributed.shard": "weights"})
    assert is_reported(_found(config, 4, 2 * P), "ok", "distributed.shard: weights")


def test_a_model_that_needs_numbers_is_left_to_advise(tmp_path: Path) -> None:
    config = _config(tmp_path, **{"params.reads": True})
    assert is_reported(_found(config, 1, 1), "note", "not known from shapes alone")


def test_a_loop_of_ones_own_has_no_model_to_make(tmp_path: Path) -> None:
    assert not check_fit(load_config({"global_batch": 8, "steps": 1}), Load(), MACHINE)
