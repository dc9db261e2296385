"""A run's decisions on one process."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import load_config
from samestep.lanes.plan import BatchPlan
from samestep.run_setup import RunSetup
from tests.unit.contexts import TwoRanks


def setup(context: Any, batch: BatchPlan | None = None, **values: Any) -> RunSetup:
    config = load_config({"global_batch": 8, "lanes": 4, "epochs": 1, **values})
    return RunSetup.create(config, context, batch)


@pytest.mark.requirement("004-2.1-2", "004-2.2-2")
def test_the_lanes_are_dealt_out_to_the_ranks(two_ranks: TwoRanks) -> None:
    found = setup(two_ranks)
    assert found.batch == BatchPlan(8, 4)
    assert found.assignment.by_rank == (range(0, 2), range(2, 4))
    assert found.assignment.my_units == range(0, 2)


def test_weights_move_lanes_between_ranks(two_ranks: TwoRanks) -> None:
    found = setup(two_ranks, distributed={"lane_weights": [1, 3]})
    assert found.assignment.by_rank == (range(0, 1), range(1, 4))


def test_lanes_are_fused_at_same_samples_only(two_ranks: TwoRanks) -> None:
    assert [setup(two_ranks, same=same).assignment.fused for same in ("bits", "rounding", "samples")] == [
        False, False, True,
    ]  # fmt: skip


@pytest.mark.requirement("004-2.2-2")
def test_a_batch_per_rank_grows_with_the_world(two_ranks: TwoRanks, context: Any) -> None:
    values = {"batch_per_rank": 4, "accumulation": 2, "global_batch": None, "lanes": None}
    assert setup(context, **values).batch == BatchPlan(8, 2)
    assert setup(two_ranks, **values).batch == BatchPlan(16, 4)


def test_another_cut_replaces_the_configs(context: Any) -> None:
    found = setup(context, BatchPlan(6, 3))
    assert found.batch == BatchPlan(6, 3)
    assert found.assignment.by_rank == (range(0, 3),)
