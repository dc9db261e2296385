"""Partial sums added in the tree's order, as far as one process exchanges anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.lanes.tree import LaneTree, aligned_blocks
from samestep.reduce.exchange import NOTHING, Exchange, Pending, _StagedSum, create_exchange

SOLO = SoloCollectives(Activity())
NUMBERS = [1e8, 1.0, -1e8, 3.0, 1e-3, 7.0, 2e8]
"""Their sum in float32 depends on the order of additions."""


def of_one_rank(lanes: range, like: torch.Tensor | None = None) -> Exchange:
    like = torch.empty(0) if like is None else like
    return create_exchange([aligned_blocks(lanes)], SOLO, 2, like)


def complete(exchange: Exchange) -> list[float]:
    for pending in exchange.start():
        pending.wait()
    return [float(number) for number in exchange.total]


@pytest.mark.parametrize("count", range(1, 8))
def test_blocks_of_one_rank_are_added_in_the_trees_order(count: int) -> None:
    lanes = range(count)
    exchange = of_one_rank(lanes)
    tree: LaneTree[torch.Tensor] = LaneTree(lambda left, right: left + right)
    own: LaneTree[torch.Tensor] = LaneTree(lambda left, right: left + right)
    for lane in lanes:
        value = torch.full((2,), NUMBERS[lane])
        tree.push(lane, 1, value)
        own.push(lane, 1, value)
    for row, block in zip(exchange.rows, own.nodes, strict=True):
        row.copy_(block)
    assert complete(exchange) == tree.close().tolist()


def test_the_order_of_additions_matters_for_these_numbers() -> None:
    """Else the test above could not fail."""
    forward = backward = torch.tensor(0.0)
    for number in NUMBERS:
        forward = forward + number
    for number in reversed(NUMBERS):
        backward = backward + number
    assert forward != backward


def test_one_block_is_its_own_sum_and_nothing_is_waited_for() -> None:
    exchange = of_one_rank(range(4))
    assert exchange.rows.shape == (1, 2)
    exchange.rows[0].copy_(torch.tensor([3.0, 4.0]))
    assert list(exchange.start()) == []
    assert exchange.total.tolist() == [3.0, 4.0]


def test_an_exchange_is_used_again_and_again_in_the_same_memory() -> None:
    exchange = of_one_rank(range(3))
    place = exchange.total.data_ptr()
    for factor in (1.0, 2.0):
        exchange.rows.fill_(factor)
        assert complete(exchange) == [2 * factor] * 2
    assert exchange.total.data_ptr() == place == exchange.rows.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_have_the_type_of_what_they_add_up(dtype: torch.dtype) -> None:
    assert of_one_rank(range(3), torch.empty(0, dtype=dtype)).rows.dtype == dtype


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -2.5])
def test_an_empty_lane_changes_no_bit(value: float) -> None:
    found = torch.tensor(value) + NOTHING
    assert torch.equal(found.view(torch.int32), torch.tensor(value).view(torch.int32))


class Scripted(Exchange):
    """An exchange of another device, that notes when it starts."""

    def __init__(self) -> None:
        self.rows = torch.zeros(2, 3)
        self.total = self.rows[0]
        self.sent: torch.Tensor | None = None

    def start(self) -> Iterator[Pending]:
        self.sent = self.rows.clone()
        yield Pending([])
        self.total += 10


def test_a_staged_exchange_copies_there_and_back() -> None:
    inner = Scripted()
    staged = _StagedSum(inner, torch.empty(0))
    staged.rows.copy_(torch.arange(6.0).view(2, 3))
    steps = staged.start()
    next(steps).wait()
    assert inner.sent is not None
    assert inner.sent.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert staged.total.tolist() == [0, 1, 2], "the sum is there once the exchange is complete"
    assert list(steps) == []
    assert staged.total.tolist() == [10, 11, 12]


def test_waiting_waits_for_every_message() -> None:
    class Work:
        def wait(self) -> None:
            waited.append(self)

    waited: list[Work] = []
    works = [Work(), Work(), Work()]
    Pending(works).wait()  # type: ignore[arg-type]
    assert waited == works
