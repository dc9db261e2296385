"""Scaling for programs: what is started, and what is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import samestep
from samestep.bench import programs
from samestep.bench.document import Document
from samestep.bench.worlds import BenchCommand
from samestep.errors import PlanError
from samestep.launch.run.worlds import World
from tests.unit.bench.scaling_rows import row_of


@pytest.mark.requirement("003-T5-9", "003-T5-10")
def test_a_dict_for_each_world_with_other_loops_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[BenchCommand, Sequence[World]]] = []

    def measure(command: BenchCommand, worlds: Sequence[World], report: Any) -> list[Document]:
        started.append((command, worlds))
        return [
            Document("scaling", {}, [
                row_of("strong", world.ranks, 8.0 / world.ranks + 1.0),
                row_of("strong", world.ranks, 9.0, variant="ddp"),
            ])
            for world in worlds
        ]  # fmt: skip

    monkeypatch.setattr(programs, "measure_worlds", measure)
    found = samestep.benchmark_strong_scaling(worlds=(1, 4), workload="conv", lanes=4, quick=True)
    command, worlds = started[0]
    assert [world.ranks for world in worlds] == [1, 4]
    assert command.name == "bench scaling"
    words = " ".join(command.options)
    assert words.startswith("--mode strong --size small --rounds 3 --variants samestep,ddp")
    assert words.endswith("--most-ranks 4 --workload conv --lanes 4 --quick")
    assert found.keys() == {1, 4}
    assert found[1]["efficiency"] is None
    assert found[4]["efficiency"]["median"] == pytest.approx(9.0 / (4 * 3.0))
    assert found[4]["others"]["ddp"]["efficiency"]["median"] == pytest.approx(0.25)


def test_mistakes_are_named_before_ranks_start() -> None:
    with pytest.raises(PlanError, match="size is 'huge': there are small, medium, large"):
        samestep.benchmark_weak_scaling(size="huge")
    with pytest.raises(PlanError, match="4 ranks need 4 lanes or more"):
        samestep.benchmark_strong_scaling(worlds=(1, 4), lanes=2)
