"""Places the runs of a sweep: on this machine, on hosts, in jobs, or in an allocation's steps.

How many trials run side by side, and with which ranks and threads, is decided once, before the first trial.
Nothing of it changes what a trial comes to. A run is one `samestep launch` wherever it is: a child of the sweep's
process, which ends with it, and takes its ranks with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from samestep.config import Config
from samestep.distributed.placement import chosen_threads, share_of_a_rank
from samestep.distributed.quick_hardware import quick_hardware
from samestep.environment.fact import Fact
from samestep.environment.hardware import expects_gpu
from samestep.environment.launch import requested_threads
from samestep.errors import LaunchError, Mistake
from samestep.launch.commands.size import Host, parse_hosts
from samestep.launch.commands.torchrun import default_nproc
from samestep.sweep.run_spec import RunSpec, override
from samestep.sweep.schema import SweepConfig
from samestep.words import counted


@dataclass(frozen=True)
class Place:
    """The share of one trial, of those side by side, in some machines."""

    options: tuple[str, ...] = ()
    """Options of `samestep launch`."""
    overrides: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    """Those of this machine that it sees, and none of another's; all if nothing is shared out."""


@dataclass(frozen=True)
class ResourcePlan:
    """Trials on the GPUs or CPUs of this machine, or elsewhere."""

    parallel: int
    """Trials side by side."""
    ranks: int
    """Ranks per trial."""
    threads: int
    """Threads per rank."""
    via: str | None = None
    places: tuple[Place, ...] = (Place(),)
    """For each of the trials side by side, or one for all."""
    summary: str = ""
    """All of it in a line, with what is too much."""

    def placed(self, spec: RunSpec, slot: int) -> RunSpec:
        """Return a run in the place of one of the trials side by side."""
        place = self.places[slot % len(self.places)]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {}
        launch = ("--via", self.via, *place.options) if self.via else ()
        return replace(spec, variables=variables, overrides=(*spec.overrides, *place.overrides), launch=launch)


def pack(sweep: SweepConfig, base: Config, trials: int, environ: Mapping[str, str]) -> ResourcePlan:
    """Share this machine out to trials.

    Raises:
        LaunchError: if more GPUs are needed than there are.
    """
    hardware = quick_hardware(environ)
    gpus = 0 if base.distributed.device == "cpu" else hardware.device_count
    ranks = _ranks(sweep, base, gpus)
    threads = rank_threads(base, hardware.cpus, ranks, environ)
    fits = gpus // ranks if gpus else hardware.cpus.value // (ranks * threads.value)
    if sweep.parallel == "auto":
        rounds = sweep.round if sweep.deterministic else trials
        parallel = max(1, min(fits, rounds, trials))
    else:
        parallel = sweep.parallel
    if gpus and parallel * ranks > gpus:
        raise LaunchError(
            f"parallel is {parallel} with {counted(ranks, 'rank')} for each trial, and there are {gpus} GPUs: set "
            f"parallel: {max(1, fits)}, or ranks_per_trial: {max(1, gpus // parallel)}"
        )
    named = environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = named.split(",") if named else [str(number) for number in range(gpus)]
    places: tuple[Place, ...] = (Place(_options(sweep, base, ranks)),)
    if gpus and parallel > 1:
        shares = (tuple(devices[slot * ranks : (slot + 1) * ranks]) for slot in range(parallel))
        places = tuple(replace(places[0], gpus=share) for share in shares)
    summary = _summary(parallel, ranks, threads, hardware.cpus, gpus)
    return ResourcePlan(parallel, ranks, threads.value, sweep.via, places, summary)


def rank_threads(base: Config, cpus: Fact[int], ranks: int, environ: Mapping[str, str]) -> Fact[int]:
    """Return the threads of each rank of a run, as the run itself will choose them."""
    section = base.distributed
    on_cpu = section.device == "cpu" or not expects_gpu(environ)
    chosen = chosen_threads(section, requested_threads(environ), on_cpu, base.same)
    return chosen or share_of_a_rank(cpus, None, ranks)


def _ranks(sweep: SweepConfig, base: Config, gpus: int) -> int:
    if sweep.ranks_per_trial == "all":
        return default_nproc(base, gpus)
    if sweep.ranks_per_trial != "auto":
        return sweep.ranks_per_trial
    world = base.distributed.world_size
    return 1 if world == "auto" else world


def _summary(parallel: int, ranks: int, threads: Fact[int], cpus: Fact[int], gpus: int) -> str:
    """One line: what runs at once, and whether that is more than there is."""
    needed = parallel * ranks * threads.value
    line = (
        f"{counted(parallel, 'trial')} side by side, {counted(ranks, 'rank')} each, {counted(threads.value, 'thread')} each rank "
        f"({threads.reason})"
    )
    if gpus:
        line += f", on {parallel * ranks} of {gpus} GPUs"
    if needed <= cpus.value:
        return f"{line}: {needed} of {cpus.value} CPUs"
    fix = max(1, cpus.value // (parallel * ranks))
    return (
        f"{line}: {needed} threads on {cpus.value} CPUs ({cpus.reason}), so that they wait for each other. Set "
        f"distributed.threads_per_rank: {fix} in the base" + ("" if parallel == 1 else ", or a lower parallel")
    )


_BY_SLURM = ("slurm", "srun")
_BY_HOSTS = ("mpirun", "ssh")


def allocate(sweep: SweepConfig, base: Config, trials: int, environ: Mapping[str, str]) -> ResourcePlan:
    """Return how many trials run side by side, and with how many ranks, wherever they run."""
    if sweep.runs_here:
        return pack(sweep, base, trials, environ)
    ranks = ranks_of(sweep, base)
    # Slurm places them: as many as may know nothing of each other.
    places = _hosted(sweep, base, ranks) if sweep.hosts else (Place(_options(sweep, base, ranks)),)
    fits = len(places) if sweep.hosts else sweep.round
    parallel = min(fits, sweep.round, trials) if sweep.parallel == "auto" else sweep.parallel
    summary = f"{counted(parallel, 'trial')} side by side, {counted(ranks, 'rank')} each, by {sweep.via}"
    return ResourcePlan(parallel, ranks, 1, sweep.via, places, summary)


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
        return (*each, "--own-job") if sweep.via == "slurm" else each
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
