"""Times a training's steps with several settings, interleaved on the same ranks.

Each turn is a run with a new model in a temporary directory, warmed up before the clock starts. Only one holds
memory at a time.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch

from samestep.bench.document import Document, machine_facts
from samestep.bench.short_runs import Trials, trials
from samestep.bench.tuning.timed import Timed
from samestep.bench.tuning.variants import Variant
from samestep.config import Config, override_config
from samestep.distributed.context import RunContext
from samestep.distributed.timed_calls import synchronize
from samestep.environment.hardware import read_limits
from samestep.errors import OutOfMemory, PlanError, PrecisionError
from samestep.step.run_objects import lonely_samples
from samestep.step.step import Step
from samestep.tracking.progress import CountedProgress
from samestep.tracking.step_times import peak_memory

KIND = "tune"
_WARM_UP = {"cuda": 24}
"""Steps before the clock starts. On a GPU steps run eagerly at first, then are captured as graphs."""
_WARM_UP_ELSEWHERE = 3
_SECONDS = 1.0
"""What the timed steps of a turn take together, about."""
_FEWEST, _MOST = 5, 100
"""Timed steps of a turn."""


def time_variants(
    config: Config, context: RunContext, tried: Sequence[Variant], rounds: int, steps: int | None
) -> Document:
    """Time each variant in rotating order. Every rank calls this and gets the same result.

    Args:
        tried: What is compared; larger ones last, since a process's memory only grows.

    Raises:
        PlanError: The data does not have enough samples, or ends.
    """
    _refuse_widths(config, context, tried)
    configs, failed = _configs_of(config, context.world, tried)
    with (
        trials(config, context) as opened,
        CountedProgress("turn", rounds * len(configs), context.log, context.is_main) as progress,
    ):
        turns = _Turns(opened, steps)
        for number in range(rounds):
            first = number % max(1, len(configs))
            for variant in [*configs][first:] + [*configs][:first]:
                progress.begin(variant.label)
                turns.take(variant, configs[variant])
                progress.add()
    failed |= turns.failed
    rows = [
        Timed(one.label, context.world, failed=failed[one]) if one in failed else turns.timed(one, configs[one])
        for one in tried
    ]
    facts = machine_facts(_described(context), context.hosts)
    return Document(KIND, {**facts, "device_bytes": _memory_of(context.device)}, list(map(asdict, rows)))


def _refuse_widths(config: Config, context: RunContext, tried: Sequence[Variant]) -> None:
    if not any(one.has("speed.parallel_lanes") for one in tried):
        return
    why = ""
    if context.device.type != "cuda":
        why = f"this rank runs on {context.device}, where a rank's lanes run one after the other"
    elif config.speed.graph is False:
        why = "speed.graph is false"
    if why:
        raise PlanError(f"--parallel is about lanes side by side in CUDA graphs, but {why}: leave it out")


def _configs_of(
    config: Config, world: int, tried: Sequence[Variant]
) -> tuple[dict[Variant, Config], dict[Variant, str]]:
    """Return the config of each variant, and why others cannot be run."""
    found: dict[Variant, Config] = {}
    failed: dict[Variant, str] = {}
    for one in tried:
        try:
            changed = override_config(config, one.overrides)
            changed.batch_plan(world)
        except PlanError as error:
            failed[one] = str(error)
        else:
            found[one] = changed
    return found, failed


class _Turn(NamedTuple):
    seconds: float
    """Seconds per step, on the slowest rank."""
    peak_bytes: int
    """Memory of the rank that held most."""


class _Turns:
    """Takes turns on this rank, and keeps what they took."""

    def __init__(self, opened: Trials, steps: int | None) -> None:
        self._opened, self._context, self._steps = opened, opened.context, steps
        self._taken: dict[Variant, list[_Turn]] = {}
        self.failed: dict[Variant, str] = {}
        """Why a variant could not be run."""
        self._notes: dict[Variant, dict[str, None]] = {}

    def take(self, variant: Variant, config: Config) -> None:
        """Time some steps of a variant, unless it could not be run before."""
        if variant in self.failed:
            return
        turn = None
        try:
            turn = self._run(variant, config)
        except OutOfMemory as error:
            if self._context.world > 1:
                raise  # others may have had enough memory, and be waiting for this rank
            self.failed[variant] = str(error).splitlines()[0]
        except PrecisionError as error:  # which all ranks raise alike
            self.failed[variant] = str(error).splitlines()[0]
        except PlanError as error:  # also alike: the data has fewer samples than a larger batch needs
            if not variant.has("global_batch"):
                raise
            self.failed[variant] = str(error).splitlines()[0]
        if turn is None:
            gc.collect()  # what the frames of an exception held
        else:
            ranks = self._context.gather(turn)
            slowest = _Turn(max(r.seconds for r in ranks), max(r.peak_bytes for r in ranks))
            self._taken.setdefault(variant, []).append(slowest)

    def timed(self, variant: Variant, config: Config) -> Timed:
        """Return what was measured of a variant."""
        world, taken = self._context.world, self._taken[variant]
        plan, on_gpu = config.batch_plan(world), self._context.device.type == "cuda"
        # What a process held at most, it never forgets: on a CPU the first turn counts.
        peak = max(t.peak_bytes for t in taken) if on_gpu else taken[0].peak_bytes
        seconds, notes = tuple(turn.seconds for turn in taken), tuple(self._notes.get(variant, {}))
        return Timed(
            variant.label, world, self._context.threads, plan.lane_count, plan.global_batch, seconds, peak, notes=notes
        )

    def _run(self, variant: Variant, config: Config) -> _Turn | None:
        device = self._context.device
        _reset_memory(device)
        with self._opened.run_of(config) as (run, log), self._opened.steps(run) as steps:
            lonely = lonely_samples([run.model], run.batch.lane_batch, 0)
            if lonely:
                self.failed[variant] = lonely
                return None
            seconds = self._time(steps)
            on_gpu = device.type == "cuda"
            peak = torch.cuda.max_memory_reserved(device) if on_gpu else peak_memory(device)
        notes = self._notes.setdefault(variant, {})
        notes |= dict.fromkeys(line for line in log.lines if line.startswith("speed."))
        if config.speed.compile:
            torch.compiler.reset()  # or the shapes of all turns would count against one limit
        return _Turn(seconds, peak)

    def _time(self, steps: Iterator[Step]) -> float:
        """Return the seconds of a step, after a warm-up."""
        device = self._context.device
        warm_up = _WARM_UP.get(device.type, _WARM_UP_ELSEWHERE)
        _advance(steps, warm_up - 2)
        estimate = _seconds_of(steps, 2, device)
        if self._steps is None:
            fitting = round(_SECONDS / estimate)
            self._steps = self._context.broadcast(min(max(fitting, _FEWEST), _MOST))
        return _seconds_of(steps, self._steps, device)


def _advance(steps: Iterator[Step], count: int) -> None:
    for _ in range(count):
        next(steps)


def _seconds_of(steps: Iterator[Step], count: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    _advance(steps, count)
    synchronize(device)
    return (time.perf_counter() - began) / count


def _reset_memory(device: torch.device) -> None:
    if device.type == "cuda":
        # Reserved, not allocated: the memory of graphs is reserved for as long as they live.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _described(context: RunContext) -> str:
    on_gpu = context.device.type == "cuda"
    return torch.cuda.get_device_name(context.device) if on_gpu else str(context.device)


def _memory_of(device: torch.device) -> int:
    """Return the bytes of the memory that a rank computes in."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limit = read_limits().memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return physical if limit is None else min(physical, limit)
