"""The sum over lanes of what backward passes leave in `.grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import TaskError
from samestep.lanes.tree import LaneTree
from samestep.optim.loss_scale import CheckedScaling
from samestep.reduce.gradients import GradientSum, Grads, LaneBucket, LaneSum, OneLaneSum, RecordedSums, add_grads
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats

CPU = torch.device("cpu")


def params(*values: float) -> list[tuple[str, Parameter]]:
    return [(f"p{n}", Parameter(torch.tensor([value]))) for n, value in enumerate(values)]


def stats(*counts: float | Tensor) -> LocalStats:
    return LocalStats([LaneStats(1.0, count) for count in counts], NO_FLAGS)


def grads(named: list[tuple[str, Parameter]]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for _, p in named]


def backward(found: GradientSum, named: list[tuple[str, Parameter]], lane: int, *factors: float | None) -> None:
    """A lane whose gradient of each parameter is its factor; None leaves it unused."""
    used = [(p, f) for (_, p), f in zip(named, factors, strict=True) if f is not None]
    loss = torch.stack([p.sum() * f for p, f in used]).sum()
    found.backward(loss, 1.0, lane, last=False)


# -- several lanes --------------------------------------------------------------------------------


def test_lanes_are_added_in_the_trees_order_and_divided_once() -> None:
    named = params(1.0)
    numbers = [1e8, 1.0, -1e8, 3.0, 0.125]
    found = LaneSum(named, range(5), False, Scaling())
    tree: LaneTree[Tensor] = LaneTree(lambda left, right: left + right)
    found.begin(ragged=False)
    for lane, number in enumerate(numbers):
        backward(found, named, lane, number)
        tree.push(lane, 1, torch.tensor([number]))
    found.finish(stats(*[2.0] * 5))
    assert grads(named) == [(tree.close() * (1 / 10)).tolist()]


@pytest.mark.parametrize("filled", [(0,), (3,), (1, 2), (0, 2, 4)])
def test_empty_lanes_add_nothing(filled: tuple[int, ...]) -> None:
    named = params(1.0)
    found = LaneSum(named, range(5), False, Scaling())
    found.begin(ragged=False)
    for lane in filled:
        backward(found, named, lane, 2.0)
    found.finish(stats(*[1.0] * len(filled)))
    assert grads(named) == [[2.0]]


def test_steps_do_not_run_into_each_other() -> None:
    named = params(1.0)
    found = LaneSum(named, range(2), False, Scaling())
    for factor in (4.0, 6.0):
        found.begin(ragged=False)
        backward(found, named, 0, factor)  # the second lane is empty
        found.finish(stats(1.0, 0.0))
        assert grads(named) == [[factor]]


def test_begin_forgets_what_a_trial_left() -> None:
    for found, named in (
        (LaneSum(one := params(1.0), range(2), False, Scaling()), one),
        (OneLaneSum(other := params(1.0), Scaling()), other),
    ):
        named[0][1].grad = torch.tensor([9.0])
        found.begin(ragged=False)
        assert named[0][1].grad is None


def test_a_parameter_that_takes_part_in_some_lanes_only_is_refused_by_name() -> None:
    named = params(1.0, 1.0)
    found = LaneSum(named, range(3), False, Scaling())
    found.begin(ragged=False)
    backward(found, named, 0, 1.0, None)
    with pytest.raises(TaskError, match=r"p1 got a gradient in lane 1.*find_unused_parameters"):
        backward(found, named, 1, 1.0, 1.0)


def test_a_parameter_that_drops_out_is_refused_too() -> None:
    named = params(1.0, 1.0)
    found = LaneSum(named, range(3), False, Scaling())
    found.begin(ragged=False)
    backward(found, named, 0, 1.0, 1.0)
    with pytest.raises(TaskError, match="p0 got no gradient in lane 2"):
        backward(found, named, 2, None, 1.0)


def test_with_unused_parameters_each_lane_counts_for_what_it_used() -> None:
    named = params(1.0, 1.0, 1.0)
    found = LaneSum(named, range(4), True, Scaling())
    found.begin(ragged=False)
    backward(found, named, 0, 1.0, None, None)
    backward(found, named, 1, 2.0, 4.0, None)
    backward(found, named, 3, None, 8.0, None)
    found.finish(stats(1.0, 1.0, 0.0, 2.0))
    assert grads(named) == [[0.75], [3.0], None]


@pytest.mark.parametrize("lanes", [1, 3, 4, 5])
def test_sums_of_recorded_lanes_give_the_bits_of_their_backward_passes(lanes: int) -> None:
    numbers = [1e8, 1.0, -1e8, 3.0, 0.125][:lanes]
    eager, recorded = params(1.0), params(1.0)
    by_backward = LaneSum(eager, range(lanes), False, Scaling())
    by_backward.begin(ragged=False)
    for lane, number in enumerate(numbers):
        backward(by_backward, eager, lane, number)
    by_backward.finish(stats(*[2.0] * lanes))
    tree: LaneTree[Grads] = LaneTree(add_grads)
    for lane, number in enumerate(numbers):
        tree.push(lane, 1, [torch.tensor([number])])
    replayed = LaneSum(recorded, range(lanes), False, Scaling())
    measured = [LaneStats(1.0, 2.0)] * lanes
    found = replayed.share_recorded(RecordedSums(tree.nodes, measured), NO_FLAGS)
    replayed.finish(found)
    assert grads(recorded) == grads(eager)


# -- one lane -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4.0, torch.tensor(4), torch.tensor(4.0)])
def test_one_lane_is_divided_before_its_backward_pass(count: Any) -> None:
    named = params(1.0)
    found = OneLaneSum(named, Scaling())
    found.begin(ragged=False)
    found.backward(named[0][1].sum() * 6, count, 0, last=True)
    assert grads(named) == [[1.5]]
    found.finish(stats(count))
    assert grads(named) == [[1.5]]


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
def test_a_lane_that_counts_nothing_changes_nothing(count: Any) -> None:
    named = params(1.0)
    found = OneLaneSum(named, Scaling())
    found.begin(ragged=False)
    found.backward(named[0][1].sum() * 6, count, 0, last=True)
    assert grads(named) == [[0.0]]


def test_the_start_of_backward_is_made_again_for_another_count_or_type() -> None:
    found = OneLaneSum(params(1.0), Scaling())
    loss = torch.tensor(1.0)
    assert found.start(loss, 4) is found.start(loss, 4)
    assert found.start(loss, 2).item() == 0.5
    assert found.start(loss.double(), 2).dtype == torch.float64


def test_a_checked_lane_is_final_only_after_the_check() -> None:
    named = params(1.0)
    scaling = CheckedScaling(CPU)
    found = OneLaneSum(named, scaling)
    for value, bad in ((6.0, 0.0), (float("inf"), 1.0)):
        scaling.begin()
        found.begin(ragged=False)
        found.backward(named[0][1].sum() * value, 4.0, 0, last=True)
        found.finish(stats(4.0))
        assert scaling.found.item() == bad


# -- parts ----------------------------------------------------------------------------------------


def test_a_bucket_of_some_lanes_gives_one_sum_for_each_block_of_the_tree() -> None:
    named = params(1.0)
    bucket = LaneBucket(["p0"], [named[0][1]], range(1, 4))
    for _ in range(2):
        for lane in (1, 2, 3):
            named[0][1].grad = torch.tensor([float(lane)])
            bucket.collect(lane, may_vary=False)
        found = [[g.item() for g in block if g is not None] for block in bucket.close()]
        assert found == [[1.0], [5.0]]


def test_a_bucket_with_no_lane_at_all_gives_nothing_for_each_block() -> None:
    bucket = LaneBucket(["p0"], [params(1.0)[0][1]], range(1, 4))
    assert bucket.close() == [[None], [None]]
