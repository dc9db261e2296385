"""Precision, loss scaling, clipping and micro-batches: the same bits at any size, and resumed."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import Recorded, assert_same, rows_of, train
from tests.variations import variations

SCALED = {"precision": "fp16", "loss_scale": {"init": 1024.0, "interval": 2}}
CASES: dict[str, dict[str, Any]] = {
    "fp16, overflowing in one lane, clipped": {
        "task": "Overflowing", "clip": {"norm": 0.5}, "epochs": 3, **SCALED,
    },
    "fp16 with hysteresis and a fused optimizer": {
        "task": "Overflowing", "params": {"optimizer": "fused"}, "epochs": 3,
        "precision": "fp16", "loss_scale": {"init": 64.0, "interval": 3, "hysteresis": 2},
    },
    "skipped steps": {"task": "Overflowing", "on_nonfinite": "skip", "clip": {"adaptive": 1.1}},
    "clipped by value": {"clip": {"value": 0.01}},
    "clipped adaptively, each group by itself": {
        "task": "TwoOptimizers", "clip": {"adaptive": 0.9, "per_group": True, "memory": 0.5},
    },
    "micro-batches": {"memory": {"lane_split": 2}, "clip": {"norm": 0.5}},
    "micro-batches that had to be found": {"task": "Cramped", "memory": {"lane_split": "auto"}},
    "activations computed again": {"memory": {"checkpoint": ["conv", "hidden"]}},
}  # fmt: skip
IN_CI = ("fp16, overflowing in one lane, clipped",)


def rows(run: Recorded) -> list[dict[str, Any]]:
    return [row for row in rows_of(run.folder) if "loss" in row]


@pytest.mark.parametrize("case", variations(CASES, kept=IN_CI))
def test_any_number_of_ranks_is_the_same_run(case: str, tmp_path: Path) -> None:
    assert_same([train(tmp_path, world, **CASES[case]) for world in (1, 2, 4)])


@pytest.mark.parametrize("case", variations(CASES, kept=IN_CI))
def test_it_goes_on_at_other_sizes_with_the_same_bits(case: str, tmp_path: Path) -> None:
    values = {"checkpoint": {"every_steps": 2}, **CASES[case], "epochs": 3}
    untouched = train(tmp_path, 1, **values)
    folder = tmp_path / "run"
    go_on(folder, 4, at=3, rank=1, how="SIGTERM", **values)
    ended = finish(folder, 2, **values)
    assert ended.record.start == 4
    assert ended.record.state_hash == untouched.record.state_hash


def test_what_travels_with_the_gradients_is_no_overflow(tmp_path: Path) -> None:
    """At a small scale the last factor is large: what is not a gradient must stay out of it."""
    values: dict[str, Any] = {
        "precision": "fp16", "loss_scale": {"init": 0.01, "min": 0.001, "interval": 1000},
        "epochs": 20, "evaluation": {"every_epochs": None}, "checkpoint": {"enabled": False},
    }  # fmt: skip
    assert_same([train(tmp_path, world, **values) for world in (1, 4)])


def test_all_ranks_skip_the_step_in_which_one_lane_overflows(tmp_path: Path) -> None:
    """Sample 17 overflows once an epoch: the scale halves, and weights and schedule stay."""
    run = train(tmp_path, 2, "Overflowing", epochs=4, **SCALED)
    found = rows(run)
    skipped = [row["step"] for row in found if row.get("skipped")]
    assert len(skipped) == 4
    assert sorted({step // 3 for step in skipped}) == [0, 1, 2, 3]
    for before, after in pairwise(found):
        shrinks, epoch_ends = before.get("skipped", False), before["epoch"] != after["epoch"]
        assert (after["loss_scale"] < before["loss_scale"]) == shrinks
        if shrinks and not epoch_ends:
            assert after["lr"] == before["lr"], "the schedule moved in a step that was skipped"
    said = (run.folder / "logs" / "rank-0.log").read_text()
    assert said.count("the step is skipped") == 4
    assert "a gradient of step" in said


def test_an_overflow_at_the_lowest_scale_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    scale = {"init": 2.0, "min": 1.0, "interval": 100}
    values = {"precision": "fp16", "loss_scale": scale, "epochs": 4}
    said = go_on(tmp_path / "run", 2, "Overflowing", **values)
    for ok, text in said:
        assert not ok
        assert "at the lowest loss scale of 1 (loss_scale.min)" in text


def test_micro_batches_that_were_found_are_those_that_are_asked_for(tmp_path: Path) -> None:
    found = train(tmp_path, 2, "Cramped", memory={"lane_split": "auto"})
    asked = train(tmp_path, 1, "Cramped", memory={"lane_split": 2})
    # What was found is part of the run's state, and what is asked for of its config.
    assert found.state.pop("kept.lane split.pieces").item() == 2
    assert found.record.losses == asked.record.losses
    assert found.state.keys() == asked.state.keys()
    assert all(torch.equal(found.state[name], value) for name, value in asked.state.items())
    said = (found.folder / "logs" / "rank-0.log").read_text()
    assert "auto runs each lane of 4 samples in 2 micro-batches of 2" in said


def test_micro_batches_under_plain_ddp(tmp_path: Path) -> None:
    assert_same([train(tmp_path, 2, same="rounding", memory={"lane_split": 2}) for _ in "ab"])


def test_activations_computed_again_change_no_bit(tmp_path: Path) -> None:
    kept = train(tmp_path, 1)
    again = train(tmp_path, 1, memory={"checkpoint": ["conv", "hidden"]})
    assert_same([kept, again])


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize("world", variations([2, 4], kept=[2]))
def test_a_compiled_model_is_the_same_run_too(tmp_path: Path, world: int) -> None:
    # Whole lanes only: each further shape is compiled again, for several seconds on each rank.
    values: dict[str, Any] = {
        "epochs": 2,
        "drop_last": True,
        "evaluation": {"every_epochs": None},
        "speed": {"compile": True},
    }
    assert_same([train(tmp_path, one, **values) for one in (1, world)])


def test_a_lane_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    said = go_on(tmp_path / "run", 2, "Cramped")
    for ok, text in said:
        assert not ok
        assert "OutOfMemory" in text or "failed first: OutOfMemory" in text
    assert any("4 samples in a lane. Set distributed.shard: optimizer" in text for _, text in said)
