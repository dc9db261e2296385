"""Times the steps of a task at several numbers of lanes, in turns on the same ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.errors import PlanError
from samestep.lane_tuning.choices import Choice, Comparison
from samestep.lane_tuning.result import Measured
from samestep.lane_tuning.turns import Turns, take_turns
from samestep.words import counted


def measure_lanes(config: Config, context: RunContext, compared: Comparison) -> list[Measured]:
    """Time a task's steps for each choice; every rank calls this and gets the same result.

    Args:
        config: The training's config.
        context: This process's place in the run.
        compared: What is compared.

    Raises:
        PlanError: if this device or data cannot measure it.
    """
    _refuse_widths(config, context, compared)
    choices = compared.choices(context.world)
    turns = take_turns(
        config, context, choices, partial(with_choice, config), compared.rounds, compared.steps
    )
    return [_measured(config, context, turns, choice) for choice in choices]


def _refuse_widths(config: Config, context: RunContext, compared: Comparison) -> None:
    if not compared.parallel:
        return
    if context.device.type != "cuda":
        raise PlanError(
            f"--parallel is about lanes side by side in CUDA graphs, but this rank runs on "
            f"{context.device}, where a rank's lanes run one after the other: leave it out"
        )
    if config.speed.graph is False:
        raise PlanError(
            "--parallel is about lanes side by side in CUDA graphs, but speed.graph is false: set "
            "speed.graph=auto, or leave out --parallel"
        )


def with_choice(config: Config, choice: Choice) -> Config:
    """The config with a choice's lanes, and how many of them are side by side.

    Args:
        config: The training's config.
        choice: What is timed.
    """
    speed = config.speed
    if choice.parallel is not None:
        speed = speed.model_copy(update={"parallel_lanes": choice.parallel})
    return config.model_copy(update={"lanes": choice.lanes, "speed": speed})


def _measured(
    config: Config, context: RunContext, turns: Turns[Choice], choice: Choice
) -> Measured:
    """Everything about a choice."""
    plan = with_choice(config, choice).batch_plan(context.world)
    found = Measured(
        context.world, plan.lane_count, plan.lane_batch, described(context), choice.parallel
    )
    if choice in turns.failed:
        return replace(found, failed=turns.failed[choice])
    taken = turns.taken[choice]
    peaks = [turn.peak_bytes for turn in taken if turn.peak_bytes is not None]
    return replace(
        found,
        seconds=tuple(turn.seconds for turn in taken),
        peak_bytes=max(peaks, default=None),
        notes=turns.notes(choice),
    )


def described(context: RunContext) -> str:
    """What a rank computes on."""
    if context.device.type == "cuda":
        return torch.cuda.get_device_name(context.device)
    return f"{context.device}, {counted(context.threads, 'thread')}"
