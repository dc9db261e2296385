"""The statistics of all lanes from each one's own, and the layers that they are for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from samestep.distributed.collectives import SoloCollectives, TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import StepError, TaskError
from samestep.step.global_batchnorm import GlobalBatchNorm, own_statistics, statistics_of
from samestep.step.lane_tensor import lane_tensor


class Alone(TorchCollectives):
    """Makes no process group; nothing is sent here."""

    def __init__(self) -> None:
        self.activity, self.rank, self.world = Activity(), 0, 2


def statistics(lanes: list[Tensor]) -> list[Tensor]:
    found = statistics_of(own_statistics(lanes))
    return [found.count, found.mean, found.squares / found.count]


@pytest.mark.parametrize("sizes", [[4, 4], [5, 1, 3], [4, 0, 2]])
def test_uneven_lanes_and_a_large_mean_lose_no_digits(sizes: list[int]) -> None:
    x = torch.randn(sum(sizes), 3, 5, generator=torch.Generator().manual_seed(1)) + 1e4
    count, mean, variance = statistics(list(x.split(sizes)))
    expected = torch.var_mean(x.double(), (0, 2), correction=0)
    assert count.item() == 5 * sum(sizes)
    torch.testing.assert_close(mean, expected[1], rtol=1e-7, atol=0)
    torch.testing.assert_close(variance, expected[0], rtol=1e-3, atol=0)
    naive = x.square().mean((0, 2)) - x.mean((0, 2)).square()
    assert (naive - expected[0]).abs().max() > 1, "what squares about zero leave"


LANES = [range(2), range(2, 4)]


def test_outside_of_lanes_and_in_evaluation_a_layer_is_torchs() -> None:
    layer, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    found = GlobalBatchNorm([layer, nn.Sequential(layer)], LANES, Alone())
    assert found.layers == [layer]
    x = torch.randn(5, 2)
    assert torch.equal(layer(x), plain(x))
    found.begin_step(lambda: True)
    with pytest.raises(StepError, match="called for one lane alone"):
        layer(x)
    assert torch.equal(layer.eval()(x), plain.eval()(x))
    assert torch.equal(layer.running_var, plain.running_var)  # type: ignore[arg-type]


def test_a_copy_of_a_model_meets_the_same_ranks() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    found = GlobalBatchNorm([model], LANES, Alone())
    copied = copy.deepcopy(model)
    layer, ranks = copied[0].forward.args  # type: ignore[union-attr]
    assert layer is copied[0]
    assert ranks is found


def test_a_model_may_be_trained_again() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert [GlobalBatchNorm([model], LANES, Alone()).layers for _ in range(2)] == [[model[0]]] * 2
    model[0].forward = model[0].forward.__call__  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="0 is a BatchNorm1d with a forward pass of its own"):
        GlobalBatchNorm([model], LANES, Alone())


def test_lanes_outside_of_a_body_are_refused() -> None:
    """As where a model's own checkpointing computes them a second time."""
    layer = nn.BatchNorm1d(2)
    GlobalBatchNorm([layer], LANES, Alone())
    with pytest.raises(StepError, match="computed outside of the lines in which all lanes run"):
        layer(lane_tensor((0, 1), (torch.ones(3, 2), torch.ones(3, 2))))


def test_lanes_without_samples_count_as_none() -> None:
    found = GlobalBatchNorm([nn.BatchNorm1d(2)], [range(4)], SoloCollectives(Activity()))
    assert found.gather(torch.ones(2, 3), (0, 3)).sum(1).tolist() == [3, 0, 0, 3]
