"""Which numbers of lanes are compared, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.tuning.variants import lane_variants, lanes_to_compare
from samestep.config import Config, load_config
from samestep.errors import PlanError


def config(**values: Any) -> Config:
    return load_config({"global_batch": 48, "epochs": 1, **values})


def test_the_usual_numbers_that_cut_the_batch_are_compared_with_the_configs_own() -> None:
    assert lanes_to_compare(config()) == (1, 2, 4, 8, 16)
    assert lanes_to_compare(config(lanes=12)) == (1, 2, 4, 8, 12, 16)
    assert lanes_to_compare(config(global_batch=12, lanes=3)) == (1, 2, 3, 4)


def test_a_world_needs_a_lane_for_every_rank() -> None:
    assert lanes_to_compare(config(), worlds=[4]) == (4, 8, 16)
    assert lanes_to_compare(config(), worlds=[1, 4]) == (1, 2, 4, 8, 16)
    assert lanes_to_compare(config(), (3, 6), [1, 3]) == (3, 6)
    with pytest.raises(PlanError, match=r"5 ranks need 5 lanes or more.* are 1, 3, for"):
        lanes_to_compare(config(global_batch=3, lanes=3), worlds=[1, 5])
    with pytest.raises(PlanError, match="--lanes has 2, but every rank drives at least one lane"):
        lanes_to_compare(config(), (2, 4), [4])


def test_chosen_numbers_must_cut_the_batch() -> None:
    with pytest.raises(PlanError, match=r"48 cannot be cut into 5 equal lanes.*lanes: 4 or 6"):
        lanes_to_compare(config(), (1, 5))
    with pytest.raises(PlanError, match="lanes is 96 but global_batch is 48"):
        lanes_to_compare(config(), (96,))


def test_each_number_of_lanes_is_tried_with_each_width_that_it_has() -> None:
    assert [one.label for one in lane_variants((1, 2, 8), (), 2)] == ["2 lanes", "8 lanes"]
    found = lane_variants((2, 8), (1, 4), 1)
    assert [one.label for one in found] == [
        "2 lanes, 1 at once", "2 lanes, 2 at once", "8 lanes, 1 at once", "8 lanes, 4 at once",
    ]  # fmt: skip
    assert found[-1].overrides == ("lanes=8", "speed.parallel_lanes=4")
    on_four = lane_variants((2, 8), (1, 4), 4)
    assert [one.overrides[1] for one in on_four] == ["speed.parallel_lanes=1", "speed.parallel_lanes=2"]
    assert [one.label for one in on_four] == ["8 lanes, 1 at once", "8 lanes, 4 at once"]
