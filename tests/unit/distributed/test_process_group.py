"""How many threads each rank computes with, once it knows its neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.config import DistributedConfig
from samestep.distributed.placement import Placement, decide_placement
from samestep.distributed.process_group import _threads
from samestep.distributed.rendezvous import RankInfo
from samestep.environment.fact import Fact
from tests.unit.distributed.test_placement import launched, machine


def two_ranks() -> list[RankInfo]:
    """On one machine of eight CPUs: four each."""
    return [RankInfo(rank, rank, "n1", tuple(range(8)), gpu=None, address=None, master=()) for rank in range(2)]


def placed(**changes: object) -> Placement:
    place = decide_placement(DistributedConfig(), machine(cpus=8), launched(0, 2), "rounding")
    return replace(place, **{"cpus_per_rank": None, "thread_limit": None, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "limit", "threads", "reason"),
    [
        (None, None, 4, "its share of the 8 CPUs"),
        (3, None, 3, "SLURM_CPUS_PER_TASK=3"),
        (6, None, 4, "its share of the 8 CPUs"),
        (None, 2, 2, "a container"),
        (None, 5, 4, "its share of the 8 CPUs"),
        (3, 1, 3, "SLURM_CPUS_PER_TASK=3"),
    ],
)
def test_a_rank_takes_what_it_was_given_but_no_more_than_its_share(
    given: int | None, limit: int | None, threads: int, reason: str
) -> None:
    place = placed(
        cpus_per_rank=None if given is None else Fact(given, f"SLURM_CPUS_PER_TASK={given}"),
        thread_limit=limit,
        threads=Fact(8, "a container"),
    )
    found = _threads(place, two_ranks())
    assert [one.value for one in found] == [threads, threads]
    assert found[0].reason.startswith(reason)


def test_threads_that_the_config_sets_are_not_shared_out() -> None:
    threads, given = Fact(7, "set in the config"), Fact(2, "given")
    found = _threads(placed(threads=threads, cpus_per_rank=given, shares_cpus=False), two_ranks())
    assert [one.value for one in found] == [7, 7]
