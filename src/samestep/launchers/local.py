"""Ranks that this command starts on this machine, as plain values. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.config import Config
from samestep.errors import LaunchError
from samestep.plan import deal_lanes
from samestep.runtime.environment import process_environment
from samestep.runtime.hardware import owned_cpus


@dataclass(frozen=True)
class Size:
    """A number, or the fewest and the most of a range."""

    fewest: int
    most: int

    @classmethod
    def parse(cls, text: str, option: str) -> Size:
        """From `4` or `2:4`."""
        parts = text.split(":")
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2):
            raise LaunchError(f"{option} is {text!r}: give a number, or a range such as 2:4")
        fewest, most = numbers[0], numbers[-1]
        if fewest < 1:
            raise LaunchError(f"{option} is {text}: start at least one rank")
        if most < fewest:
            raise LaunchError(f"{option} is {text}: the first number of a range is the smaller one")
        return cls(fewest, most)

    @property
    def is_range(self) -> bool:
        return self.fewest != self.most

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}" if self.is_range else str(self.most)


@dataclass(frozen=True)
class LocalLaunch:
    """Processes to start on this machine, one per rank."""

    nproc: int
    """Ranks on this machine."""
    arguments: tuple[str, ...]
    """After the Python interpreter."""
    folder: Path
    """Where the ranks' output goes."""
    threads: int
    """For each rank."""
    patience: float
    """Seconds the ranks get to save and stop after a signal."""
    quiet: bool = False
    """Whether rank 0's output goes to its file as well, and not to the terminal."""
    min_nproc: int = 1
    """Ranks that must be left when lost ones are left out."""
    max_restarts: int = 0
    nodes: tuple[int, int] | None = None
    """The fewest and the most machines that take part, if there are others."""
    rendezvous: str = ""
    """HOST:PORT where the machines meet."""
    run_id: str = ""
    """What the machines of one run know each other by."""

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, *self.arguments)


def local_launch(
    config: Config,
    config_file: Path,
    overrides: Sequence[str],
    nproc: int | Size,
    *,
    nodes: Size | None = None,
    rendezvous: str = "",
    max_restarts: int = 0,
    record: Path | None = None,
    stop_after: int | None = None,
    quiet: bool = False,
) -> LocalLaunch:
    """The processes that train a config on `nproc` ranks of this machine, and of other ones."""
    section = config.distributed
    ranks = nproc if isinstance(nproc, Size) else Size(nproc, nproc)
    _check(config, ranks, nodes, rendezvous, max_restarts)
    # --launched: the launcher shows a rank's failure, so the rank itself need not.
    arguments = ["-m", "samestep", "train", str(config_file), *overrides, "--launched"]
    if record is not None:
        arguments += ["--record", str(record)]
    if stop_after is not None:
        arguments += ["--stop-after", str(stop_after)]
    if section.launch_method == "torch.distributed.launch":
        arguments.append("--local-rank=${local_rank}")
    asked = section.threads_per_rank
    # Of the most ranks, so that the same threads, and bits, stay when some are lost.
    threads = (
        max(1, owned_cpus(process_environment()).value // ranks.most) if asked == "auto" else asked
    )
    return LocalLaunch(
        nproc=ranks.most,
        arguments=tuple(arguments),
        folder=config.run_path / "launch",
        threads=threads,
        patience=max(30.0, section.timeout),
        quiet=quiet,
        min_nproc=ranks.fewest,
        max_restarts=max_restarts,
        nodes=None if nodes is None else (nodes.fewest, nodes.most),
        rendezvous=rendezvous,
        run_id=f"samestep-{config.name}",
    )


def _check(
    config: Config, ranks: Size, nodes: Size | None, rendezvous: str, max_restarts: int
) -> None:
    section, most = config.distributed, ranks.most
    if most < 1:
        raise LaunchError(f"--nproc is {ranks}: start at least one rank")
    if ranks.is_range and nodes is not None:
        raise LaunchError(
            f"--nproc is {ranks} beside --nodes {nodes}: give a range for one of them"
        )
    if ranks.is_range and not max_restarts:
        raise LaunchError(
            f"--nproc is {ranks}, but no rank can be left out without a restart: add --max-restarts"
        )
    if (ranks.is_range or nodes is not None) and config.batch_per_rank is not None:
        raise LaunchError(
            "batch_per_rank makes the run depend on the number of ranks, which may change here: set "
            "global_batch instead"
        )
    if nodes is not None and config.resume.checkpoint == "never":
        raise LaunchError(
            "resume: never would begin anew whenever a node comes or goes: give the run another name"
        )
    if nodes is not None and not rendezvous:
        raise LaunchError(
            f"--nodes is {nodes} but nothing says where they meet: add --rendezvous HOST:PORT"
        )
    if nodes is None and rendezvous:
        raise LaunchError("--rendezvous is for several machines: add --nodes, such as --nodes 1:2")
    if section.num_nodes not in ("auto", 1) and nodes is None:
        raise LaunchError(
            f"distributed.num_nodes is {section.num_nodes}, but without --nodes samestep launch "
            "starts ranks on this machine only: add --nodes and --rendezvous"
        )
    if section.world_size not in ("auto", most) or (
        section.world_size != "auto" and (ranks.is_range or nodes is not None)
    ):
        raise LaunchError(
            f"distributed.world_size is {section.world_size} but --nproc is {ranks}: "
            "make them the same, or set world_size: auto"
        )
    if section.enabled is False and (most > 1 or nodes is not None):
        raise LaunchError(
            f"distributed.enabled is false but --nproc is {ranks}: set enabled: auto, or --nproc 1"
        )
    world = most * (1 if nodes is None else nodes.most)
    deal_lanes(config.batch_plan(world).lanes, world, section.lane_weights)


def default_nproc(config: Config, device_count: int) -> int:
    """How many ranks to start when nobody said: as the config says, or one per GPU."""
    section = config.distributed
    for said in (section.world_size, section.num_gpus_per_node):
        if said != "auto":
            return said
    if section.device_ids is not None:
        return len(section.device_ids)
    return max(1, device_count) if section.device != "cpu" else 1
