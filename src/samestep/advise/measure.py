"""Times a training's steps with other settings, in turns, on the ranks that are there."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samestep import pytree
from samestep.advise.plan import Variant
from samestep.bench.document import Document, machine_facts
from samestep.bench.statistics import spread_of
from samestep.config import Config, override_config
from samestep.distributed.context import RunContext
from samestep.environment.cgroups import read_limits
from samestep.errors import PlanError, PrecisionError
from samestep.lane_tuning.turns import Turns, take_turns
from samestep.train.step_times import peak_memory
from samestep.train.task import load_task

KIND = "advise"


def measure_variants(
    config: Config, context: RunContext, tried: Sequence[Variant], rounds: int, steps: int | None
) -> Document:
    """Time each variant; every rank calls this and gets the same.

    Args:
        config: The training's config.
        context: This process's place among the ranks.
        tried: What is compared; larger ones last, since a process's memory only grows.
        rounds: Turns of each.
        steps: Timed steps of a turn; by default about a second's.
    """
    configs: dict[Variant, Config] = {}
    impossible: dict[Variant, str] = {}
    for one in tried:
        try:
            configs[one] = override_config(config, one.overrides)
            configs[one].batch_plan(context.world)
        except PlanError as error:
            impossible[one] = str(error)
    possible = [one for one in tried if one not in impossible]
    peaks: dict[Variant, int] = {}
    turns: Turns[Variant] = take_turns(
        config, context, possible, configs.__getitem__, rounds, steps,
        refused=(PrecisionError,), after=lambda one: _keep_peak(peaks, one, context),
    )  # fmt: skip
    rows = [
        _row(one, configs[one], context, turns, peaks.get(one))
        if one in configs and one not in impossible
        else {"variant": one.label, "world": context.world, "failed": impossible[one]}
        for one in tried
    ]
    hosts = context.gather(socket.gethostname())
    facts = machine_facts(str(context.device), hosts)
    return Document(KIND, {**facts, **_sizes(config, context.device)}, rows)


def _keep_peak(peaks: dict[Variant, int], one: Variant, context: RunContext) -> None:
    peaks.setdefault(one, max(context.gather(peak_memory(context.device))))


def _row(
    one: Variant, config: Config, context: RunContext, turns: Turns[Variant], peak: int | None
) -> dict[str, Any]:
    shared = {
        "variant": one.label,
        "world": context.world,
        "threads": context.threads,
        "lanes": config.lane_count(context.world),
        "global_batch": config.batch_plan(context.world).global_batch,
    }
    if one in turns.failed:
        return {**shared, "failed": turns.failed[one]}
    seconds = [turn.seconds for turn in turns.taken[one]]
    spread = spread_of(seconds)
    figures = {"median": spread.median, "low": spread.low, "high": spread.high}
    return {**shared, "seconds": seconds, **figures, "peak_bytes": peak}


def _sizes(config: Config, device: torch.device) -> dict[str, Any]:
    """Of the data, of this machine's memory, and of what a rank computes in; None if it is not known."""
    data = load_task(config).train_data()
    samples = len(data) if hasattr(data, "__len__") else None
    sample_bytes = None
    if samples and hasattr(data, "__getitem__"):
        found = pytree.leaves(data[0])
        sample_bytes = sum(one.nbytes for one in found if isinstance(one, Tensor))
    limit = read_limits().memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = physical if limit is None else min(physical, limit)
    on_gpu = device.type == "cuda"
    return {
        "samples": samples,
        "sample_bytes": sample_bytes or None,
        "memory_bytes": memory,
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else memory,
    }
