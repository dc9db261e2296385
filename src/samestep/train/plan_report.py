"""How samples become steps, lanes and ranks: said before the first step, and kept with the run."""

from __future__ import annotations

import json
from typing import Any

import torch

from samestep.checkpoint.resume import ResumePoint, refuse_another_run, warn_of_other_bits
from samestep.config import Config
from samestep.data.batch import Lanes, Source
from samestep.data.map_style import MapSource
from samestep.distributed.context import RunContext
from samestep.optim.precision import Precision


def announce(
    config: Config,
    context: RunContext,
    lanes: Lanes,
    source: Source,
    total: int | None,
    precision: Precision,
    point: ResumePoint | None,
) -> dict[str, Any]:
    """Print and store the plan; refuses to go on from a checkpoint of another one."""
    batch = config.batch_plan(context.world)
    shares = [len(held) for held in lanes.assignment]
    plan = {
        "same": config.same,
        "global_batch": batch.global_batch,
        "lanes": batch.lanes,
        "lane_batch": batch.lane_batch,
        "world": context.world,
        "lanes_per_rank": shares,
        "samples": source.plan.samples if isinstance(source, MapSource) else None,
        "steps": total,
        "device": context.device.type,
        "precision": precision.kind,
        "lane_split": config.memory.lane_split,
        "compiled": config.speed.compile,
        "threads_per_rank": torch.get_num_threads(),
    }
    if point is not None:
        refuse_another_run(config, plan, point)
        warn_of_other_bits(plan, point, context.log.main)
    if context.is_main:
        path = config.run_path / "plan.json"
        path.write_text(json.dumps(plan, indent=2), encoding="utf-8")
    if config.precision == "auto":
        context.log.main(f"precision {precision.kind}: {precision.reason}")
    for line in without_effect(config, precision):
        context.log.main(line)
    of_samples = f"{plan['samples']} samples, " if plan["samples"] else ""
    context.log.main(
        f"Plan: {of_samples}global batch {batch.global_batch} = {batch.lanes} lanes "
        f"x {batch.lane_batch}; {context.world} rank(s) drive "
        f"{'+'.join(map(str, shares))} lanes; {total or 'unknown'} steps; same: {config.same}"
    )
    if config.batch_per_rank is not None:
        context.log.main(
            f"batch_per_rank {config.batch_per_rank} makes this run depend on its "
            f"{context.world} rank(s): another number of ranks is another run"
        )
    return plan


def without_effect(config: Config, precision: Precision) -> list[str]:
    """What the config sets that changes nothing in this run."""
    found = []
    if precision.kind == "tf32" and precision.device.type != "cuda":
        found.append(f"precision: tf32 has no effect on {precision.device}: it computes in fp32")
    if "loss_scale" in config.model_fields_set and config.precision not in ("fp16", "auto"):
        found.append(f"loss_scale has no effect with precision: {config.precision}, only with fp16")
    if "memory" in config.clip.model_fields_set and config.clip.adaptive is None:
        found.append("clip.memory has no effect without clip.adaptive")
    return found
