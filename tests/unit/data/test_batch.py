"""Batches, positions, and where a step leads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.data.batch import LaneBatch, Position, StepData


def test_a_batch_is_as_long_as_it_has_samples() -> None:
    batch = LaneBatch(2, (torch.zeros(3, 5), torch.ones(3)), (7, 8, 9))
    assert len(batch) == 3
    assert batch.x.shape == (3, 5)
    assert batch.y.tolist() == [1, 1, 1]


def test_other_batches_are_reached_as_the_collate_function_made_them() -> None:
    batch = LaneBatch(0, {"input_ids": torch.zeros(2)}, ("", ""))
    assert batch.data["input_ids"].shape == (2,)
    with pytest.raises(KeyError):
        _ = batch.x


def step(**changes: Any) -> StepData:
    values: dict[str, Any] = {
        "index": 7, "epoch": 2, "epoch_step": 1, "ends_epoch": False, "units": (0,),
        "ragged": False, "read": lambda: None, "streams": {0: "state"},
    }  # fmt: skip
    return StepData(**{**values, **changes})


def test_the_position_after_a_step_has_the_states_of_its_streams() -> None:
    assert step().following == Position(8, 2, 2, {0: "state"})


def test_a_new_epoch_starts_with_new_streams() -> None:
    assert step(ends_epoch=True).following == Position(8, 3, 0, {})


def test_a_run_starts_at_the_beginning() -> None:
    assert vars(Position()) == {"step": 0, "epoch": 0, "epoch_step": 0, "streams": {}, "draws": ()}
