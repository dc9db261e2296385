"""The arithmetic of a range test, on curves whose answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from samestep.bench.tuning.lr_suggestion import Curve, RangeTest, suggest, what_is_wrong
from samestep.errors import RangeTestError


def curve_of(loss: Callable[[float], float], **test: float) -> Curve:
    """The curve of a loss that is a function of the rate."""
    curve = Curve(RangeTest(**test))  # type: ignore[arg-type]
    for step in range(curve.test.steps):
        curve.add(loss(curve.test.rate(step)))
        if curve.stopped:
            break
    return curve


def step_down(rate: float, at: float = 1e-3, sharpness: float = 3.0) -> float:
    """Falls from 2 to 1 around one rate, fastest there; explodes from 1 on."""
    fall = 1 / (1 + (rate / at) ** -sharpness)
    return 2 - fall + max(0.0, 20 * (rate - 1))


def test_rates_grow_by_one_factor_from_the_first_to_the_last() -> None:
    test = RangeTest(1e-6, 1.0, 61)
    rates = [test.rate(step) for step in range(61)]
    assert rates[0] == 1e-6
    assert rates[-1] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1e-5)
    factors = [b / a for a, b in pairwise(rates)]
    assert factors == pytest.approx([10**0.1] * 60)


def test_smoothing_is_a_moving_average_whose_shares_add_up_to_one() -> None:
    losses = [random.Random(7).uniform(1, 3) for _ in range(20)]
    curve = curve_of(iter_of(losses), steps=20, smooth=0.2)
    for step, smoothed in enumerate(curve.smoothed):
        shares = [0.8 ** (step - past) for past in range(step + 1)]
        mean = sum(w * x for w, x in zip(shares, losses, strict=False)) / sum(shares)
        assert smoothed == pytest.approx(mean)
    assert curve_of(iter_of(losses), steps=20, smooth=1.0).smoothed == losses


def iter_of(losses: Sequence[float]) -> Callable[[float], float]:
    rest = iter(losses)
    return lambda rate: next(rest)


def test_a_loss_some_times_its_lowest_stops_the_test() -> None:
    losses = [2.0] * 30 + [0.5] * 10 + [2.1] * 60
    curve = curve_of(iter_of(losses), smooth=1.0, stop_factor=4.0)
    assert len(curve.losses) == 41
    assert curve.stopped == "the smoothed loss is over 4 times its lowest"
    assert curve_of(iter_of(losses), smooth=1.0, stop_factor=4.3).stopped is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_stops_the_test_and_is_left_out(bad: float) -> None:
    curve = curve_of(iter_of([2.0] * 30 + [bad]))
    assert len(curve.losses) == len(curve.smoothed) == len(curve.rates) == 30
    assert curve.stopped == "the loss is NaN or infinite"


def test_losses_below_zero_diverge_by_their_fall() -> None:
    around_zero = [0.1 - 0.02 * step for step in range(50)]
    assert curve_of(iter_of([*around_zero, *[-0.8] * 50]), smooth=1.0).stopped is None
    exploding = curve_of(iter_of([*around_zero, *[5.0] * 50]), smooth=1.0)
    assert len(exploding.losses) == 51


def test_steepest_is_where_the_loss_falls_fastest() -> None:
    found = suggest(curve_of(step_down, smooth=1.0))
    assert found["steepest"] == pytest.approx(1e-3, rel=0.25)
    assert found["steepest"] == float(f"{found['steepest']:.3g}")


def test_valley_is_the_middle_of_the_longest_fall() -> None:
    """Flat up to 1e-6, then falling evenly in log(rate) down to 1e-2, then rising."""

    def loss(rate: float) -> float:
        decades = math.log10(rate)
        return 2.0 - 0.25 * (min(max(decades, -6), -2) + 6) + max(0.0, decades + 2)

    found = suggest(curve_of(loss, smooth=1.0))
    assert found["valley"] == pytest.approx(1e-4, rel=0.5)


def fastai_valley(losses: Sequence[float]) -> int:
    """The same rule as fastai states it: over all pairs."""
    n, end = len(losses), 0
    lengths = [1] * n
    for i in range(1, n):
        for j in range(i):
            if losses[i] < losses[j] and lengths[i] < lengths[j] + 1:
                lengths[i] = lengths[j] + 1
            if lengths[end] < lengths[i]:
                end = i
    start = end - lengths[end] + 1
    sections = (end - start) / 3
    return start + int(sections) + int(sections / 2)


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_fall_is_that_of_all_pairs(seed: int) -> None:
    draw = random.Random(seed)
    curve = curve_of(lambda rate: step_down(rate) + draw.gauss(0, 0.05), smooth=0.3)
    measured = len(curve.smoothed)
    trusted = range(measured // 10, measured - measured // 20)
    lowest = min(trusted, key=curve.smoothed.__getitem__)
    part = curve.smoothed[trusted.start : lowest + 1]
    rate = curve.test.rate(trusted.start + fastai_valley(part))
    assert suggest(curve)["valley"] == float(f"{rate:.3g}")


def test_a_fall_from_a_peak_beyond_the_lowest_loss_is_not_the_steepest() -> None:
    def peaked(rate: float) -> float:
        return step_down(min(rate, 0.1)) + (1.5 if 0.2 < rate < 0.5 else 0.0)

    assert suggest(curve_of(peaked, smooth=1.0))["steepest"] == pytest.approx(1e-3, rel=0.25)


@pytest.mark.parametrize("smooth", [0.02, 0.05, 0.2, 1.0])
def test_a_loss_that_only_scatters_suggests_nothing(smooth: float) -> None:
    refused = 0
    for seed in range(200):
        draw = random.Random(seed)
        curve = Curve(RangeTest(smooth=smooth))
        for _ in range(100):
            curve.add(2 + draw.gauss(0, 0.1))
        refused += what_is_wrong(curve) is not None
    assert refused >= 190, "nearly everything that is only scatter is refused"


def test_a_loss_that_falls_by_more_than_it_scatters_suggests_something() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        curve = curve_of(lambda rate, draw=draw: step_down(rate) + draw.gauss(0, 0.1))  # type: ignore[misc]
        assert what_is_wrong(curve) is None
        assert 1e-5 < suggest(curve)["valley"] < 0.5


def test_the_message_for_a_loss_that_never_falls_advises_what_to_do() -> None:
    assert what_is_wrong(curve_of(lambda rate: 2.0)) == (
        "the loss never fell enough to suggest a rate: it was 2 at first, give or take 0, and 2 at its lowest, at rates "
        "from 1e-07 to 10. Give a larger --to or more --steps, or a larger global_batch if it "
        "only scatters"
    )
    rising = what_is_wrong(curve_of(lambda rate: 2.0 + rate, steps=50, max=1000.0))
    assert rising is not None
    assert rising.endswith("Give a smaller --from, or look at the task")


def test_the_message_for_an_early_divergence_advises_what_to_do() -> None:
    assert what_is_wrong(curve_of(iter_of([2.0, 2.0, math.nan]))) == (
        "the loss is NaN or infinite after 2 steps already, at a rate of 1.45e-07: give a --from "
        "far below 1e-07, or look at the task"
    )


def test_a_loss_that_is_lowest_at_first_needs_smaller_rates() -> None:
    losses = [2.0 - 0.2 * step for step in range(5)] + [0.5, 0.3] + [0.9] * 93
    wrong = what_is_wrong(curve_of(iter_of(losses), smooth=1.0, stop_factor=9.0))
    assert wrong is not None
    assert "smaller --from" in wrong


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min": 0.0}, "--from 0"),
        ({"min": 1.0, "max": 1.0}, "a larger --to"),
        ({"max": math.inf}, "--to inf"),
        ({"steps": 19}, "at least 20"),
        ({"smooth": 0.0}, "--smooth is 0"),
        ({"smooth": 1.1}, "--smooth is 1.1"),
        ({"stop_factor": 1.0}, "--stop-factor is 1"),
        ({"min": math.nan}, "--from nan"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(RangeTestError, match=words):
        RangeTest(**options)  # type: ignore[arg-type]
