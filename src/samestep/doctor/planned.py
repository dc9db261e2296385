"""Checks of what a config plans, against the world it would run in."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence

from samestep.config import Config
from samestep.doctor.findings import Finding, ok, plural
from samestep.errors import PlanError
from samestep.lanes.plan import deal_lanes

_OF_ONE_RANK = {"distributed": {"rank", "node_rank", "device_ids"}}
"""Keys that ranks started by hand must set differently."""


def digest(config: Config) -> str:
    """What distinguishes two configs, whatever files they came from."""
    text = config.model_dump_json(exclude=_OF_ONE_RANK)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check_plan(config: Config, world: int) -> list[Finding]:
    """Whether this world can run the config."""
    return [check_lanes(config, world), check_task(config)]


def check_lanes(config: Config, world: int) -> Finding:
    """Whether the lanes can be dealt to the ranks, and how evenly."""
    check = "lanes"
    try:
        plan = config.batch_plan(world)
        assignment = deal_lanes(plan.lane_count, world, config.distributed.lane_weights)
    except PlanError as error:
        return Finding(
            check,
            "error",
            str(error),
            "training refuses to start",
            "change the number of ranks, or the batch and lanes, accordingly",
        )
    found = f"{plural(plan.lane_count, 'lane')} of {plural(plan.lane_batch, 'sample')}"
    if config.batch_per_rank is not None:
        return Finding(
            check,
            "note",
            f"{found}, one batch of {plan.global_batch} on {plural(world, 'rank')}",
            "batch_per_rank makes the batch, and so the run, depend on the number of ranks",
            f"set global_batch: {plan.global_batch} to keep this run at any size",
        )
    counts = [len(lanes) for lanes in assignment]
    if config.distributed.lane_weights is None and min(counts) < max(counts):
        return Finding(
            check,
            "note",
            f"{found}: {_most(counts)} a rank",
            "the run is the same, but ranks with fewer lanes wait for the others in every step",
            f"use a number of ranks that divides {plan.lane_count}",
        )
    return ok(check, f"{found}, {_most(counts)} a rank")


def _most(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def check_task(config: Config) -> Finding:
    """Whether the task's file is there and is Python; it is not run."""
    check = "task"
    if config.task is None:
        return ok(check, "none: your own loop")
    name, _, wanted = config.task.rpartition(":")
    path = (config.folder / name).resolve()
    why = "training cannot start without its task"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        advice = (
            "put the file there on every machine, or set task; its path is relative to the config"
        )
        return Finding(check, "error", f"{path}: {reason}", why, advice)
    except SyntaxError as error:
        return Finding(
            check, "error", f"{path}, line {error.lineno}: {error.msg}", why, "fix that line"
        )
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if wanted not in classes:
        return Finding(
            check,
            "note",
            f"{path} defines no class {wanted}; it has {', '.join(classes) or 'none'}",
            f"{why}, unless the file gets the class from elsewhere",
            "write FILE.py:Class with a class of that file",
        )
    return ok(check, f"{wanted} in {path}")
