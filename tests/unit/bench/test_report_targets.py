"""Targets, each by figures that were computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samestep.bench.report.results import Machine, machines_of
from samestep.bench.report.targets import FAIL, PASS, UNKNOWN, Target, targets_of
from tests.unit.bench.results import figure, leak, machine, scaling

WEAK, STRONG, STRONGER, NODES, GLOO, NCCL, AMP, DDP, LEAK = range(9)


def judged(found: Machine, which: int) -> Target:
    return targets_of([found])[which]


def one(which: int, *rows: dict[str, Any], **facts: Any) -> Target:
    return judged(machine("scaling", rows, **facts), which)


def test_nothing_measured_is_not_measurable_and_says_what_to_measure() -> None:
    found = targets_of([machine("comm", [])])
    assert [target.state for target in found] == [UNKNOWN] * 9
    assert found[WEAK].why == ("no result of samestep bench scaling --mode weak with several ranks")
    assert "over nccl" in found[NCCL].why
    assert "samestep bench memory" in found[LEAK].why


@pytest.mark.requirement("003-T5-13", "003-SC-5", "004-SM-2")
@pytest.mark.parametrize(
    ("efficiency", "strong", "stronger", "undecided"),
    [
        (figure(0.88, 0.86, 0.9), PASS, PASS, False),
        (figure(0.83, 0.82, 0.86), PASS, FAIL, True),
        (figure(0.80, 0.80, 0.80), FAIL, FAIL, False),
        (figure(0.79, 0.75, 0.82), FAIL, FAIL, True),
    ],
)
def test_efficiency_must_be_above_its_limit_and_a_range_that_holds_it_is_named(
    efficiency: dict[str, float], strong: str, stronger: str, undecided: bool
) -> None:
    row = scaling(4, 0.3, efficiency=efficiency)
    at_80, at_85 = one(STRONG, row), one(STRONGER, row)
    assert (at_80.state, at_85.state) == (strong, stronger)
    assert at_80.limit == "> 80 %"
    assert at_85.limit == "> 85 %"
    assert ("more rounds would decide" in at_80.why + at_85.why) is undecided


def test_of_several_measurements_the_worst_decides() -> None:
    rows = [
        scaling(1, 1.0, mode="weak"),
        scaling(2, 1.0, mode="weak", efficiency=figure(0.99)),
        scaling(4, 1.0, mode="weak", workload="conv", efficiency=figure(0.5, 0.4, 0.6)),
    ]
    found = one(WEAK, *rows)
    assert found.state == FAIL
    assert found.figure == "50 % (40 to 60)"
    assert found.why == "worst of 2, of which 1 meet it: conv, weak, 4 ranks, gloo"


def test_other_variants_meet_no_target() -> None:
    row = scaling(4, 0.3, variant="ddp", efficiency=figure(0.99))
    assert one(STRONG, row).state == UNKNOWN


def test_ranks_that_share_cores_or_a_gpu_measure_no_efficiency() -> None:
    row = scaling(4, 0.3, efficiency=figure(0.4))
    on_two_cores = one(STRONG, row, cpus=2)
    assert on_two_cores.state == UNKNOWN
    assert on_two_cores.why == "4 ranks shared 2 core(s)"
    on_a_gpu = one(STRONG, row, device="cuda:0")
    assert on_a_gpu.why == "4 ranks without nccl may share a GPU"
    assert one(STRONG, {**row, "backend": "nccl"}, device="cuda:0").state == FAIL


def test_cores_of_several_machines_add_up() -> None:
    ranks = [{"rank": rank, "host": f"node{rank // 2}"} for rank in range(4)]
    row = scaling(4, 0.3, efficiency=figure(0.9), ranks=ranks)
    assert one(STRONG, row, cpus=2, hosts=["node0", "node1"]).state == PASS


def on_four_hosts(seconds: float) -> dict[str, Any]:
    ranks = [{"rank": rank, "host": f"node{rank}"} for rank in range(4)]
    return scaling(4, seconds, ranks=ranks)


@pytest.mark.requirement("002-B-1")
def test_four_nodes_are_two_times_as_fast_as_one() -> None:
    """1 s against 0.4 s of the same batch: 2.5 times; the range from 0.99 / 0.404 to 1.01 / 0.396."""
    found = one(NODES, scaling(1, 1.0), on_four_hosts(0.4))
    assert found.state == PASS
    assert found.figure == "2.500 x (2.450 to 2.551)"
    assert one(NODES, scaling(1, 1.0), on_four_hosts(0.6)).state == FAIL
    other_batch = scaling(1, 1.0, global_batch=32)
    assert one(NODES, other_batch, on_four_hosts(0.4)).state == UNKNOWN
    assert one(NODES, scaling(1, 1.0), on_four_hosts(0.4), device="cuda:0").state == UNKNOWN


@pytest.mark.requirement("002-B-2")
@pytest.mark.parametrize(("exchange", "state"), [(0.02, PASS), (0.09, PASS), (0.11, FAIL)])
def test_the_exchange_has_a_share_of_a_step(exchange: float, state: str) -> None:
    """Of 0.3 s."""
    phases = {"exchange": figure(exchange), "compute": figure(0.2)}
    found = one(GLOO, scaling(4, 0.3, phases=phases))
    assert found.state == state
    assert found.measured is not None
    assert found.measured.median == pytest.approx(exchange / 0.3)
    assert one(NCCL, scaling(4, 0.3, phases=phases)).state == UNKNOWN


@pytest.mark.requirement("003-X-3")
def test_amp_is_compared_with_fp32_on_gpus_only() -> None:
    """2 s against 1 s."""
    rows = [scaling(1, 2.0), scaling(1, 1.0, precision="bf16")]
    on_gpu = one(AMP, *rows, device="cuda:0")
    assert on_gpu.state == PASS
    assert on_gpu.figure.startswith("2.000 x")
    on_cpu = one(AMP, *rows)
    assert on_cpu.state == UNKNOWN
    assert "here 2.000 x" in on_cpu.why


@pytest.mark.parametrize(("ratio", "state"), [(1.02, PASS), (1.021, FAIL), (0.9, PASS)])
def test_a_step_takes_at_most_as_long_as_ddps(ratio: float, state: str) -> None:
    assert one(DDP, scaling(1, 1.0, ratio_to_ddp=figure(ratio))).state == state


def test_a_leak_is_named_with_its_rank() -> None:
    rows = [leak(2.0, -1.0, 5.0, False), leak(4096.0, 4000.0, 4200.0, True, rank=1)]
    found = judged(machine("memory", rows), LEAK)
    assert found.state == FAIL
    assert found.figure == "4 KB a step (3.91 KB to 4.1 KB)"
    assert found.why == "rank 1 on node1, 2000 steps"
    assert judged(machine("memory", rows[:1]), LEAK).state == PASS


@pytest.mark.requirement("003-T5-13")
def test_every_machine_has_every_target() -> None:
    results = machine("scaling", [scaling(1, 1.0)]).results
    other = machine("scaling", [scaling(1, 1.0)], cpus=4).results
    machines = machines_of([*results, *other])
    found = targets_of(machines)
    assert [target.machine for target in found[:2]] == ["16 cpus", "4 cpus"]
    assert len(found) == 18
    assert replace(found[0], machine="").as_json()["state"] == UNKNOWN
