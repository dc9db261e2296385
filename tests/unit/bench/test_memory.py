"""Bytes by hand: what a step holds, predicted from shapes and read from a meter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from samestep.bench.document import Document
from samestep.bench.memory import _measured, possible_lanes
from samestep.bench.memory_meter import StepLevels, TensorMeter
from samestep.bench.memory_model import StepMemory, gradient_sets, line_through, predict_exchange, predict_optimizers
from samestep.bench.memory_report import present, verdicts
from samestep.config import Config, load_config
from samestep.errors import PlanError
from samestep.lanes.plan import LaneAssignment

CPU = torch.device("cpu")


def config(**changes: Any) -> Config:
    return load_config({"global_batch": 24, "lanes": 1, "steps": 1, **changes})


def assignment(*lanes: int, rank: int = 0) -> LaneAssignment:
    ends = [sum(lanes[: number + 1]) for number in range(len(lanes))]
    ranges = [range(end - count, end) for end, count in zip(ends, lanes, strict=True)]
    return LaneAssignment(tuple(ranges), rank)


def test_a_meter_counts_what_is_new_and_alive_and_nothing_twice() -> None:
    before, meter = torch.zeros(1000), TensorMeter()
    with meter:
        made = before + 1
        view = made.view(10, 100)
        assert meter.held() == 4000
        assert meter.size_of({"x": [view, before]}) == 4000
        temporary = torch.zeros(500)
        del temporary
        assert (meter.held(), meter.peak()) == (4000, 6000)
        meter.restart()
        del made
        assert (meter.held(), meter.peak()) == (4000, 4000), "the view keeps it"
        del view
        assert meter.held() == 0


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


def test_the_total_is_the_backward_pass_or_the_update() -> None:
    parts = StepMemory(
        weights=100, buffers=10, optimizer=200, gradients=300, activations=50, exchange=20,
        batches=5, passing=7, update=400,
    )  # fmt: skip
    assert parts.total == 335 + max(300 + 50 + 7, 100 + 400)
    unknown = StepMemory(**{**vars(parts), "activations": None})
    assert unknown.total is None


def test_activations_are_on_a_line() -> None:
    """A mask of 60 bytes, and 10 bytes a sample."""
    assert line_through((2, 80), (4, 100), 8) == 140


def test_levels_tell_activations_from_gradients() -> None:
    """Four lanes of 50 that leave gradients of 100: one, one, then two sets are kept between lanes."""
    levels = StepLevels(begins=[1000, 1100, 1100, 1200], turns=[1050, 1150, 1150, 1250], end=1100)
    assert levels.activations == 50
    assert levels.gradients(by_tree=True) == 300
    assert levels.gradients(by_tree=False) == 200
    assert StepLevels(begins=[10], turns=[15], end=110).gradients(by_tree=True) == 100


def test_the_rank_that_holds_most_counts() -> None:
    assert _measured([[10, 11, 12], [20, 30, 25]]) == {"measured_bytes": 25, "low": 10, "high": 30}
    assert _measured([[None]])["measured_bytes"] is None


def test_lanes_that_do_not_divide_the_batch_are_left_out() -> None:
    assert possible_lanes(config(), 2, (1, 2, 4, 8)) == [1, 2, 4]
    with pytest.raises(PlanError, match=r"\(7 per rank, on 2 ranks\) divides a global_batch of 24"):
        possible_lanes(config(), 2, (7,))


PART = {"world": 2, "backend": "gloo", "part": "total", "low": 1 << 20, "high": 1 << 20}
ONE = {**PART, "lanes_per_rank": 1, "predicted_bytes": None, "measured_bytes": 1 << 20}
EIGHT = {**PART, "lanes_per_rank": 8, "predicted_bytes": 3 << 19, "measured_bytes": 3 << 19}
LEAK = {
    "memory": "host", "steps": 200, "slope_bytes_per_step": 65536.0, "low": 65000.0,
    "high": 66000.0, "leaks": True, "rank": 1, "host": "node-b",
}  # fmt: skip


def test_verdicts_name_what_lanes_cost_and_who_leaks() -> None:
    found = verdicts([EIGHT, ONE], [{"world": 2, "leak": LEAK}])
    assert found[0].startswith("On 2 ranks, 8 lanes a rank hold 1.50x what 1 hold")
    assert found[1].startswith("LEAK: rank 1 of 2 on node-b (memory: host) grows by 64 KB with every step")
    fine = verdicts([ONE], [{"world": 2, "leak": {**LEAK, "leaks": False}}])
    assert fine == ["No rank's memory grows with the steps, over 200 steps."]


def test_what_is_not_predicted_is_shown_as_that() -> None:
    machine = {"hosts": ["a"], "device": "cpu", "task": "Mlp"}
    shown = present(Document("memory", machine, [ONE, EIGHT]))
    assert shown.tables[0].rows[0] == ("total", "2", "1", "-", "1 MB", "1 MB - 1 MB")
    assert [table.title for table in shown.tables] == ["What is held"]
    assert len(shown.panels) == 1
