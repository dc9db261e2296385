"""Ranks on this machine: what to start, as plain values. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.config import Config
from samestep.errors import LaunchError
from samestep.plan import deal_lanes
from samestep.runtime.environment import owned_cpus


@dataclass(frozen=True)
class LocalLaunch:
    """Processes to start on this machine, one per rank."""

    nproc: int
    arguments: tuple[str, ...]
    """After the Python interpreter."""
    folder: Path
    """Where the ranks' output goes."""
    threads: int
    """For each rank."""
    quiet: bool = False
    """Whether rank 0's output goes to its file as well, and not to the terminal."""

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, *self.arguments)


def local_launch(
    config: Config,
    config_file: Path,
    overrides: Sequence[str],
    nproc: int,
    *,
    record: Path | None = None,
    quiet: bool = False,
) -> LocalLaunch:
    """The processes that train a config on `nproc` ranks of this machine."""
    section = config.distributed
    if nproc < 1:
        raise LaunchError(f"--nproc is {nproc}: start at least one rank")
    if section.num_nodes not in ("auto", 1):
        raise LaunchError(
            f"distributed.num_nodes is {section.num_nodes}, but samestep launch starts ranks on "
            "this machine: run torchrun on each node, with samestep train as its program"
        )
    if section.world_size not in ("auto", nproc):
        raise LaunchError(
            f"distributed.world_size is {section.world_size} but --nproc is {nproc}: "
            "make them the same, or set world_size: auto"
        )
    if section.enabled is False and nproc > 1:
        raise LaunchError(
            f"distributed.enabled is false but --nproc is {nproc}: set enabled: auto, or --nproc 1"
        )
    deal_lanes(config.batch_plan(nproc).lanes, nproc, section.lane_weights)
    # --launched: the launcher shows a rank's failure, so the rank itself need not.
    arguments = ["-m", "samestep", "train", str(config_file), *overrides, "--launched"]
    if record is not None:
        arguments += ["--record", str(record)]
    if section.launch_method == "torch.distributed.launch":
        arguments.append("--local-rank=${local_rank}")
    asked = section.threads_per_rank
    threads = max(1, owned_cpus().value // nproc) if asked == "auto" else asked
    return LocalLaunch(nproc, tuple(arguments), config.run_path / "launch", threads, quiet)


def default_nproc(config: Config, device_count: int) -> int:
    """How many ranks to start when nobody said: as the config says, or one per GPU."""
    section = config.distributed
    for said in (section.world_size, section.num_gpus_per_node):
        if said != "auto":
            return said
    if section.device_ids is not None:
        return len(section.device_ids)
    return max(1, device_count) if section.device != "cpu" else 1
