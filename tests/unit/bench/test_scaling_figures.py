"""Efficiency and ratios of known times, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.kinds import joined, present
from samestep.bench.scaling_plan import ScalingRequest
from samestep.bench.scaling_report import efficiency_of, verdicts, with_efficiency
from samestep.bench.statistics import ratio_of
from samestep.config import Config
from samestep.errors import PlanError
from samestep.lanes.plan import BatchPlan
from tests.unit.bench.results import document
from tests.unit.bench.scaling_rows import row_of


def test_weak_efficiency_is_how_much_of_the_time_stays() -> None:
    one, four = row_of("weak", 1, 8.0, spread=1.0), row_of("weak", 4, 10.0, spread=2.0)
    found = efficiency_of("weak", one, four)
    assert (found.median, found.low, found.high) == (8 / 10, 7 / 12, 9 / 8)


def test_strong_efficiency_is_how_much_of_the_speedup_there_is() -> None:
    """Twice the ranks of two, in 0.6 of the time: 10 / (2 * 6)."""
    found = efficiency_of("strong", row_of("strong", 2, 10.0), row_of("strong", 4, 6.0))
    assert found.median == pytest.approx(10 / 12)


def test_efficiency_is_against_the_same_loop_on_the_fewest_ranks() -> None:
    rows = [
        row_of("weak", 4, 20.0), row_of("weak", 2, 10.0), row_of("weak", 2, 30.0, variant="ddp"),
        row_of("strong", 4, 5.0),
    ]  # fmt: skip
    found = [row["efficiency"] and row["efficiency"]["median"] for row in with_efficiency(rows)]
    assert found == [0.5, None, None, None]


def test_worlds_that_were_measured_apart_get_their_efficiency_when_they_are_shown_together() -> None:
    worlds = [document("scaling", [row_of("weak", world, 10.0 * world)]) for world in (1, 2, 4)]
    found = joined(worlds)
    assert [row["efficiency"] and row["efficiency"]["median"] for row in found.rows] == [None, 0.5, 0.25]
    assert present(found).panels[0].title.endswith(": weak scaling")


def test_a_ratio_is_of_rounds_and_not_of_medians() -> None:
    """The medians are 2 and 3, but in each round the second loop takes twice as long."""
    found = ratio_of([1.0, 2.0, 4.0], [2.0, 3.0, 8.0])
    assert (found.median, found.low, found.high) == (2.0, 1.5, 2.0)


def test_the_batch_grows_with_the_ranks_or_stays() -> None:
    config = Config(name="mine", steps=1)
    assert ScalingRequest(most_ranks=4).plan(config, 16, "weak", 4) == BatchPlan(64, 4)
    assert ScalingRequest(most_ranks=4).plan(config, 16, "strong", 4) == BatchPlan(128, 8)
    assert ScalingRequest(most_ranks=32).plan(config, 16, "strong", 2) == BatchPlan(512, 32), "for the largest world"


def test_a_configs_batch_is_one_ranks_or_all_of_it() -> None:
    config, request = Config(name="mine", steps=1, global_batch=24, lanes=4), ScalingRequest(workload=None)
    assert request.plan(config, 1, "weak", 3) == BatchPlan(72, 12)
    assert request.plan(config, 1, "strong", 3) == BatchPlan(24, 4)
    with pytest.raises(PlanError, match="8 ranks need 8 lanes or more"):
        request.plan(config, 1, "strong", 8)


def said_of(**changes: Any) -> str:
    return " | ".join(verdicts([{**row_of("weak", 2, 1.0), **changes}]))


def test_what_disturbs_the_figures_is_said() -> None:
    assert said_of() == ""
    noisy = {"median": 1.04, "low": 1.02, "high": 1.05}
    assert "measured twice differs by 4% (1.020 - 1.050)" in said_of(control=noisy)
    assert "ddp is left out: its data has no length" in said_of(left_out={"ddp": "its data has no length"})
    assert "2 ranks share cores" in said_of(shares_cores=True)
