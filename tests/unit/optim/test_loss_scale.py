"""The loss scale against its rules in plain Python, and the look for what is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samestep.config.optim import LossScaleConfig
from samestep.optim.loss_scale import CheckedScaling, LossScale

CPU = torch.device("cpu")


def loss_scale(expected_count: int = 1, **rules: float) -> LossScale:
    return LossScale(LossScaleConfig(**rules), CPU, expected_count)  # type: ignore[arg-type]


def after_step(scale: LossScale, overflow: bool, count: Tensor | float = 1.0) -> float:
    """The scale after a step that did or did not overflow."""
    scale.begin()
    grad = torch.full((3,), math.inf if overflow else 1.0)
    scale.apply([grad], 1.0)
    scale.update(count)
    return float(scale.scale)


@dataclass
class Rules:
    """What the config's section says, one overflow after the other."""

    config: LossScaleConfig
    scale: float
    good: int = 0
    overflows: int = 0

    def step(self, overflow: bool) -> float:
        rules = self.config
        if overflow:
            self.good, self.overflows = 0, self.overflows + 1
            if self.overflows == rules.hysteresis:
                self.scale, self.overflows = self.scale * rules.backoff, 0
        else:
            self.good, self.overflows = self.good + 1, 0
            if self.good == rules.interval:
                self.scale, self.good = self.scale * rules.growth, 0
        self.scale = min(max(self.scale, rules.min), rules.max)
        return self.scale


@given(
    steps=st.lists(st.booleans(), max_size=40),
    interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
)
@settings(max_examples=60)
def test_the_scale_follows_its_rules(
    steps: list[bool], interval: int, hysteresis: int, growth: float, backoff: float
) -> None:
    rules = LossScaleConfig(
        init=64.0, growth=growth, backoff=backoff, interval=interval, min=8.0, max=512.0, hysteresis=hysteresis
    )
    ours, theirs = LossScale(rules, CPU, 1), Rules(rules, 64.0)
    assert [after_step(ours, bad) for bad in steps] == [theirs.step(bad) for bad in steps]


def test_an_overflow_that_is_passed_over_is_no_good_step() -> None:
    """With an interval of 1 the scale would grow in the very step that overflowed."""
    scale = loss_scale(init=64.0, interval=1, hysteresis=2)
    assert [after_step(scale, bad) for bad in (True, True, False)] == [64.0, 32.0, 64.0]


@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_a_scale_goes_on_from_its_state(saved_after: int) -> None:
    rules = {"init": 64.0, "interval": 2, "hysteresis": 2}
    steps = [(True, 3.0), (False, 70.0), (True, 1.0), (True, 9.0), (False, 2.0), (False, 5.0)] * 2
    whole, first, second = (loss_scale(**rules) for _ in range(3))
    expected = [after_step(whole, *step) for step in steps]
    found = [after_step(first, *step) for step in steps[:saved_after]]
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second.load_state_dict(state)
    assert torch.equal(second.start, first.start)
    assert found + [after_step(second, *step) for step in steps[saved_after:]] == expected
    assert torch.equal(second.start, whole.start)


@pytest.mark.parametrize("count", [1.0, 7.0, 0.3, 2.0**25 - 1])
def test_backpropagation_starts_from_the_scale_over_the_largest_count(count: float) -> None:
    """As a power of two, so that it costs no bit; a number and a tensor count alike."""
    power = 2.0 ** math.floor(math.log2(max(count, 4.0)))
    for given_count in (count, torch.tensor(count, dtype=torch.float64)):
        scale = loss_scale(expected_count=4, init=1024.0)
        assert float(scale.start) == 256.0
        after_step(scale, False, given_count)
        assert float(scale.start) == 1024.0 / power
        after_step(scale, False, 0.0 if isinstance(given_count, float) else torch.tensor(0))
        assert float(scale.start) == 1024.0 / power, "a smaller count changes nothing"


@pytest.mark.parametrize("count", [3.0, 64.0, 1000.0])
@pytest.mark.parametrize("init", [64.0, 100.0])
def test_what_the_start_put_in_is_taken_out_again(count: float, init: float) -> None:
    scale = loss_scale(expected_count=16, init=init, growth=3.0, interval=1)
    after_step(scale, False, count)
    grads = [torch.tensor([6.0, -3.0]), None, torch.tensor([0.5])]
    expected = [None if grad is None else grad / count for grad in grads]
    scaled = [None if grad is None else grad * scale.start for grad in grads]
    scale.begin()
    scale.apply(scaled, 1.0 / count)
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0.0)
    assert not scale.found


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gradient_that_is_not_finite_is_found_in_any_type(dtype: torch.dtype, bad: float) -> None:
    check = CheckedScaling(CPU)
    good = [torch.tensor([2.0, 4.0], dtype=torch.float32), torch.tensor([2.0, 6.0], dtype=dtype)]
    check.begin()
    check.apply(good, 0.5)
    assert not check.found
    assert [grad.tolist() for grad in good] == [[1.0, 2.0], [1.0, 3.0]]
    check.apply([torch.ones(2), torch.tensor([2.0, bad], dtype=dtype)], 0.5)
    assert check.found == 1
    check.begin()
    assert not check.found
    check.apply([torch.tensor([bad, -bad], dtype=dtype)], 1.0)
    assert check.found == 1


def test_float64_gradients_are_divided_in_float64() -> None:
    grad = torch.ones(1, dtype=torch.float64)
    CheckedScaling(CPU).apply([grad], 1.0 / 3.0)
    assert float(grad) == 1.0 / 3.0


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("losses", [[1.0, math.nan], [math.inf, 2.0], [math.inf, -math.inf]])
def test_a_loss_that_is_not_finite_is_found_though_gradients_are(losses: list[float], as_tensor: bool) -> None:
    check = CheckedScaling(CPU)
    check.begin()
    check.check_losses([torch.tensor(1e38), torch.tensor(1e38), torch.tensor(3e38), 0.0])
    assert not check.found, "large, but finite"
    check.check_losses([torch.tensor(loss) if as_tensor else loss for loss in losses])
    assert check.found == 1


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_bad_loss_with_bad_gradients_is_still_one(as_tensor: bool) -> None:
    """Fused optimizers skip a step whose number is exactly 1."""
    check = CheckedScaling(CPU)
    check.begin()
    check.apply([torch.tensor([math.nan])], 1.0)
    check.check_losses([torch.tensor(math.nan) if as_tensor else math.nan])
    assert float(check.found) == 1.0
    check.check_losses([torch.tensor(1.0) if as_tensor else 1.0])
    assert float(check.found) == 1.0, "a good loss takes nothing back"
