"""Bytes of a step, read from a meter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samestep.bench.document import Document
from samestep.bench.memory import _measured, possible_lanes
from samestep.bench.memory_meter import StepMemory, TensorMeter
from samestep.bench.memory_report import present, verdicts
from samestep.config import Config, load_config
from samestep.errors import PlanError


def config(**changes: Any) -> Config:
    return load_config({"global_batch": 24, "lanes": 1, "steps": 1, **changes})


def test_a_meter_counts_what_is_new_and_alive_and_nothing_twice() -> None:
    before, meter = torch.zeros(1000), TensorMeter()
    with meter:
        made = before + 1
        view = made.view(10, 100)
        assert meter.held() == 4000
        assert meter.size_of({"x": [view, before]}) == 4000
        temporary = torch.zeros(500)
        del temporary
        assert (meter.held(), meter.peak()) == (4000, 6000)
        meter.restart()
        del made
        assert (meter.held(), meter.peak()) == (4000, 4000), "the view keeps it"
        del view
        assert meter.held() == 0


def test_levels_tell_activations_from_gradients() -> None:
    """Four lanes of 50 that leave gradients of 100: one, one, then two sets are kept between lanes."""
    levels = StepMemory(before_forward=[1000, 1100, 1100, 1200], after_forward=[1050, 1150, 1150, 1250], end=1100)
    assert levels.activations == 50
    assert levels.gradients(by_tree=True) == 300
    assert levels.gradients(by_tree=False) == 200
    assert StepMemory(before_forward=[10], after_forward=[15], end=110).gradients(by_tree=True) == 100


def test_the_rank_that_holds_most_counts() -> None:
    assert _measured([[10, 11, 12], [20, 30, 25]]) == {"measured_bytes": 25, "low": 10, "high": 30}
    assert _measured([[None]])["measured_bytes"] is None


def test_lanes_that_do_not_divide_the_batch_are_left_out() -> None:
    assert possible_lanes(config(), 2, (1, 2, 4, 8)) == [1, 2, 4]
    with pytest.raises(PlanError, match=r"\(7 per rank, on 2 ranks\) divides a global_batch of 24"):
        possible_lanes(config(), 2, (7,))


PART = {"world": 2, "backend": "gloo", "part": "total", "low": 1 << 20, "high": 1 << 20}
ONE = {**PART, "lanes_per_rank": 1, "measured_bytes": 1 << 20}
EIGHT = {**PART, "lanes_per_rank": 8, "measured_bytes": 3 << 19}
LEAK = {
    "memory": "host", "steps": 200, "slope_bytes_per_step": 65536.0, "low": 65000.0,
    "high": 66000.0, "leaks": True, "rank": 1, "host": "node-b",
}  # fmt: skip


def test_verdicts_name_what_lanes_cost_and_who_leaks() -> None:
    found = verdicts([EIGHT, ONE], [{"world": 2, "leak": LEAK}])
    assert found[0].startswith("On 2 ranks, 8 lanes a rank hold 1.50x what 1 hold")
    assert found[1].startswith("LEAK: rank 1 of 2 on node-b (memory: host) grows by 64 KB with every step")
    fine = verdicts([ONE], [{"world": 2, "leak": {**LEAK, "leaks": False}}])
    assert fine == ["No rank's memory grows with the steps, over 200 steps."]


def test_parts_are_shown_as_a_table_and_over_lanes() -> None:
    machine = {"hosts": ["a"], "device": "cpu", "task": "Mlp"}
    shown = present(Document("memory", machine, [ONE, EIGHT]))
    assert shown.tables[0].rows[0] == ("total", "2", "1", "1 MB", "1 MB - 1 MB")
    assert [table.title for table in shown.tables] == ["What is held"]
    assert len(shown.panels) == 1
