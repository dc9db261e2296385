"""NaN and infinite losses: skipped, named, or the end of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim import SGD

from samestep.config.optim import ClipConfig
from samestep.distributed.context import SingleProcessContext
from samestep.errors import NonFiniteLoss
from samestep.optim.clipping import Clipping
from samestep.optim.loss_scale import CheckedScaling
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags
from tests.unit.contexts import TwoRanks

NAN, INFINITE = float("nan"), float("inf")


def stats(*losses: float) -> LocalStats:
    return LocalStats([LaneStats(torch.tensor(loss), 4.0) for loss in losses], RankFlags())


def guard_for(context: SingleProcessContext, policy: str = "skip", model: nn.Module | None = None) -> FiniteGuard:
    scaling = CheckedScaling(torch.device("cpu")) if policy == "skip" else Scaling()
    return FiniteGuard(context, [model or nn.Linear(1, 1)], remembered=3, scaling=scaling)


def allows_update(guard: FiniteGuard, step: int, measured: LocalStats, params: Sequence[nn.Parameter]) -> bool:
    """Whether an update changes these parameters; it looks at their gradients and the losses."""
    params = params or [nn.Parameter(torch.ones(1))]
    check = CheckedScaling(torch.device("cpu"))
    check.apply([param.grad for param in params], 1.0)
    clipping = Clipping(ClipConfig(), [params], torch.device("cpu"))
    optimizer = SGD(params, lr=0.1)
    update = Update([optimizer], [], clipping, check, guard, torch.device("cpu"))
    return not bool(update.apply(step, measured, ()).skipped)


def normal_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def mean_of(model: nn.Sequential) -> Tensor:
    return dict(model.named_buffers())["1.running_mean"]


def test_a_skipped_step_leaves_the_statistics_as_they_were(context: SingleProcessContext) -> None:
    model = normal_model()
    guard = guard_for(context, model=model)
    model(torch.randn(8, 3))
    before = {name: value.clone() for name, value in model.named_buffers()}
    guard.begin(0)
    guard.keep_buffers()
    model(torch.full((8, 3), NAN))
    assert mean_of(model).isnan().all()
    assert not allows_update(guard, 0, stats(NAN, 1.0), [])
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("bad", [NAN, INFINITE, -INFINITE])
def test_a_gradient_that_is_no_number_skips_the_step_too(
    context: SingleProcessContext, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = guard_for(context)
    good, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    good.grad, other.grad = torch.ones(2), torch.tensor([1.0, bad, 1.0])
    guard.begin(4)
    assert not allows_update(guard, 4, stats(1.0), [good, other])
    assert "a gradient of step 4 is NaN or infinite: the step is skipped" in capfd.readouterr().err
    other.grad = torch.tensor([3e38, 3e38, -1.0])  # large, and a sum in float32 would overflow
    assert allows_update(guard, 5, stats(1.0), [good, other])


def test_the_samples_of_a_bad_lane_are_named(context: SingleProcessContext) -> None:
    guard = guard_for(context, "stop")
    guard.begin(7)
    for lane, ids in enumerate([(3, 1), range(20), (5,), (0,)]):
        guard.saw(7, lane, tuple(ids))
    with pytest.raises(NonFiniteLoss) as caught:
        guard.stop(7, [0, 1, 3])
    many = ", ".join(map(str, range(16)))
    assert str(caught.value) == (
        f"the loss of step 7 is NaN or infinite in lane 0 (samples 3, 1), lane 1 (samples {many}, "
        "...), lane 3 (samples 0). The checkpoints before it are intact. Look at these samples and "
        "at the learning rate; on_nonfinite: skip lets such steps change nothing"
    )


def test_the_samples_of_another_ranks_lane_are_named_too(two_ranks: TwoRanks) -> None:
    two_ranks.other = {2: (8, 9)}
    guard = guard_for(two_ranks, "stop")
    guard.begin(0)
    guard.saw(0, 1, tuple([4]))
    with pytest.raises(NonFiniteLoss, match=r"lane 1 \(samples 4\), lane 2 \(samples 8, 9\)"):
        guard.stop(0, [1, 2])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (("", "", ""), "3 samples of a stream"),
        (("a1", "b2"), "samples a1, b2"),
        ((0, 1), "samples 0, 1"),
        ((0,), "samples 0"),
        pytest.param(("",), "1 sample"),
    ],
)
def test_samples_of_a_stream_are_counted(context: SingleProcessContext, ids: tuple[Any, ...], words: str) -> None:
    guard = guard_for(context, "stop")
    guard.begin(0)
    guard.saw(0, 0, tuple(ids))
    with pytest.raises(NonFiniteLoss) as caught:
        guard.stop(0, [0])
    assert f"lane 0 ({words}" in str(caught.value)


def test_samples_are_remembered_as_long_as_losses_are_unread(context: SingleProcessContext) -> None:
    guard = guard_for(context, "stop")  # remembers three steps
    for step in range(5):
        guard.begin(step)
        guard.saw(step, 0, tuple([step]))
    for step in (2, 3, 4):
        with pytest.raises(NonFiniteLoss, match=rf"lane 0 \(samples {step}\)"):
            guard.stop(step, [0])
    assert len(guard._seen) == 3
