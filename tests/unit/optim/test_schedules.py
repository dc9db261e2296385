"""Learning rates at every step, against formulas; warm-up under each; what is refused."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch._dynamo  # which the first optimizer imports, and which sets an environment variable
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

from samestep.config.optim import ScheduleConfig
from samestep.errors import ConfigError
from samestep.optim.schedules import build_schedules, describe_schedule

FULL = (2.0, 0.5)
"""The rates of two groups."""


def two_groups() -> SGD:
    groups = [{"params": [Parameter(torch.ones(1))], "lr": rate} for rate in FULL]
    return SGD(groups, momentum=0.9)


def move_on(schedules: Any, optimizer: SGD, step: int, per_epoch: int, metrics: Any) -> None:
    """What the loop does after a step."""
    optimizer.step()
    for item in schedules:
        if item.every == "step":
            item.scheduler.step()
    if (step + 1) % per_epoch == 0:
        for item in schedules:
            if item.every == "epoch":
                item.scheduler.step()
        for item in schedules:
            if item.every == "evaluation":
                item.scheduler.step(metrics(step // per_epoch))


def shares(steps: int = 20, per_epoch: int = 5, metrics: Any = lambda epoch: 1.0, **section: Any) -> list[float]:
    """The share of the full rate in each step; of both groups, which must be the same."""
    optimizer = two_groups()
    schedules = build_schedules(ScheduleConfig(**section), [optimizer], steps, per_epoch)
    found = []
    for step in range(steps):
        first, second = (g["lr"] / full for g, full in zip(optimizer.param_groups, FULL, strict=True))
        assert first == pytest.approx(second)
        found.append(first)
        move_on(schedules, optimizer, step, per_epoch, metrics)
    return found


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12)


def rise(length: int) -> list[float]:
    return [(n + 1) / (length + 1) for n in range(length)]


def half_cosine(gone: float) -> float:
    return (1 + math.cos(math.pi * gone)) / 2


AFTER_4 = {
    "constant": ({}, [1.0] * 16),
    "linear": ({}, [1 - n / 16 for n in range(16)]),
    "linear to a tenth": ({"name": "linear", "final": 0.1}, [1 - 0.9 * n / 16 for n in range(16)]),
    "cosine": ({}, [half_cosine(n / 16) for n in range(16)]),
    "cosine to a fifth": ({"name": "cosine", "final": 0.2}, [0.2 + 0.8 * half_cosine(n / 16) for n in range(16)]),
    "warm_restarts": (
        {"args": {"T_0": 3, "T_mult": 2}},
        [half_cosine(x) for x in (0, 1 / 3, 2 / 3, 0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6)]
        + [half_cosine(n / 12) for n in range(7)],
    ),
    "step by steps": (
        {"name": "step", "every": "step", "args": {"step_size": 5, "gamma": 0.5}},
        [0.5 ** (n // 5) for n in range(16)],
    ),
    "ExponentialLR by steps": (
        {"name": "exponentiallr", "every": "step", "args": {"gamma": 0.9}},
        [0.9**n for n in range(16)],
    ),
    "CosineAnnealingLR by steps": (
        {"name": "CosineAnnealingLR", "every": "step", "args": {"T_max": 16}},
        [half_cosine(n / 16) for n in range(16)],
    ),
}


@pytest.mark.parametrize("case", AFTER_4)
@pytest.mark.parametrize("warmup", [4, 0.2])
def test_a_curve_by_steps_begins_after_the_warm_up(case: str, warmup: float) -> None:
    section, curve = AFTER_4[case]
    found = shares(20, **{"name": case, "warmup": warmup, **section})
    assert found == close(rise(4) + curve)


@pytest.mark.parametrize("case", AFTER_4)
def test_a_curve_without_warm_up(case: str) -> None:
    section, curve = AFTER_4[case]
    assert shares(16, **{"name": case, **section}) == close(curve)


BY_EPOCHS = {
    "step": ({"args": {"step_size": 2, "gamma": 0.1}}, [1, 1, 0.1, 0.1]),
    "MultiStepLR": ({"args": {"milestones": [1, 3], "gamma": 0.5}}, [1, 0.5, 0.5, 0.25]),
    "cosine": ({"every": "epoch"}, [half_cosine(n / 4) for n in range(4)]),
    "linear": ({"every": "epoch", "final": 0.2}, [1, 0.8, 0.6, 0.4]),
    "warm_restarts": ({"every": "epoch", "args": {"T_0": 2}}, [1, 0.5, 1, 0.5]),
    "plateau": ({"args": {"patience": 0, "factor": 0.5}}, [1, 1, 0.5, 0.25]),
    "ReduceLROnPlateau": ({"final": 0.4, "args": {"patience": 0, "factor": 0.5}}, [1, 1, 0.5, 0.4]),
}


@pytest.mark.parametrize("case", BY_EPOCHS)
@pytest.mark.parametrize("warmup", [0, 3, 7])
def test_a_curve_by_epochs_or_evaluations_is_lowered_by_the_warm_up(case: str, warmup: int) -> None:
    """The metric never gets better, so that a plateau without patience always goes down."""
    section, curve = BY_EPOCHS[case]
    factor = rise(warmup) + [1.0] * (20 - warmup)
    wanted = [factor[n] * curve[n // 5] for n in range(20)]
    assert shares(20, 5, **{"name": case, "warmup": warmup, **section}) == close(wanted)


def test_a_plateau_follows_the_metric_in_its_direction() -> None:
    better = [1.0, 2.0, 3.0, 3.0]
    optimizer = two_groups()
    section = ScheduleConfig(name="plateau", args={"patience": 0})
    (schedule,) = build_schedules(section, [optimizer], 20, 5, mode="max")
    assert schedule.every == "evaluation"
    rates = []
    for value in better:
        schedule.scheduler.step(value)  # type: ignore[arg-type]
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [2.0, 2.0, 2.0, pytest.approx(0.2)]


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"pct_start": 0.45, "div_factor": 10.0, "final_div_factor": 100.0},
        {"anneal_strategy": "linear"},
        {"three_phase": True},
        {"three_phase": True, "anneal_strategy": "linear", "pct_start": 0.4},
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 37])
def test_one_cycle_is_that_of_torch_and_leaves_momentum(args: Any, steps: int) -> None:
    optimizer = two_groups()
    theirs = OneCycleLR(optimizer, list(FULL), steps, cycle_momentum=False, **args)
    wanted = []
    for _ in range(steps):
        wanted.append(optimizer.param_groups[0]["lr"] / FULL[0])
        optimizer.step()
        theirs.step() if len(wanted) < steps else None
    assert shares(steps, name="one_cycle", args=args) == close(wanted)


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_no_scheduler_of_torch_changes_momentum(name: str) -> None:
    args = {"OneCycleLR": {"max_lr": 1.0, "total_steps": 20}, "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0}}
    optimizer = two_groups()
    (schedule,) = build_schedules(ScheduleConfig(name=name, args=args[name]), [optimizer], 20, 5)
    assert schedule.every == "step"
    for step in range(20):
        move_on([schedule], optimizer, step, 5, None)
        assert all(group["momentum"] == 0.9 for group in optimizer.param_groups)


def test_rates_past_the_end_stay_at_the_end() -> None:
    optimizer = two_groups()
    for name in ("linear", "cosine", "one_cycle"):
        schedules = build_schedules(ScheduleConfig(name=name), [optimizer], 3, 3)
        for step in range(6):
            move_on(schedules, optimizer, step, 3, None)
        assert 0 <= optimizer.param_groups[0]["lr"] < 1e-4
        optimizer = two_groups()


CASES_OF_STATE = [
    {"name": "cosine", "warmup": 4},
    {"name": "plateau", "warmup": 7, "args": {"patience": 0}},
    {"name": "step", "warmup": 3, "args": {"step_size": 1}},
    {"name": "exponentiallr", "args": {"gamma": 0.9}},
    {"name": "one_cycle"},
]


@pytest.mark.parametrize("section", CASES_OF_STATE, ids=lambda section: section["name"])
@pytest.mark.parametrize("stop", [2, 6, 11])
def test_a_schedule_goes_on_from_its_state(section: dict[str, Any], stop: int) -> None:
    wanted = [FULL[0] * share for share in shares(20, 5, **section)]
    first = two_groups()
    schedules = build_schedules(ScheduleConfig(**section), [first], 20, 5)
    for step in range(stop):
        move_on(schedules, first, step, 5, lambda epoch: 1.0)
    file = io.BytesIO()
    torch.save([first.state_dict(), *(item.scheduler.state_dict() for item in schedules)], file)
    file.seek(0)
    saved, *states = torch.load(file, weights_only=True)
    second = two_groups()
    schedules = build_schedules(ScheduleConfig(**section), [second], 20, 5)
    second.load_state_dict(saved)
    for item, state in zip(schedules, states, strict=True):
        item.scheduler.load_state_dict(state)
    found = []
    for step in range(stop, 20):
        found.append(second.param_groups[0]["lr"])
        move_on(schedules, second, step, 5, lambda epoch: 1.0)
    assert found == close(wanted[stop:])


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    parameter = Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(1.0), foreach=False)
    rate = optimizer.param_groups[0]["lr"]
    schedules = build_schedules(ScheduleConfig(name="linear", warmup=1), [optimizer], 3, 3)
    found = []
    for step in range(3):
        assert optimizer.param_groups[0]["lr"] is rate
        assert all(schedule.scheduler.get_last_lr() == [float(rate)] for schedule in schedules)
        found.append(float(rate))
        move_on(schedules, optimizer, step, 3, None)
    assert found == [0.5, 1.0, 0.5]


def test_after_the_warm_up_rates_are_exactly_the_full_ones() -> None:
    assert shares(6, name="constant", warmup=3)[3:] == [1.0] * 3


def test_all_mistakes_are_told_at_once() -> None:
    section = ScheduleConfig(name="one_cycle", warmup=3, final=0.5, args={"pct": 1})
    with pytest.raises(ConfigError) as caught:
        build_schedules(section, [two_groups()], 20, 5)
    assert len(caught.value.mistakes) == 3


@pytest.mark.parametrize(
    ("section", "steps", "words"),
    [
        ({"name": "cosine"}, None, "set steps, or steps_per_epoch"),
        ({"name": "constant", "warmup": 0.1}, None, "set steps, or steps_per_epoch"),
        ({"name": "linear", "every": "epoch"}, 10, "set steps_per_epoch"),
        ({"name": "constant", "warmup": 10}, 10, "10 steps are not fewer than the run's 10"),
        ({"name": "step", "args": {"step_size": 0}}, 10, "step_size is 0"),
    ],
)
def test_a_length_that_is_unknown_or_too_short(section: Any, steps: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_schedules(ScheduleConfig(**section), [two_groups()], steps, None)


def test_what_needs_no_length_does_without() -> None:
    for section in ({"name": "constant", "warmup": 5}, {"name": "step", "args": {"step_size": 2}}):
        assert build_schedules(ScheduleConfig(**section), [two_groups()], None, None)
    assert build_schedules(ScheduleConfig(name="constant"), [two_groups()], None, None) == []


def test_a_schedule_tells_its_pace() -> None:
    section = ScheduleConfig(name="cosine", warmup=0.1)
    schedules = build_schedules(section, [two_groups(), two_groups()], 50, 10)
    told = describe_schedule(section, schedules)
    assert told == "cosine, moving on with every step, after 5 steps of warm-up"
