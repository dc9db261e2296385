"""Which numbers of lanes are compared, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.errors import LaunchError, PlanError
from samestep.lane_tuning.choices import (
    Choice,
    Comparison,
    lanes_to_compare,
    parse_counts,
    refuse_fixed_world,
)


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


def test_lanes_that_follow_from_the_ranks_are_no_choice() -> None:
    with pytest.raises(PlanError, match=r"batch_per_rank is 4: .* Set global_batch instead"):
        lanes_to_compare(load_config({"batch_per_rank": 4, "epochs": 1}))


def test_widths_beyond_a_ranks_lanes_are_measured_once() -> None:
    compared = Comparison((2, 8), (1, 4, 8))
    assert compared.choices(1) == (
        Choice(2, 1), Choice(2, 2), Choice(8, 1), Choice(8, 4), Choice(8, 8),
    )  # fmt: skip
    assert compared.choices(4) == (Choice(8, 1), Choice(8, 2))
    assert Comparison((2, 8)).choices(2) == (Choice(2), Choice(8))


def test_numbers_of_the_command_line_are_sorted() -> None:
    assert parse_counts("8, 1,2", "--lanes") == (1, 2, 8)


@pytest.mark.parametrize("text", ["0", "1,,2", "x", "-1", "²", "1;2", "9" * 30, "1000001", " "])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"--worlds is .*: give numbers from 1 on, such as 1,2,4"):
        parse_counts(text, "--worlds")


def test_the_same_number_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="--lanes is '2,2': give different numbers"):
        parse_counts("2,2", "--lanes")


def test_ranks_are_not_started_by_a_rank_or_for_one_world() -> None:
    refuse_fixed_world(config(), 1)
    with pytest.raises(LaunchError, match="this process is one of 2 already"):
        refuse_fixed_world(config(), 2)
    with pytest.raises(LaunchError, match=r"pass distributed.world_size=auto"):
        refuse_fixed_world(config(distributed={"world_size": 2}), 1)
