"""The loss of a step has the bits of the tree, wherever its numbers are."""

from __future__ import annotations

import pytest
import torch

from samestep.lanes.tree import LaneTree
from samestep.reduce.stats import mean_loss

CPU = torch.device("cpu")


@pytest.mark.parametrize("lanes", range(1, 14))
def test_the_mean_loss_is_added_up_in_the_trees_order(lanes: int) -> None:
    generator = torch.Generator().manual_seed(lanes)
    losses = [float(loss) for loss in torch.rand(lanes, generator=generator)]
    counts = [float(1 + lane % 3) for lane in range(lanes)]
    tree: LaneTree[float] = LaneTree(lambda left, right: left + right)
    for lane, loss in enumerate(losses):
        tree.push(lane, 1, loss)
    expected = tree.close() / sum(counts)
    on_host = [number for pair in zip(losses, counts, strict=True) for number in pair]
    as_tensors = [torch.tensor(number) for number in on_host]
    losses_only = [t if at % 2 == 0 else n for at, (t, n) in enumerate(zip(as_tensors, on_host, strict=True))]
    for values in (on_host, as_tensors, losses_only):
        assert mean_loss(values, CPU).item() == expected
