"""Places the runs of a sweep: on this machine, on hosts, in jobs, or in an allocation's steps.

A run is one `samestep launch` wherever it is: a child of the sweep's process, which ends with it, and takes
its ranks with it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.config import Config
from samestep.errors import LaunchError, Mistake
from samestep.launch.commands.size import Host, parse_hosts
from samestep.sweep.children import Child, Children
from samestep.sweep.resource_plan import ResourcePlan, pack
from samestep.sweep.run_spec import RunSpec, override
from samestep.sweep.schema import SweepConfig
from samestep.words import counted

_BY_SLURM = ("slurm", "srun")
_BY_HOSTS = ("mpirun", "ssh")


@dataclass(frozen=True)
class Place:
    """The share of one trial, of those side by side, in some machines."""

    options: tuple[str, ...]
    """Of `samestep launch`."""
    overrides: tuple[str, ...] = ()


class Places:
    """The places where the trials of a sweep run."""

    def __init__(self, sweep: SweepConfig, base: Config, ranks: int) -> None:
        self._via = sweep.via
        self._places = _hosted(sweep, base, ranks) if sweep.hosts else ()
        self._anywhere = Place(_options(sweep, base, ranks))

    def placed(self, spec: RunSpec, slot: int) -> RunSpec:
        """Return a run in its place."""
        if self._via is None:
            return spec
        place = self._places[slot] if self._places else self._anywhere
        overrides = (*spec.overrides, *place.overrides)
        return replace(spec, overrides=overrides, launch=("--via", self._via, *place.options))

    def end(self, child: Child, children: Children) -> None:
        """End a run that takes too long."""
        if self._via == "slurm":
            child.process.send_signal(signal.SIGTERM)  # it cancels its job, which Slurm kills
        else:
            children.end(child)


def allocate(sweep: SweepConfig, base: Config, trials: int, environ: Mapping[str, str]) -> ResourcePlan:
    """Return how many trials run side by side, and with how many ranks, wherever they run."""
    if sweep.runs_here:
        return pack(sweep, base, trials, environ)
    ranks = ranks_of(sweep, base)
    # Slurm places them: as many as may know nothing of each other.
    fits = len(_hosted(sweep, base, ranks)) if sweep.hosts else sweep.round
    parallel = min(fits, sweep.round, trials) if sweep.parallel == "auto" else sweep.parallel
    summary = f"{counted(parallel, 'trial')} side by side, {counted(ranks, 'rank')} each, by {sweep.via}"
    return ResourcePlan(parallel, ranks, threads=1, summary=summary)


def ranks_of(sweep: SweepConfig, base: Config) -> int:
    """Ranks of each trial elsewhere: as the sweep says, or its base, or the GPUs of its job."""
    if isinstance(sweep.ranks_per_trial, int):
        return sweep.ranks_per_trial
    if base.distributed.world_size != "auto":
        return base.distributed.world_size
    if sweep.via in _BY_SLURM:
        return (base.launch.slurm.gpus_per_node or 1) * (_asked_nodes(sweep, base) or 1)
    return 1


def _asked_nodes(sweep: SweepConfig, base: Config) -> int | None:
    if sweep.nodes_per_trial != "auto":
        return sweep.nodes_per_trial
    return None if base.distributed.num_nodes == "auto" else base.distributed.num_nodes


def _nodes(sweep: SweepConfig, base: Config, ranks: int) -> int:
    """Nodes of each trial: as the sweep says, or its base, or as few as have enough GPUs."""
    asked, gpus = _asked_nodes(sweep, base), base.launch.slurm.gpus_per_node
    return asked or (1 if gpus is None else -(-ranks // gpus))


def _options(sweep: SweepConfig, base: Config, ranks: int) -> tuple[str, ...]:
    if sweep.via in _BY_SLURM:
        nodes = _nodes(sweep, base, ranks)
        each = ("--nodes", str(nodes), "--nproc", str(ranks // nodes))
        return (*each, "--held") if sweep.via == "slurm" else each
    return ("--nproc", str(ranks))


def _hosted(sweep: SweepConfig, base: Config, ranks: int) -> tuple[Place, ...]:
    """Return the places that hosts have: parts of one host, or whole hosts, so that GPUs can be distinguished."""
    hosts = parse_hosts(sweep.hosts or "", None)
    if any(host.ranks is None for host in hosts):
        raise LaunchError("hosts need their numbers of ranks, as a:4,b:4")
    if all((host.ranks or 0) < ranks for host in hosts):
        return tuple(Place(("--hosts", ",".join(map(str, some)))) for some in _whole(hosts, ranks))
    found = []
    for host in hosts:
        total = host.ranks or 0
        for first in range(0, total - ranks + 1, ranks):
            gpus = ",".join(str(number) for number in range(first, first + ranks))
            shares = base.distributed.device != "cpu" and total >= 2 * ranks
            own = (override("launch.environment.CUDA_VISIBLE_DEVICES", gpus),) if shares else ()
            found.append(Place(("--hosts", str(Host(host.name, ranks))), own))
    return tuple(found)


def _whole(hosts: Sequence[Host], ranks: int) -> Iterator[tuple[Host, ...]]:
    some: tuple[Host, ...] = ()
    for host in hosts:
        some = (*some, host)
        total = sum(one.ranks or 0 for one in some)
        if total > ranks:
            raise LaunchError(
                f"{','.join(map(str, some))} have {total} ranks, and a trial takes {ranks}: trials take whole "
                "hosts, or parts of one host"
            )
        if total == ranks:
            yield some
            some = ()


def via_mistakes(sweep: SweepConfig, base: Config) -> Iterator[Mistake]:
    """Yield what the keys about machines have that does not fit together."""
    via, slurm = sweep.via, base.launch.slurm
    if sweep.hosts is not None and via not in _BY_HOSTS:
        yield Mistake("hosts", "are for via: mpirun and via: ssh, which start ranks on them")
    if sweep.hosts is None and via == "ssh":
        yield Mistake("via", "ssh must know the machines: set hosts, such as a:4,b:4")
    if sweep.nodes_per_trial != "auto" and via not in _BY_SLURM:
        yield Mistake("nodes_per_trial", "is for via: slurm and via: srun")
    if sweep.ranks_per_trial == "all" and not sweep.runs_here:
        yield Mistake("ranks_per_trial", f"all is about this machine: set a number with via: {via}")
    ranks = ranks_of(sweep, base)
    if via in _BY_SLURM:
        nodes = _nodes(sweep, base, ranks)
        if ranks % nodes:
            yield Mistake("ranks_per_trial", f"is {ranks}, which {nodes} nodes cannot share evenly")
        elif slurm.gpus_per_node not in (None, ranks // nodes):
            yield Mistake(
                "ranks_per_trial",
                f"makes {ranks // nodes} ranks on each of {nodes} node(s), and launch.slurm.gpus_per_node is "
                f"{slurm.gpus_per_node}: one rank drives one GPU",
            )
        if slurm.array is not None:
            yield Mistake("base", "has launch.slurm.array: the trials are the jobs, leave it out")
    if sweep.hosts is not None and via in _BY_HOSTS:
        try:
            places = len(_hosted(sweep, base, ranks))
        except LaunchError as error:
            yield Mistake("hosts", str(error))
            return
        if places < (1 if sweep.parallel == "auto" else sweep.parallel):
            yield Mistake(
                "parallel",
                f"is {sweep.parallel}, and {sweep.hosts} has places for {counted(places, 'trial')} of {counted(ranks, 'rank')}",
            )
