"""Buffers that forward changes: the same start for every lane, the mean of their changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.reduce.buffers import LaneBuffers, changing_buffers, keep_buffers


def buffers_of(buffers: Sequence[Tensor], lanes: int = 4) -> LaneBuffers:
    return LaneBuffers(buffers, [range(lanes)], SoloCollectives(Activity()))


def run_step(found: LaneBuffers, buffer: Tensor, changes: dict[int, float]) -> list[float]:
    """A step in which each lane adds a number; returns where each lane started."""
    starts = []
    found.begin_step()
    for lane, change in changes.items():
        found.enter_lane()
        starts.append(buffer.flatten()[0].item())
        buffer += change
        found.leave_lane(lane)
    found.start()
    found.finish()
    return starts


def test_every_lane_starts_from_the_steps_buffers() -> None:
    buffer = torch.full((2,), 10.0)
    assert run_step(buffers_of([buffer]), buffer, {0: 1.0, 1: 2.0, 2: 3.0, 3: 6.0}) == [10.0] * 4
    assert buffer.tolist() == [13.0, 13.0]


@pytest.mark.parametrize("lanes", [{1: 4.0}, {0: 3.0, 3: 5.0}, {2: 4.0, 3: 4.0}])
def test_the_mean_is_over_lanes_with_samples(lanes: dict[int, float]) -> None:
    buffer = torch.zeros(1)
    run_step(buffers_of([buffer]), buffer, lanes)
    assert buffer.item() == 4.0


def test_a_step_without_lanes_leaves_buffers_as_they_were() -> None:
    buffer = torch.tensor([-0.0])
    run_step(buffers_of([buffer]), buffer, {})
    assert str(buffer.item()) == "-0.0"


def test_steps_follow_from_each_other() -> None:
    buffer = torch.zeros(1)
    found = buffers_of([buffer])
    assert run_step(found, buffer, {0: 1.0, 1: 3.0}) == [0.0, 0.0]
    assert run_step(found, buffer, {0: 2.0, 1: 2.0}) == [2.0, 2.0]
    assert buffer.item() == 4.0


@pytest.mark.parametrize(("changes", "expected"), [((1, 1), 1), ((1, 2), 2), ((3, 4), 4)])
def test_counters_are_rounded(changes: tuple[int, int], expected: int) -> None:
    """1.5 becomes 2 and 3.5 becomes 4: to even, the same on every rank."""
    counter = torch.zeros((), dtype=torch.int64)
    run_step(buffers_of([counter], lanes=2), counter, dict(enumerate(changes)))
    assert counter.item() == expected
    assert counter.dtype == torch.int64


def test_buffers_of_different_types_and_shapes_keep_them() -> None:
    buffers = [torch.zeros(2, 3), torch.zeros((), dtype=torch.float64), torch.zeros(1).half()]
    found = buffers_of(buffers, lanes=2)
    found.begin_step()
    for lane in range(2):
        found.enter_lane()
        for number, buffer in enumerate(buffers):
            buffer += number + 1
        found.leave_lane(lane)
    found.start()
    found.finish()
    assert [buffer.flatten().tolist() for buffer in buffers] == [[1.0] * 6, [2.0], [3.0]]
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.float64, torch.float16]


def test_one_lane_in_all_changes_buffers_in_place() -> None:
    buffer = torch.zeros(1)
    found = buffers_of([buffer], lanes=1)
    found.begin_step()
    for _ in range(2):  # a second pass over the lane, which must not start over
        found.enter_lane()
        buffer += 1
    found.leave_lane(0)
    found.start()
    found.finish()
    assert buffer.item() == 2.0


def test_a_model_without_buffers_needs_nothing() -> None:
    run_step(buffers_of([]), torch.zeros(1), {0: 1.0, 1: 2.0})


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.zeros(2))
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.norm = nn.BatchNorm1d(2)


def test_numbers_that_a_state_dict_holds_are_buffers_that_change() -> None:
    model = Buffers()
    found = changing_buffers([model, model.norm])
    expected = [model.statistics, *model.norm.buffers()]
    assert [id(buffer) for buffer in found] == [id(buffer) for buffer in expected]


def test_buffers_are_kept_also_after_an_error() -> None:
    model = nn.BatchNorm1d(2)

    def trial() -> None:
        with keep_buffers([model]):
            model(torch.randn(4, 2) + 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trial()
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked == 0
