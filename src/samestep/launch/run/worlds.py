"""Worlds that a command starts one after the other, each with its launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar, get_args

from samestep.config import Config
from samestep.config.distributed import DistributedConfig
from samestep.distributed.signals import stopping_at_once
from samestep.environment.launch import LaunchMethod
from samestep.errors import LaunchError, PlanError
from samestep.lanes.plan import MOST_LANES
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Host, Size, parse_hosts
from samestep.launch.run.launches import Launch, start
from samestep.launch.run.prepare import LaunchRequest, prepare
from samestep.parsing.limits import short
from samestep.parsing.numbers import whole_number
from samestep.words import counted

T = TypeVar("T")
LAUNCHERS: tuple[LaunchMethod, ...] = ("torchrun", "mpirun", "slurm", "ssh")


@dataclass(frozen=True)
class World:
    """A number of ranks, and the launcher that starts them."""

    ranks: int
    via: LaunchMethod = "torchrun"
    shard: str | None = None
    """In place of the config's `distributed.shard`; None for that."""

    @property
    def label(self) -> str:
        """The number of ranks, with the launcher unless it is torchrun, and what they shard."""
        via = "" if self.via == "torchrun" else f" {self.via}"
        return f"{self.ranks}{via}{'' if self.shard in (None, 'none') else f' {self.shard}'}"


@dataclass(frozen=True)
class Machines:
    """The machines that ranks may run on, besides this one."""

    nodes: int = 1
    """The most nodes that a Slurm job may use."""
    hosts: tuple[str, ...] = ()
    """Host names, for mpirun and ssh."""

    @classmethod
    def parse(cls, nodes: int, hosts: str) -> Machines:
        """Parse a number of nodes, and hosts as `a,b`."""
        return cls(nodes, tuple(host.name for host in parse_hosts(hosts, None)) if hosts else ())

    def spread(self, ranks: int) -> str:
        """Return the hosts with their shares of the ranks, such as `a:2,b:1`; larger shares first, and no
        more hosts than ranks."""
        names = self.hosts[:ranks]
        shares = [ranks // len(names) + (at < ranks % len(names)) for at in range(len(names))]
        return ",".join(str(Host(n, share)) for n, share in zip(names, shares, strict=True))


def parse_worlds(text: str, via: str = "torchrun") -> list[World]:
    """Parse world sizes such as `1,2@mpirun,4@slurm`.

    Raises:
        LaunchError: for anything else, or a size given twice.
    """
    if via not in LAUNCHERS:
        raise LaunchError(f"--via is {via}: several world sizes are started by {', '.join(LAUNCHERS)}")
    worlds = []
    for part in text.split(","):
        ranks, at, named = part.strip().partition("@")
        launcher = next((one for one in LAUNCHERS if one == (named if at else via)), None)
        number = whole_number(ranks)
        if number is None or launcher is None:
            raise LaunchError(
                f"--worlds is {text!r}: give numbers of ranks, such as 1,2,4, or with launchers "
                f"({', '.join(LAUNCHERS)}) as 1,2@mpirun,4@slurm"
            )
        worlds.append(World(number, launcher))
    if min(world.ranks for world in worlds) < 1 or len(set(worlds)) != len(worlds):
        raise LaunchError(f"--worlds is {text!r}: give different numbers, each at least 1")
    return worlds


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """Different whole numbers such as `1,2,4`, from the command line, in order."""
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    found = sorted(number for number in numbers if number is not None)
    if len(found) < len(numbers) or not 1 <= found[0] <= found[-1] <= MOST_LANES:
        raise PlanError(f"{option} is {short(repr(text))}: give numbers from 1 on, such as 1,2,4")
    if len(set(found)) < len(found):
        raise PlanError(f"{option} is {short(repr(text))}: give different numbers")
    return tuple(found)


def refuse_fixed_world(config: Config, ranks_here: int, worlds: Sequence[int] = ()) -> None:
    """Refuse to start ranks for a config of another world, or as a rank of another launcher.

    Args:
        worlds: The numbers of ranks that are started; empty for several.
    """
    if ranks_here > 1:
        raise LaunchError(
            f"this process is one of {ranks_here} ranks already, and the command starts ranks by itself: start it "
            "alone, without a launcher"
        )
    fixed = config.distributed.world_size
    if fixed != "auto" and set(worlds) != {fixed}:
        raise LaunchError(
            f"distributed.world_size is {fixed}, but other numbers of ranks are measured: pass "
            "distributed.world_size=auto"
        )


def with_shards(worlds: Sequence[World], shards: str) -> list[World]:
    """Return the worlds with each value of `distributed.shard`; one rank has nothing to shard.

    Args:
        shards: Values such as `none,optimizer`; empty for the config's.
    """
    names = [name.strip() for name in shards.split(",")] if shards else []
    known = get_args(DistributedConfig.model_fields["shard"].annotation)
    if len(set(names)) != len(names) or not set(names) <= set(known):
        raise LaunchError(f"--shards is {shards!r}: give some of {', '.join(known)}, each once")
    if not names:
        return list(worlds)
    several = [world for world in worlds if world.ranks > 1]
    first = [replace(world, shard=names[0]) for world in worlds]
    return [*first, *(replace(world, shard=name) for name in names[1:] for world in several)]


def launch_of(world: World, rank_command: RankCommand, machines: Machines) -> Launch:
    """Return the launch of one size."""
    ranks = Size(world.ranks, world.ranks)
    if world.via == "slurm":
        nodes = max(n for n in range(1, machines.nodes + 1) if world.ranks % n == 0)
        each = world.ranks // nodes
        return prepare(rank_command, LaunchRequest(nodes=Size(nodes, nodes), nproc=Size(each, each)))
    if world.via == "ssh" and not machines.hosts:
        raise LaunchError("a world @ssh needs the machines: add --hosts a,b")
    if world.via in ("mpirun", "ssh") and machines.hosts:
        return prepare(rank_command, LaunchRequest(hosts=machines.spread(world.ranks)))
    return prepare(rank_command, LaunchRequest(nproc=ranks))


def measure_each(
    worlds: Sequence[World],
    ranks_of: Callable[[World, Path], RankCommand],
    read: Callable[[Path], T],
    machines: Machines,
    report: Callable[[str], None],
) -> list[T]:
    """Start the ranks of each world, one after the other, and read what its rank 0 wrote."""
    # Other machines see the working directory, as they must for a training, and not this one's /tmp.
    here = all(world.via == "torchrun" for world in worlds)
    with (
        stopping_at_once("the measurement", report) as check_stop,
        TemporaryDirectory(
            prefix="samestep-measuring-", dir=None if here else Path.cwd(), ignore_cleanup_errors=True
        ) as folder,
    ):
        found = []
        for world in worlds:
            report(f"measuring on {counted(world.label, 'rank')}")
            result = Path(folder) / f"world-{world.ranks}.json"
            ranks = ranks_of(world, result)
            start(launch_of(world, ranks, machines), report, follow=True, quiet=True)
            check_stop()
            found.append(read(result))
        return found


def labels(worlds: Sequence[World]) -> str:
    """Return the label of a run that is resumed at each of these sizes in turn."""
    return "→".join(world.label for world in worlds)
