"""An update: unscale, clip, step; and what moves on only if the step counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch._dynamo  # which the first optimizer imports, and which sets an environment variable
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from samestep.config.optim import ClipConfig, LossScaleConfig
from samestep.distributed.context import SingleProcessContext
from samestep.errors import NonFiniteLoss
from samestep.optim.clipping import Clipping
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update, Updated
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats

CPU = torch.device("cpu")
SCALE = LossScaleConfig(init=8.0, min=2.0)


class Bench:
    """An update of two parameters with an optimizer each, by the gradient 3 and 4."""

    def __init__(self, check: Scaling | None = None, clip: float | None = None, fused: bool = False) -> None:
        self.model = nn.Module()
        self.model.a, self.model.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.model.register_buffer("seen", torch.zeros(()))
        self.params: Sequence[nn.Parameter] = (self.model.a, self.model.b)
        self.optimizers = [SGD([param], lr=1.0, fused=fused) for param in self.params]
        self.schedule = ExponentialLR(self.optimizers[0], 0.5)
        self.followed = 0
        self.check = check = check or Scaling()
        context = SingleProcessContext()
        self.said: list[str] = []
        context.log.main = self.said.append  # type: ignore[method-assign]
        self.guard = FiniteGuard(context, [self.model], 3, check)
        self.update = Update(
            self.optimizers,
            [self.schedule],
            Clipping(ClipConfig(norm=clip), [[param] for param in self.params], CPU),
            check,
            self.guard,
            CPU,
            after_update=self._follow,
        )

    def _follow(self, step: int) -> None:
        self.followed += 1

    @property
    def weights(self) -> list[float]:
        return [param.item() for param in self.params]

    @property
    def rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def step(self, number: int = 0, gradient: float = 1.0, loss: Tensor | float = 2.0, *chosen: SGD) -> Updated:
        """A step of one lane whose gradients are 3 and 4 times `gradient`."""
        self.guard.begin(number)
        self.guard.keep_buffers()
        self.model.seen += 1
        stats = LocalStats([LaneStats(loss, 2.0)], NO_FLAGS)
        self.check.begin()
        start = 1.0 if self.check.start is None else self.check.start
        for param, value in zip(self.params, (3.0, 4.0), strict=True):
            param.grad = torch.full((1,), value * gradient * 2.0) * start
        self.check.apply([param.grad for param in self.params], 0.5)
        return self.update.apply(number, stats, chosen)


def loss_scale() -> LossScale:
    return LossScale(SCALE, CPU, expected_count=1)


@pytest.mark.parametrize("check", [None, CheckedScaling(CPU), loss_scale()])
def test_gradients_are_unscaled_then_clipped_then_stepped_by(check: CheckedScaling | None) -> None:
    """Clipped before they are unscaled, (3, 4) would become another multiple of the norm 1."""
    bench = Bench(check, clip=1.0)
    updated = bench.step()
    assert bench.weights == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert float(updated.norms) == pytest.approx(5.0)  # type: ignore[arg-type]
    assert updated.rates == (1.0, 1.0), "the rates of this step, not the next one's"
    assert (bench.rate, bench.followed) == (0.5, 1)
    assert updated.skipped is None if check is None else not updated.skipped


@pytest.mark.parametrize("loss", [math.nan, torch.tensor(math.inf)])
@pytest.mark.parametrize("gradient", [1.0, math.nan])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_not_finite_moves_nothing(scaled: bool, gradient: float, loss: Tensor | float) -> None:
    bench = Bench(loss_scale() if scaled else CheckedScaling(CPU), clip=1.0)
    bench.step(0)
    before = bench.weights
    updated = bench.step(1, gradient, loss)
    assert updated.skipped == 1
    assert updated.norms is None
    assert (bench.weights, bench.rate, bench.followed) == (before, 0.5, 1)
    assert float(bench.model.seen) == 1, "buffers are as before the step"
    assert "the loss of step 1 is NaN or infinite in lane 0" in bench.said[-1]
    bench.step(2)
    assert bench.weights != before
    assert (bench.rate, bench.followed, float(bench.model.seen)) == (0.25, 2, 2)


def test_without_a_check_nothing_is_looked_at() -> None:
    bench = Bench()
    assert bench.step(0, math.nan).skipped is None
    assert all(map(math.isnan, bench.weights))
    assert bench.followed == 1


def test_an_overflow_shrinks_the_scale_of_the_next_step() -> None:
    bench = Bench(loss_scale())
    scales = [bench.step(number, bad) for number, bad in enumerate([1.0, math.inf, 1.0])]
    assert [float(updated.scale) for updated in scales] == [8.0, 8.0, 4.0]  # type: ignore[arg-type]
    assert "a gradient of step 1 is NaN or infinite at loss scale 8: the step is skipped" in (bench.said[0])


def test_an_overflow_at_the_lowest_scale_ends_the_run() -> None:
    bench = Bench(loss_scale())
    bench.step(0, math.inf)
    bench.step(1, math.inf)
    with pytest.raises(NonFiniteLoss, match=r"at the lowest loss scale of 2 \(loss_scale\.min\)"):
        bench.step(2, math.inf)


def test_ten_skipped_steps_in_a_row_end_the_run() -> None:
    bench = Bench(CheckedScaling(CPU))
    for number in range(9):
        bench.step(number, math.nan)
    bench.step(9)
    for number in range(10, 19):
        bench.step(number, math.nan)
    state = bench.guard.state_dict()
    with pytest.raises(NonFiniteLoss, match=r"step 19 .*; 10 steps in a row were skipped$"):
        bench.step(19, math.nan)
    again = Bench(CheckedScaling(CPU))
    again.guard.load_state_dict(state)
    with pytest.raises(NonFiniteLoss, match="10 steps in a row were skipped"):
        again.step(0, math.nan)


def test_only_the_optimizers_that_are_named_step() -> None:
    bench = Bench()
    bench.step(0)
    bench.step(1, 1.0, 2.0, bench.optimizers[1])
    assert bench.weights == [-3.0, -8.0]


def test_rates_are_numbers_though_the_optimizer_holds_a_tensor() -> None:
    bench = Bench()
    bench.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.5)
    assert bench.step().rates == (0.5, 1.0)
    assert all(type(rate) is float for rate in bench.step().rates)


def test_what_follows_a_step_can_wait_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where fused optimizers skip on the device and the host learns of it later."""
    bench = Bench(CheckedScaling(CPU), fused=True)
    monkeypatch.setattr(bench.update, "_decided_on_device", True)
    bench.step(0)
    assert (bench.followed, bench.rate) == (0, 1.0)
    bench.update.sync_update()
    bench.update.sync_update()
    assert (bench.followed, bench.rate, bench.weights) == (1, 0.5, [-3.0, -4.0])
    bench.step(1, math.nan, torch.tensor(math.nan))
    assert bench.said == []
    assert bench.weights == [-3.0, -4.0], "skipped by the optimizers themselves"
    assert float(bench.model.seen) == 1
    bench.step(2)
    assert "the loss of step 1" in bench.said[0]
    assert (bench.followed, bench.rate, bench.weights) == (1, 0.5, [-4.5, -8.0])
    bench.update.sync_update()
    assert (bench.followed, bench.rate) == (2, 0.25)
