"""A step as a custom loop uses it."""

from __future__ import annotations

import pytest
import torch

from tests.unit.step.engines import LR, Steps, inputs, output_sum


def test_a_step_knows_its_place_in_the_run_and_in_its_epoch() -> None:
    steps = Steps(samples=10)  # 4 + 4 + 2
    places = []
    for step in steps:
        places.append((step.index, step.epoch, step.epoch_step, step.ends_epoch))
        step.train(output_sum(steps.model))
        if len(places) == 4:
            break
    assert places == [(0, 0, 0, False), (1, 0, 1, False), (2, 0, 2, True), (3, 1, 0, False)]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_an_update_steps_by_the_mean_over_all_samples(lanes: int) -> None:
    steps = Steps(lanes=lanes)
    step = steps.first()
    step.train(output_sum(steps.model))
    expected = 0.25 - LR * inputs(8)[:4].mean(0)
    assert torch.allclose(steps.model.weight[0], expected)
    assert [(record.step, record.count) for record in steps.records] == [(0, 4.0)]


def test_counts_weigh_the_lanes_of_an_uneven_step() -> None:
    """A mean of lane means would weigh the lane of one sample like the lane of two."""
    steps = Steps(samples=3, lanes=2)
    steps.first().train(output_sum(steps.model))
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * inputs(3).mean(0))
    assert steps.records[0].count == 3
