"""Reports how samples become steps, lanes and ranks, before the first step; kept with the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.files import write_whole
from samestep.checkpoint.ownership import reraise_os_errors
from samestep.checkpoint.resume import ResumePoint, refuse_another_run, warn_of_other_bits
from samestep.config import Config
from samestep.data.batch import Source
from samestep.optim.precision import Precision
from samestep.run_setup import RunSetup
from samestep.step.run_objects import has_batchnorm, lonely_samples
from samestep.words import counted

_ENOUGH = 32
"""Samples from which on BatchNorm has hardly another training on a lane than on a batch."""


def report_plan(
    setup: RunSetup,
    source: Source,
    total: int | None,
    point: ResumePoint | None,
    modules: Sequence[nn.Module],
    shard: str = "",
) -> dict[str, Any]:
    """Print and store the plan; refuses to resume from a checkpoint of another one."""
    config, context, batch, precision = setup.config, setup.context, setup.batch, setup.precision
    shares = [len(lanes) for lanes in setup.assignment.by_rank]
    plan: dict[str, Any] = {
        "same": config.same,
        "global_batch": batch.global_batch,
        "lanes": batch.lane_count,
        "lane_batch": batch.lane_batch,
        "world": context.world,
        "lanes_per_rank": shares,
        "samples": source.samples,
        "steps": total,
        "device": context.device.type,
        "precision": precision.kind,
        "deterministic": config.deterministic,
        "lane_split": config.memory.lane_split,
        "compiled": _compiled(config),
        "threads_per_rank": torch.get_num_threads(),
    }
    if config.platform_notes:
        plan["platform"] = list(config.platform_notes)
    if point is not None:
        refuse_another_run(config, plan, point)
        warn_of_other_bits(plan, point, context.log.main)
    if context.is_main:
        with reraise_os_errors(config.run_path):
            write_whole(config.run_path / "plan.json", json.dumps(plan, indent=2))
    for line in _remarks(config, precision, shard):
        context.log.main(line)
    of_samples = f"{plan['samples']} samples, " if plan["samples"] else ""
    context.log.main(
        f"Plan: {of_samples}global batch {batch.global_batch} = {batch.lane_count} lanes "
        f"x {batch.lane_batch} samples; {counted(context.world, 'rank')} drive{'s' * (context.world == 1)} "
        f"{'+'.join(map(str, shares))} lanes; {total or 'unknown'} steps; same: {config.same}"
    )
    _warn_of_lonely_samples(setup, source, modules)
    if config.batch_per_rank is not None:
        context.log.main(
            f"batch_per_rank {config.batch_per_rank} makes this run depend on its "
            f"{counted(context.world, 'rank')}: another number of ranks is another run"
        )
    return plan


def _remarks(config: Config, precision: Precision, shard: str) -> list[str]:
    """Return what was decided here, and what changes nothing."""
    shares = [f"Shard: {shard}"] if shard else []
    if config.distributed.shard == "weights" and shard and precision.kind in ("bf16", "fp16"):
        unless = "" if config.memory.checkpoint else ", and until the backward pass unless memory.checkpoint names them"
        shares.append(f"Shard: a pass keeps {precision.kind} copies of its blocks' weights{unless}")
    decided = [f"precision {precision.kind}: {precision.reason}"] * (config.precision == "auto")
    return [*config.platform_notes, *decided, *shares, *without_effect(config, precision)]


def _warn_of_lonely_samples(setup: RunSetup, source: Source, modules: Sequence[nn.Module]) -> None:
    config, context, size = setup.config, setup.context, setup.batch.lane_batch
    if config.batchnorm == "global":
        return
    samples, steps = source.samples or 0, source.steps_per_epoch or 0
    # By what an epoch reads: a DataLoader's drop_last is not the config's.
    tail = samples % size if steps * setup.batch.global_batch >= samples else 0
    lonely = lonely_samples(modules, size, tail)
    if lonely:
        context.log.main(f"Warning: {lonely}")
    elif setup.batch.lane_count > 1 and size < _ENOUGH and any(map(has_batchnorm, modules)):
        context.log.main(
            f"BatchNorm normalises over a lane's {size} samples. For more samples set fewer lanes (lanes=...), or "
            f"batchnorm=global for all {setup.batch.global_batch} of the global batch"
        )


def without_effect(config: Config, precision: Precision) -> list[str]:
    """Return what the config sets that changes nothing in this run."""
    found = []
    if precision.kind == "tf32" and precision.device.type != "cuda":
        found.append(f"precision: tf32 has no effect on {precision.device}: it computes in fp32")
    # Overrides set every key: what is at its default has not been asked for.
    if config.loss_scale != type(config.loss_scale)() and config.precision not in ("fp16", "auto"):
        found.append(f"loss_scale has no effect with precision: {config.precision}, only with fp16")
    if config.clip.memory != type(config.clip)().memory and config.clip.adaptive is None:
        found.append("clip.memory has no effect without clip.adaptive")
    return found


def _compiled(config: Config) -> Any:
    """Return what is compiled, with the names of blocks: others round differently."""
    blocks = config.distributed.shard_blocks
    return ["blocks", *blocks] if config.speed.compile == "blocks" else config.speed.compile
