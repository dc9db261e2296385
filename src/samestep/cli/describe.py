"""Decisions and their reasons, as rows for a person to read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samestep.config import Config, DistributedConfig, read_config
from samestep.distributed.placement import Placement, decide_placement
from samestep.distributed.quick_hardware import quick_hardware
from samestep.environment.launch import LaunchFacts, detect_launch
from samestep.environment.variables import process_environment


def describe_environment() -> list[tuple[Any, ...]]:
    """(fact, value, reason) for the launcher, this process's place, and the machine."""
    environ = process_environment()
    hardware, launch = quick_hardware(environ), detect_launch(environ)
    place = decide_placement(DistributedConfig(), hardware, launch)
    rows: list[tuple[Any, ...]] = [
        ("launcher", launch.launcher, launch.reasons["launcher"]),
        ("platform", hardware.platform.value, hardware.platform.reason),
        ("host", hardware.host, "its host name"),
        ("cuda", hardware.cuda.value, hardware.cuda.reason),
        ("gpus", ", ".join(hardware.devices) or "none", hardware.cuda.reason),
        ("cpus", hardware.cpus.value, hardware.cpus.reason),
        ("backends", ", ".join(hardware.backends), "what this torch is built with"),
        ("local_rank", place.local_rank.value, place.local_rank.reason),
    ]
    return rows + [(key.removeprefix("distributed."), *rest) for key, *rest in place.rows()]


def describe_config(file: Path, overrides: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return (key, value, origin, reason) for every key, with `auto` resolved on this process.

    On a machine without torch, such as a login node, `auto` stays.

    Raises:
        ConfigError: with every mistake at once.
    """
    loaded = read_config(file, overrides)
    environ, config = process_environment(), loaded.config
    launch = detect_launch(environ)
    place: Placement | None = None
    with suppress(ModuleNotFoundError):
        place = decide_placement(config.distributed, quick_hardware(environ), launch, config.same)
    world = launch.world if place is None else place.world.value
    resolved = {} if place is None else {key: (value, reason) for key, value, reason in place.rows()}
    rows: list[tuple[Any, ...]] = []
    for key, value, origin in loaded.rows():
        if value == "auto" and key in resolved:
            found, reason = resolved[key]
            rows.append((key, found, _origin(key, launch), reason))
        elif key == "lanes" and value is None:
            rows.append((key, config.lane_count(world), "default", _lane_size(config, world)))
        elif key == "run_dir" and value is None:
            rows.append((key, str(config.run_path), "default", "runs/<name>"))
        else:
            rows.append((key, value, origin, None))
    return rows


def _lane_size(config: Config, world: int) -> str:
    if config.leaves_batch_open:
        return "equal parts of the DataLoader's batch"
    return f"{config.batch_plan(world).lane_batch} samples per lane"


def _origin(key: str, launch: LaunchFacts) -> str:
    """Return whether an `auto` was resolved from launch variables or from the machine."""
    by_launch = ("world_size", "rank", "num_nodes", "node_rank", "num_gpus_per_node", "master_")
    by_launcher = key.removeprefix("distributed.").startswith(by_launch)
    return "environment" if launch.external and by_launcher else "detected"
