"""Checks of what a config plans, against the world it would run in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from samestep.check.machine.facts import Load
from samestep.check.machine.findings import Finding, failure, note, ok, warning
from samestep.config import Config
from samestep.config.optim import OptimizerConfig, ScheduleConfig
from samestep.config.task_file import look_at_task
from samestep.errors import ConfigError, Mistake, PlanError
from samestep.lanes.plan import deal_lanes
from samestep.optim.optimizers import section_mistakes
from samestep.optim.schedules import build_schedules
from samestep.step.graphs import why_no_graph
from samestep.words import counted

_OF_ONE_RANK = {"distributed": {"rank", "node_rank", "device_ids"}}
"""Keys that ranks started manually must set differently."""


def digest(config: Config) -> str:
    """Return what distinguishes two configs, whatever files they came from."""
    text = config.model_dump_json(exclude=_OF_ONE_RANK)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_plan(config: Config, load: Load) -> list[Finding]:
    """Return whether this world can run the config, and what would make it slow."""
    lanes = check_lanes(config, load.world)
    cost = [] if lanes.severity == "error" else check_lane_cost(config, load)
    return [lanes, *cost, check_task(config), *check_optim(config)]


def check_lanes(config: Config, world: int) -> Finding:
    """Return whether the lanes can be dealt to the ranks, and how evenly."""
    check = "lanes"
    try:
        lane_count = config.lane_count(world)
        assignment = deal_lanes(lane_count, world, config.distributed.lane_weights)
        plan = None if config.leaves_batch_open else config.batch_plan(world)
    except PlanError as error:
        return failure(
            check,
            str(error),
            "training refuses to start",
            "change the number of ranks, or the batch and lanes, accordingly",
        )
    size = "the DataLoader's batch" if plan is None else counted(plan.lane_batch, "sample")
    found = f"{counted(lane_count, 'lane')} of {size}"
    if plan is not None and config.batch_per_rank is not None:
        return note(
            check,
            f"{found}, one batch of {plan.global_batch} on {counted(world, 'rank')}",
            "batch_per_rank makes the batch, and so the run, depend on the number of ranks",
            f"set global_batch: {plan.global_batch} to keep this run at any size",
        )
    counts = [len(lanes) for lanes in assignment]
    if config.distributed.lane_weights is None and min(counts) < max(counts):
        return note(
            check,
            f"{found}: {_most(counts)} a rank",
            "the run is the same, but ranks with fewer lanes wait for the others in every step",
            f"use a number of ranks that divides {lane_count}",
        )
    return ok(check, f"{found}, {_most(counts)} a rank")


def check_lane_cost(config: Config, load: Load) -> list[Finding]:
    """Return whether a GPU runs a rank's lanes one after the other, each with kernels of its own.

    Nothing is measured: which optimizers the task makes, and whether its loss can be captured, is
    known only when it trains.
    """
    lane_count = config.lane_count(load.world)
    each = max(map(len, deal_lanes(lane_count, load.world, config.distributed.lane_weights)))
    device = torch.device(load.device)
    if device.type != "cuda" or each == 1 or config.same == "samples":
        return []
    why = _why_eager(config, device)
    if why is None:
        return [ok("lane cost", f"{each} lanes a rank, in CUDA graphs if the loss can be captured")]
    return [
        warning(
            "lane cost",
            f"{each} lanes a rank, without CUDA graphs: {why}",
            "its lanes run one after the other, and where kernels are small, lanes cost nearly as much "
            "time as whole batches: far more than 1.1 times that of one lane",
            "samestep tune lanes CONFIG measures it and recommends a number of lanes; or let graphs be used "
            "(docs/speed.md)",
        )
    ]


def _why_eager(config: Config, device: torch.device) -> str | None:
    """Return what the config alone says against CUDA graphs; None if nothing does."""
    if config.speed.graph is False:
        return "speed.graph is false"
    return why_no_graph(config, device, [])


def _most(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def check_task(config: Config) -> Finding:
    """Return whether the task's file is there and is Python; it is not run."""
    check, why = "task", "training cannot start without its task"
    found = look_at_task(config)
    if found is None:
        return ok(check, "none: your own loop")
    if found.wrong:
        return failure(check, found.wrong, why, found.advice)
    if not found.is_certain:
        return note(
            check,
            f"{found.path} does not name {found.class_name}, but may get it when it is run",
            why,
            "write FILE.py:Class with a class of that file",
        )
    return ok(check, f"{found.class_name} in {found.path}")


def check_optim(config: Config) -> list[Finding]:
    """Return whether torch takes the optimizer's and the schedule's arguments, found by making them."""
    return [
        *([] if config.optimizer is None else [_check_optimizer(config.optimizer)]),
        *([] if config.schedule is None else [_check_schedule(config.schedule)]),
    ]


def _check_optimizer(section: OptimizerConfig) -> Finding:
    return _of_mistakes("optimizer", section.name, section_mistakes(section))


def _check_schedule(section: ScheduleConfig) -> Finding:
    steps = 2 * (section.warmup if isinstance(section.warmup, int) else 0) + 1000
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    try:
        for schedule in build_schedules(section, [optimizer], steps, steps_per_epoch=steps):
            optimizer.step()
            value: list[Any] = [0.0] if schedule.every == "evaluation" else []
            schedule.scheduler.step(*value)
    except ConfigError as error:
        return _of_mistakes("schedule", section.name, error.mistakes)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        mistake = Mistake("schedule.args", f"{section.name} fails with {section.args}: {error}")
        return _of_mistakes("schedule", section.name, [mistake])
    return ok("schedule", section.name)


def _of_mistakes(check: str, name: str, mistakes: Sequence[Mistake]) -> Finding:
    if not mistakes:
        return ok(check, name)
    found = "; ".join(map(str, mistakes))
    return failure(check, found, "training refuses to start", f"change the {check} section")
