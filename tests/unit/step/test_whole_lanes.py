"""Lanes that run at once."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.lanes.random_streams import MODEL
from samestep.step.lane_passes import WholeLanes
from tests.unit.step.engines import Steps, setup_of


def test_each_lane_draws_from_the_start_of_its_own_stream() -> None:
    steps = Steps(lanes=2)
    drawn: list[Tensor] = []

    def loss(batch: LaneBatch) -> tuple[Tensor, int]:
        drawn.append(torch.rand(3))
        return steps.model(batch.x).sum(), len(batch)

    steps.first_passes().train(loss)
    for lane, found in enumerate(drawn):
        setup_of().rng.enter(MODEL, lane, at=(0,))
        assert torch.equal(found, torch.rand(3))
    assert len(drawn) == 2


def test_the_loss_runs_in_the_configs_precision_and_backward_outside_of_it() -> None:
    steps = Steps(lanes=2, precision="bf16")
    seen: list[tuple[torch.dtype, bool]] = []

    def loss(batch: LaneBatch) -> tuple[Tensor, int]:
        found = steps.model(batch.x)
        found.register_hook(lambda grad: seen.append((found.dtype, autocasts())))
        assert autocasts()
        return found.float().sum(), len(batch)

    steps.first_passes().train(loss)
    assert seen == [(torch.bfloat16, False)] * 2
    assert not autocasts()


def autocasts() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_both_ways_of_writing_a_loop_are_possible() -> None:
    assert WholeLanes().needs_function == ""
