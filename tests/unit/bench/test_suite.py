"""Which commands the suite runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.bench.suite import PARTS, chosen_parts, words_of
from samestep.cli.bench.shared import Start, Via
from samestep.errors import PlanError

OUT = Path("out")


def test_each_part_is_a_command_with_its_own_file() -> None:
    comm, *_, checkpoint = PARTS
    assert words_of(comm, None, [], [1, 2, 4], quick=True, folder=OUT) == [
        "bench", "comm", "--worlds", "2,4", "--quick", "--output", "out/comm.json",
    ]  # fmt: skip
    config = Path("c.yaml")
    assert words_of(checkpoint, config, ["seed=1"], [1], quick=False, folder=OUT) == [
        "bench", "checkpoint", "c.yaml", "seed=1", "--worlds", "1", "--directory", "out", "--output",
        "out/checkpoint.json",
    ]  # fmt: skip


def test_what_cannot_be_measured_with_one_rank_is_left_out() -> None:
    assert [part.name for part in chosen_parts([], [1])] == ["scaling", "memory", "loader", "checkpoint"]
    assert [part.name for part in chosen_parts(["memory"], [1, 2])] == ["memory"]
    with pytest.raises(PlanError, match="--only has disk: there are comm, scaling"):
        chosen_parts(["disk"], [1])


@pytest.mark.parametrize(
    ("via", "nodes", "hosts", "words"),
    [
        ("torchrun", 1, "", ["--via", "torchrun"]),
        ("slurm", 4, "", ["--via", "slurm", "--nodes", "4"]),
        ("mpirun", 1, "a,b", ["--via", "mpirun", "--hosts", "a,b"]),
    ],
)
def test_every_part_starts_its_ranks_where_the_suite_was_asked_to(
    via: Via, nodes: int, hosts: str, words: list[str]
) -> None:
    assert Start.parse("1,4", via, nodes, hosts).where() == words
