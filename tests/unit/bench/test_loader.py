"""Whether data is the bottleneck, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.document import Document
from samestep.bench.loader import steps_of_a_turn
from samestep.bench.loader_report import Reading, present, recommended, settings, verdict


def test_workers_read_while_a_step_computes() -> None:
    alone = Reading(0, 0, data=4.0, rest=1.0)
    assert (alone.step, alone.is_bottleneck) == (5.0, True)
    assert Reading(2, 2, data=1.05, rest=1.0).step == 1.05
    assert not Reading(2, 2, data=1.05, rest=1.0).is_bottleneck
    assert Reading(2, 2, data=1.2, rest=1.0).is_bottleneck
    assert not Reading(0, 0, data=0.09, rest=1.0).is_bottleneck


def test_the_fewest_workers_that_are_as_fast_are_recommended() -> None:
    readings = [
        Reading(0, 0, data=4.0, rest=1.0),
        Reading(1, 2, data=4.1, rest=1.0),
        Reading(2, 2, data=1.08, rest=1.0),
        Reading(2, 4, data=1.0, rest=1.0),
        Reading(4, 2, data=0.5, rest=1.0),
    ]
    assert recommended(readings) is readings[2]
    assert recommended(readings).overrides == ["loader.workers=2", "loader.prefetch=2"]
    quick = [Reading(0, 0, data=0.05, rest=1.0), Reading(4, 2, data=0.01, rest=1.0)]
    assert recommended(quick).overrides == ["loader.workers=0"]


def test_without_workers_nothing_is_read_ahead() -> None:
    assert settings((0, 2), (2, 4)) == [(0, 0), (2, 2), (2, 4)]


@pytest.mark.parametrize(("seconds", "steps"), [(0.05, 10), (10.0, 3), (1e-6, 100), (0.0, 100)])
def test_a_turn_takes_half_a_second(seconds: float, steps: int) -> None:
    assert steps_of_a_turn(seconds) == steps


def row(workers: int, prefetch: int, data: float, **fields: Any) -> dict[str, Any]:
    rest = {"median": 0.1, "low": 0.1, "high": 0.1}
    spread = {"median": data, "low": data, "high": data, "seconds": [data] * 3}
    return {
        "workers": workers, "prefetch": prefetch, "world": 2, "step_seconds": rest, **spread,
        "bottleneck": False, "recommended": False, **fields,
    }  # fmt: skip


def test_the_verdict_has_the_figures_and_what_to_set() -> None:
    rows = [row(0, 0, 0.41, bottleneck=True), row(2, 2, 0.11, recommended=True)]
    assert verdict(rows) == (
        "On 2 ranks data takes 4.1x the rest of a step (410 ms against 100 ms) with no workers; with 2 "
        "worker(s) 1.1x, no longer the bottleneck. Set loader.workers=2 loader.prefetch=2: a step then "
        "takes about 110 ms instead of 510 ms."
    )
    fine = verdict([row(0, 0, 0.005, recommended=True), row(2, 2, 0.02)])
    assert fine.endswith("are no faster, it is no bottleneck. Set loader.workers=0.")
    shown = present(Document("loader", {"hosts": ["a"], "device": "cpu", "task": "T"}, rows))
    assert shown.tables[0].rows[0][-2:] == ("4.10", "bottleneck")
    assert shown.verdicts == [verdict(rows)]
