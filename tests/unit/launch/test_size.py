"""Numbers of ranks and nodes: what is accepted, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.config import load_config
from samestep.errors import (
    LaunchError,
    SamestepError,
)
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Size
from samestep.launch.commands.torchrun import torchrun_command


@pytest.mark.parametrize(
    ("text", "fewest", "most", "shown"),
    [("4", 4, 4, "4"), ("2:4", 2, 4, "2:4"), ("3:3", 3, 3, "3")],
)
def test_a_size_is_a_number_or_a_range(text: str, fewest: int, most: int, shown: str) -> None:
    size = Size.parse(text, "--nproc")
    assert (size.fewest, size.most, str(size)) == (fewest, most, shown)
    assert size.is_range is (fewest != most)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--nproc is '': give a number, or a range such as 2:4"),
        ("four", "--nproc is 'four': give a number"),
        ("2.5", "give a number, or a range"),
        ("2:", "give a number, or a range"),
        (":4", "give a number, or a range"),
        ("1:2:3", "give a number, or a range"),
        ("2-4", "give a number, or a range"),
        ("0", "--nproc is 0: it must be at least 1"),
        ("0:4", "--nproc is 0:4: it must be at least 1"),
        ("-1", "--nproc is -1: it must be at least 1"),
        ("4:2", "--nproc is 4:2: the first number of a range is the smaller one"),
    ],
)
def test_a_size_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Size.parse(text, "--nproc")
    assert message in str(caught.value)


GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"nproc": Size(2, 4)}, "no rank can be left out without a restart"),
        ([], {"nproc": Size(2, 4), "max_restarts": 1, "nodes": Size(1, 2)},
         "--nproc is 2:4 beside --nodes 1:2"),
        ([], {"nproc": 2, "nodes": Size(1, 2)}, "no meeting point is given"),
        ([], {"nproc": 2, "rendezvous": "n1:29500"}, "--rendezvous is for several machines"),
        (["distributed.world_size=4"], {"nproc": Size(2, 4), "max_restarts": 1},
         "world_size is 4 but the number of ranks may change"),
        (["distributed.enabled=false"], {"nproc": 2}, "enabled is false but --nproc is 2"),
        ([], {"nproc": 9}, "lanes"),
        ([], {"nproc": 5, "nodes": Size(1, 2), "rendezvous": "n1:29500"}, "lanes"),
    ],
)  # fmt: skip
def test_a_launch_that_contradicts_itself_is_refused(
    overrides: list[str], options: dict[str, Any], message: str
) -> None:
    config = load_config(GOOD, overrides)
    with pytest.raises(SamestepError) as caught:
        torchrun_command(RankCommand(config, Path("run.yaml")), **options)
    assert message in str(caught.value)


def test_a_range_of_ranks_starts_the_most_and_knows_the_fewest() -> None:
    config = load_config(GOOD, ())
    launch = torchrun_command(RankCommand(config, Path("run.yaml")), Size(2, 4), max_restarts=3)
    assert (launch.nproc, launch.min_nproc, launch.max_restarts) == (4, 2, 3)
