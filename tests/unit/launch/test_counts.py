"""Numbers of ranks and of other things on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.errors import LaunchError, PlanError
from samestep.launch.run.worlds import parse_counts, refuse_fixed_world


def config(**values: Any) -> Config:
    return load_config({"global_batch": 48, "epochs": 1, **values})


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
    with pytest.raises(LaunchError, match="this process is one of 2 ranks already"):
        refuse_fixed_world(config(), 2)
    with pytest.raises(LaunchError, match=r"pass distributed.world_size=auto"):
        refuse_fixed_world(config(distributed={"world_size": 2}), 1)
    refuse_fixed_world(config(distributed={"world_size": 2}), 1, [2])
