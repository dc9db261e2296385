"""Bytes by hand: what a step holds, predicted from shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samestep.check.machine.memory_model import gradient_sets, predict_exchange, predict_optimizers
from samestep.config import Config, load_config
from samestep.lanes.plan import LaneAssignment

CPU = torch.device("cpu")


def config(**changes: Any) -> Config:
    return load_config({"global_batch": 24, "lanes": 1, "steps": 1, **changes})


def assignment(*lanes: int, rank: int = 0) -> LaneAssignment:
    ends = [sum(lanes[: number + 1]) for number in range(len(lanes))]
    ranges = [range(end - count, end) for end, count in zip(ends, lanes, strict=True)]
    return LaneAssignment(tuple(ranges), rank)


def test_sets_of_gradients_follow_from_the_tree() -> None:
    """Of lanes 0 to 7, the last begins when {0..3}, {4, 5} and {6} are summed; then comes its own."""
    alone = [gradient_sets(config(), assignment(lanes)) for lanes in (1, 2, 4, 8)]
    assert alone == [1, 2, 3, 4]
    assert [gradient_sets(config(), assignment(n, n)) for n in (1, 2, 4)] == [0, 2, 3]
    ddp = config(same="rounding")
    assert [gradient_sets(ddp, assignment(n, n)) for n in (1, 4)] == [0, 1]
    apart = config(same="rounding", distributed={"gradient_as_bucket_view": False})
    assert gradient_sets(apart, assignment(1, 1)) == 1


def test_what_is_exchanged_is_laid_out_without_being_allocated() -> None:
    """100 numbers take 112 places; one is for usage, 2 * 3 for each lane's and each rank's numbers."""
    weight = [nn.Parameter(torch.zeros(100))]
    assert predict_exchange(config(), assignment(4), weight) == 0
    assert predict_exchange(config(same="rounding"), assignment(1, 1), weight) == 400
    two = predict_exchange(config(), assignment(1, 1), weight)
    seats = two // 4 - 113
    assert two % 8 == 0
    assert seats > 0
    # Four ranks get slices of all four blocks: as much again as the row itself.
    four = predict_exchange(config(), assignment(1, 1, 1, 1), weight)
    assert four == 2 * 4 * (113 + 2 * seats - (113 + 2 * seats) % -8)


def test_optimizers_step_on_shapes_only() -> None:
    model = nn.Linear(10, 10, bias=False)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    assert predict_optimizers([adam], CPU) == (800, 0)
    kept, besides = predict_optimizers([torch.optim.AdamW(model.parameters())], CPU)
    assert (kept, besides >= 400) == (800, True)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert predict_optimizers([sgd], CPU)[0] == 400
    assert predict_optimizers([torch.optim.LBFGS(model.parameters())], CPU) == (None, 0)
    assert not adam.state
