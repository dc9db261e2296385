"""Many steps as few points."""

from __future__ import annotations

import math
import sys

from samestep.report.curves.history import Series
from samestep.report.curves.thinning import flags, mean, thin


def test_few_values_stay_as_they_are_and_gaps_are_gaps() -> None:
    thinned = thin(Series([3, 5, 9], [1.0, math.nan, math.inf]), 0, 9)
    assert (thinned.x, thinned.y) == ([3, 5, 9], [1.0, None, None])
    assert thinned.low is None


def test_every_value_counts_once_and_extremes_stay_visible() -> None:
    values = [float(step % 7) for step in range(10_000)]
    values[4321], values[77] = 1e6, -1e6
    thinned = thin(Series(range(10_000), values), 0, 9_999, 100)
    assert len(thinned.x) == 100
    assert thinned.low is not None
    assert thinned.high is not None
    assert max(v for v in thinned.high if v is not None) == 1e6
    assert min(v for v in thinned.low if v is not None) == -1e6
    # Buckets of equal size: the mean of their means is the mean.
    total = math.fsum(v for v in thinned.y if v is not None) / 100
    assert math.isclose(total, math.fsum(values) / 10_000, rel_tol=1e-9)


def test_the_same_steps_are_averaged_in_every_run() -> None:
    long = thin(Series(range(2_000), [1.0] * 2_000), 0, 1_999, 100)
    short = thin(Series(range(1_000), [1.0] * 1_000), 0, 1_999, 100)
    assert list(short.x) == list(long.x)[:50]


def test_a_bucket_without_finite_values_is_a_gap() -> None:
    values = [math.nan] * 100 + [1.0] * 900
    thinned = thin(Series(range(1_000), values), 0, 999, 10)
    assert thinned.y == [None, *[1.0] * 9]


def test_means_of_large_values_are_finite_and_of_equal_ones_exact() -> None:
    assert mean([sys.float_info.max] * 3) == sys.float_info.max
    assert mean([0.1] * 7) == 0.1


def test_flags_say_which_steps_and_why() -> None:
    series = Series(range(4), [1.0, math.nan, 1.0, math.inf])
    found = flags(series, [1, 2], 0, 3)
    assert [(flag.step, flag.text) for flag in found] == [
        (1, "step 1: NaN or infinite, skipped"),
        (2, "step 2: skipped"),
        (3, "step 3: NaN or infinite"),
    ]


def test_many_flags_are_few_that_count_them_all() -> None:
    found = flags(Series(range(1_200), [math.nan] * 1_200), [5], 0, 1_199)
    assert len(found) == 60
    assert found[0].text == "steps 0 to 19: 20 NaN or infinite, 1 skipped"
