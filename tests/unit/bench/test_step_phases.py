"""How a step is split, by hand."""

from __future__ import annotations

import pytest

from samestep.bench.scaling_report import Cores, RankStep, phases_of, share_cores, slow_ranks, split_step


@pytest.mark.requirement("003-T5-4")
def test_who_is_early_waits_and_the_rest_is_the_exchange() -> None:
    """Ranks are ready after 4 and 7 seconds; both leave the exchange after 9."""
    early, late = RankStep(1.0, 3.0, 5.0, 0.5), RankStep(1.0, 6.0, 2.0, 0.5)
    assert split_step([early, late]) == {"data": 1.0, "compute": 4.5, "exchange": 2.0, "update": 0.5, "wait": 1.5}


def test_nobody_waits_longer_than_the_exchange_took() -> None:
    """Its messages were there when it came: the other one computed on behind them."""
    early, late = RankStep(0.0, 3.0, 1.0, 0.0), RankStep(0.0, 6.0, 0.5, 0.0)
    assert split_step([early, late])["wait"] == 0.5
    assert split_step([early, late])["exchange"] == 0.25


def test_one_rank_waits_for_nobody() -> None:
    assert split_step([RankStep(1.0, 2.0, 0.0, 3.0)])["wait"] == 0.0


def test_phases_have_a_spread_over_steps() -> None:
    found = phases_of([[RankStep(0.0, seconds, 0.0, 0.0)] for seconds in (1.0, 2.0, 4.0)])
    assert (found["compute"].median, found["compute"].low, found["compute"].high) == (2.0, 1.0, 4.0)


def test_a_slow_rank_is_compared_with_the_median_one() -> None:
    steps = [[RankStep(0.0, seconds, 0.0, 0.0) for seconds in (1.0, 1.1, 1.8, 1.0)] for _ in range(5)]
    found = slow_ranks(steps)
    assert [one["rank"] for one in found] == [2]
    assert found[0]["median"] == pytest.approx(1.8)


def test_of_two_ranks_the_slow_one_is_compared_with_the_other() -> None:
    steps = [[RankStep(0.0, 1.0, 0.0, 0.0), RankStep(0.0, 2.0, 0.0, 0.0)]] * 3
    assert [(one["rank"], one["median"]) for one in slow_ranks(steps)] == [(1, 2.0)]


def test_a_rank_that_is_slow_now_and_then_is_not_named() -> None:
    steps = [[RankStep(0.0, 1.0, 0.0, 0.0), RankStep(0.0, seconds, 0.0, 0.0)] for seconds in (1.0, 1.5, 1.5)]
    assert slow_ranks(steps) == []


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ([Cores("a", (0, 1), 2, 1)] * 2, False),
        ([Cores("a", (0, 1), 2, 1)] * 3, True),
        ([Cores("a", (0, 1), 2, 2)] * 2, True),
        ([Cores("a", (0, 1, 2, 3), 2, 1)] * 3, True),  # a container grants two of four
        ([Cores("a", (0,), 1, 1), Cores("a", (1,), 1, 1)], False),  # bound, each to its own
        ([Cores("a", (0,), 1, 1), Cores("b", (0,), 1, 1)], False),  # on two machines
    ],
)
def test_ranks_share_cores_if_they_have_more_threads_than_there_are(ranks: list[Cores], shared: bool) -> None:
    assert share_cores(ranks) is shared
