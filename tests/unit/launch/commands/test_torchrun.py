"""Launches by torchrun that contradict themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.config import load_config
from samestep.errors import SamestepError
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Size
from samestep.launch.commands.torchrun import torchrun_command

GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
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
def test_a_launch_that_contradicts_itself_is_refused(overrides: list[str], options: dict[str, Any], words: str) -> None:
    config = load_config(GOOD, overrides)
    with pytest.raises(SamestepError) as caught:
        torchrun_command(RankCommand(config, Path("run.yaml")), **options)
    assert words in str(caught.value)


def test_a_range_of_ranks_starts_the_most_and_knows_the_fewest() -> None:
    config = load_config(GOOD, ())
    launch = torchrun_command(RankCommand(config, Path("run.yaml")), Size(2, 4), max_restarts=3)
    assert (launch.nproc, launch.min_nproc, launch.max_restarts) == (4, 2, 3)
