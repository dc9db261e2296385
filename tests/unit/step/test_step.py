"""A step as a custom loop uses it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from samestep.errors import StepError
from tests.unit.step.engines import LR, Steps, inputs, linear, output_sum


def test_a_step_knows_its_place_in_the_run_and_in_its_epoch() -> None:
    steps = Steps(samples=10)  # 4 + 4 + 2
    places = []
    for step in steps:
        places.append((step.index, step.epoch, step.epoch_step, step.ends_epoch))
        step.train(output_sum(steps.model))
        if len(places) == 4:
            break
    assert places == [(0, 0, 0, False), (1, 0, 1, False), (2, 0, 2, True), (3, 1, 0, False)]


def test_lanes_without_samples_are_left_out_of_the_tail() -> None:
    steps = Steps(samples=7, lanes=2)  # 4, then 3 samples: a whole lane and half of one
    given = []
    for step in steps:
        given.append([(batch.lane, batch.ids) for batch in step.lanes])
        if step.ends_epoch:
            break
    assert given == [[(0, (0, 1)), (1, (2, 3))], [(0, (4, 5)), (1, (6,))]]


def test_a_lane_with_no_sample_at_all_is_not_given() -> None:
    steps = Steps(samples=5)
    list(next(every := iter(steps)).lanes)
    assert [batch.lane for batch in next(every).lanes] == [0]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_an_update_steps_by_the_mean_over_all_samples(lanes: int) -> None:
    steps = Steps(lanes=lanes)
    step = steps.first()
    for batch in step.lanes:
        step.backward(steps.model(batch.x).sum(), count=len(batch))
    step.update()
    expected = 0.25 - LR * inputs(8)[:4].mean(0)
    assert torch.allclose(steps.model.weight[0], expected)
    assert [(record.step, record.count) for record in steps.records] == [(0, 4.0)]


def test_counts_weigh_the_lanes_of_an_uneven_step() -> None:
    """A mean of lane means would weigh the lane of one sample like the lane of two."""
    steps = Steps(samples=3, lanes=2)
    steps.first().train(output_sum(steps.model))
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * inputs(3).mean(0))
    assert steps.records[0].count == 3


def test_train_gives_the_bits_of_the_loop_over_lanes() -> None:
    def model() -> nn.Module:
        return nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(1))

    by_hand, by_function = Steps(model(), lanes=2), Steps(model(), lanes=2)
    for step, whole in zip(by_hand, by_function, strict=True):
        for batch in step.lanes:
            step.backward(by_hand.model(batch.x).square().sum(), len(batch))
        step.update()
        whole.train(lambda batch: (by_function.model(batch.x).square().sum(), len(batch)))
        if step.index == 3:
            break
    ours, theirs = by_hand.model.state_dict(), by_function.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["0.weight"], linear().weight)


def test_a_second_pass_over_the_lanes_sees_the_same_batches_draws_and_buffers() -> None:
    steps = Steps(nn.BatchNorm1d(2), lanes=2)
    step = steps.first()
    passes = []
    for _ in range(2):
        seen = []
        for batch in step.lanes:
            before = steps.model.running_mean.clone()
            steps.model(batch.x)
            seen.append((batch.ids, batch.x, torch.rand(1), before))
        passes.append(seen)
    for first, second in zip(*passes, strict=True):
        assert first[0] == second[0]
        assert first[1] is second[1]
        assert torch.equal(first[2], second[2])
        assert torch.equal(second[3], torch.zeros(2)), "each lane starts from the step's buffers"


def test_only_the_given_optimizers_step() -> None:
    first, second = linear(), linear()
    optimizers = [SGD(module.parameters(), lr=LR) for module in (first, second)]
    steps = Steps(objects=[first, second, *optimizers])
    step = steps.first()
    for batch in step.lanes:
        step.backward((first(batch.x) + second(batch.x)).sum(), len(batch))
    step.update(optimizers[1])
    assert torch.equal(first.weight, linear().weight)
    assert not torch.equal(second.weight, linear().weight)


def test_an_optimizer_that_was_not_prepared_is_refused() -> None:
    steps = Steps()
    step = steps.first()
    for batch in step.lanes:
        step.backward(steps.model(batch.x).sum(), len(batch))
    with pytest.raises(StepError, match=r"step\.update got a SGD that run\.prepare did not"):
        step.update(SGD(steps.model.parameters(), lr=LR))


def test_micro_batches_need_the_loss_as_a_function() -> None:
    steps = Steps(lanes=2, memory={"lane_split": 2})
    step = steps.first()
    with pytest.raises(StepError, match=r"memory\.lane_split needs the loss as a function.*train"):
        next(step.lanes)
    step.train(output_sum(steps.model))
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * inputs(8)[:4].mean(0))
