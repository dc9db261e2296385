"""A sum over lanes of anything: in the tree's order, whoever has samples."""

from __future__ import annotations

import pytest
import torch

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import StepError
from samestep.reduce.lane_sum import sum_lanes

CPU = torch.device("cpu")


def total(values: dict[int, torch.Tensor], lanes: int = 4) -> torch.Tensor:
    return sum_lanes(values, [range(lanes)], SoloCollectives(Activity()), CPU)


def test_shape_and_type_are_those_of_the_values() -> None:
    found = total({lane: torch.full((2, 3), float(lane)).half() for lane in range(4)})
    assert found.tolist() == [[6.0] * 3] * 2
    assert found.dtype == torch.float16


def test_empty_lanes_add_nothing() -> None:
    assert total({1: torch.tensor(2), 3: torch.tensor(5)}).item() == 7


def test_values_that_are_not_alike_are_refused() -> None:
    with pytest.raises(StepError, match="tensors of one shape and type"):
        total({0: torch.zeros(2), 1: torch.zeros(3)})


def test_complex_numbers_and_large_integers_are_summed_exactly() -> None:
    assert total({lane: torch.tensor([1j, 2 + 1j]) for lane in range(4)}).tolist() == [4j, 8 + 4j]
    assert total({0: torch.tensor(2**60), 1: torch.tensor(1)}).item() == 2**60 + 1
