"""Which rank holds which rows."""

from __future__ import annotations

import pytest
import torch

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.reduce.row_shards import RowExchange, ShardPlan


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 9, 10, 101])
def test_blocks_are_the_same_at_any_size_and_each_has_one_rank(rows: int, world: int) -> None:
    plan = ShardPlan(rows, 10, world)
    held = [row for rank in range(world) for row in plan.rows_of(rank)]
    assert held == list(range(rows))
    numbers = [number for rank in range(world) for number in plan.blocks_of(rank)]
    assert numbers == list(range(plan.blocks))
    assert [len(plan.rows_in(number)) for number in numbers[:-1]] == [10] * (plan.blocks - 1)


def test_a_world_of_one_puts_rows_in_order() -> None:
    exchange, plan = RowExchange(SoloCollectives(Activity())), ShardPlan(5, 2, 1)
    rows = exchange.settle(plan, [3, 0, 4, 1, 2], torch.tensor([[3.0], [0], [4], [1], [2]]))
    assert rows.flatten().tolist() == [0, 1, 2, 3, 4]
    blocks = [block.flatten().tolist() for block in exchange.blocks(plan, rows, rows.device)]
    assert blocks == [[0, 1], [2, 3], [4]]
    assert exchange.add_up(torch.tensor([7])).tolist() == [7]


def test_a_sample_without_a_row_is_noticed() -> None:
    exchange = RowExchange(SoloCollectives(Activity()))
    with pytest.raises(TaskError, match="were computed 2 times, and not 3"):
        exchange.settle(ShardPlan(3, 2, 1), [0, 2], torch.zeros(2, 4))
