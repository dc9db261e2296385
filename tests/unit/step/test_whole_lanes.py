"""Lanes that run at once."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.lanes.rng import MODEL
from samestep.step.whole_lanes import WholeLanes
from tests.unit.step.engines import Steps, inputs, setup_of


def test_each_lane_draws_from_the_start_of_its_own_stream() -> None:
    steps = Steps(lanes=2)
    drawn: list[Tensor] = []

    def loss(batch: LaneBatch) -> tuple[Tensor, int]:
        drawn.append(torch.rand(3))
        return steps.model(batch.x).sum(), len(batch)

    steps.first_passes().run(loss)
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

    steps.first_passes().run(loss)
    assert seen == [(torch.bfloat16, False)] * 2
    assert not autocasts()


def autocasts() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_nothing_is_read_before_the_first_lane() -> None:
    read: list[int] = []
    steps = Steps(engine={"on_batch": lambda step, batch: read.append(batch.lane)})
    runner = WholeLanes(steps.setup.precision)
    runner.before_lanes(steps.first_passes(), lambda batch: (inputs(1).sum(), 1))
    assert read == []
    assert runner.needs_function == "", "both ways of writing a loop are possible"


def test_an_update_is_the_change_itself_and_gives_its_norms() -> None:
    runner, calls = WholeLanes(setup_of().precision), []

    def change() -> Tensor:
        calls.append(1)
        return torch.tensor(2.5)

    norms = runner.run_update(change)
    assert norms is not None
    assert norms.item() == 2.5
    assert calls == [1]
    assert runner.run_update(lambda: None) is None
