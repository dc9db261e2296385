"""Which units a rank runs, with lanes of their own or fused."""

from __future__ import annotations

import pytest

from samestep.lanes.plan import LaneAssignment

BY_RANK = (range(0, 3), range(3, 5), range(5, 6))


@pytest.mark.parametrize(("rank", "units"), [(0, [0, 1, 2]), (1, [3, 4]), (2, [5])])
def test_a_rank_runs_its_lanes_one_by_one(rank: int, units: list[int]) -> None:
    assignment = LaneAssignment(BY_RANK, rank)
    assert list(assignment.my_units) == units
    assert [list(assignment.lanes_of(unit)) for unit in units] == [[unit] for unit in units]
    assert assignment.units == BY_RANK


@pytest.mark.parametrize(("rank", "lanes"), list(enumerate(BY_RANK)))
def test_a_fused_rank_runs_one_unit_over_all_its_lanes(rank: int, lanes: range) -> None:
    assignment = LaneAssignment(BY_RANK, rank, fused=True)
    assert list(assignment.my_units) == [rank]
    assert assignment.lanes_of(rank) == lanes
    assert [list(units) for units in assignment.units] == [[0], [1], [2]]


def test_a_rank_may_have_no_lanes() -> None:
    """As in an evaluation that rank 0 does alone."""
    assert len(LaneAssignment((range(4), range(4, 4)), 1).my_units) == 0
