"""The loss of a step has the bits of the tree, wherever its numbers are."""

from __future__ import annotations

import math

import pytest
import torch

from samestep.lanes.tree import LaneTree
from samestep.reduce import stats
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats, ReplayedStats, RowStats, mean_loss

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


def test_counts_are_added_one_after_the_other_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on, `sum` makes up for rounding: it would be 1.0."""
    monkeypatch.setattr(stats, "sum", math.fsum, raising=False)
    counts = [1e16, 1.0, -1e16]
    here = LocalStats([LaneStats(0.0, count) for count in counts], NO_FLAGS)
    gathered = RowStats([], NO_FLAGS)
    gathered._rows = torch.tensor([[0.0, count] for count in counts], dtype=torch.float64)
    replayed = ReplayedStats(lambda: [number for count in counts for number in (0.0, count)], 6, here, NO_FLAGS)
    assert [found.count() for found in (here, gathered, replayed)] == [0.0] * 3
