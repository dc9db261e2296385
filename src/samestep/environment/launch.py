"""This process's place in the run, from the variables of its launcher.

A mapping goes in, frozen facts come out, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from samestep.environment.fact import Fact
from samestep.environment.node_lists import expand_counts, expand_hosts, rendezvous_ports
from samestep.environment.variables import LAUNCH_ID
from samestep.errors import LaunchError
from samestep.parsing.limits import short
from samestep.parsing.numbers import signed_number, whole_number

LaunchMethod = Literal["torchrun", "torch.distributed.launch", "mpirun", "slurm", "srun", "ssh"]
"""What starts the ranks of a run."""


@dataclass(frozen=True)
class _Launcher:
    """The variables in which one launcher gives a process its place; the first one set counts."""

    name: str
    rank: str
    world: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    only_with: str = ""


_LAUNCHERS = (
    _Launcher(
        "environment",
        rank="RANK",
        world=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nodes=("GROUP_WORLD_SIZE",),
    ),
    _Launcher(
        "openmpi",
        rank="OMPI_COMM_WORLD_RANK",
        world=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "mvapich2",
        rank="MV2_COMM_WORLD_RANK",
        world=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "mpich",
        rank="PMI_RANK",
        world=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        local_world=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    # An sbatch script or salloc shell already has SLURM_NTASKS and SLURM_PROCID; only a
    # process that srun started has a step. Without one, waiting for ranks would never end.
    _Launcher(
        "slurm",
        rank="SLURM_PROCID",
        world=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        only_with="SLURM_STEP_ID",
    ),
)


@dataclass(frozen=True)
class LaunchFacts:
    """This process's place in the run, as its launcher set it."""

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    nodes: int
    master_addr: str | None
    master_port: int | None
    reasons: Mapping[str, str]
    more_ports: tuple[int, ...] = ()
    """Where rank 0 listens if the first port is taken."""
    job: str | None = None
    """What all ranks of one launch share, and no two launches do; None if nothing is set."""
    cpus_per_rank: Fact[int] | None = None
    """The CPUs that the launcher reserved for each rank, if it set that."""
    threads: Fact[int] | None = None
    """The threads of each rank that the environment requests, if it does."""

    @property
    def local_world_is_guessed(self) -> bool:
        """Return whether no variable gives the number of ranks on this machine."""
        return self.reasons["local_world"] == _GUESSED

    @property
    def external(self) -> bool:
        """Return whether something outside started this process as a rank."""
        return self.launcher != "none"


def detect_launch(environ: Mapping[str, str]) -> LaunchFacts:
    """This process's place in the run, by the first launcher whose variables are set."""
    for launcher in _LAUNCHERS:
        if launcher.rank in environ and (not launcher.only_with or launcher.only_with in environ):
            return _LaunchVariables(environ, launcher).facts()
    _refuse_world_without_rank(environ, _LAUNCHERS[0])
    reason = "no launcher's variables are set"
    if "SLURM_JOB_ID" in environ:
        reason = "inside a Slurm allocation but not in a step: srun did not start this process"
    names = ("launcher", "rank", "world", "local_rank", "local_world", "node_rank", "nodes")
    reasons, threads = dict.fromkeys(names, reason), requested_threads(environ)
    return LaunchFacts("none", 0, 1, 0, 1, 0, 1, None, None, reasons, threads=threads)


def requested_threads(environ: Mapping[str, str]) -> Fact[int] | None:
    """Return the threads that OMP_NUM_THREADS requests for a process; None if nobody set it.

    torchrun sets it to 1 where nobody did: that is nobody's request.
    """
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0].strip()  # the rest is for nested regions, which torch has not
    number = whole_number(first)
    if not number:
        return None
    if first == "1" and "TORCHELASTIC_RUN_ID" in environ:
        return None
    return Fact(number, f"OMP_NUM_THREADS={text}")


def _refuse_world_without_rank(environ: Mapping[str, str], launcher: _Launcher) -> None:
    if environ.get("PMIX_RANK", "0") != "0":
        raise LaunchError(
            f"PMIX_RANK={environ['PMIX_RANK']} means that this is one of several ranks, but their "
            "number is not set: start with srun, mpirun or torchrun, or set RANK and WORLD_SIZE"
        )
    world = environ.get(launcher.world[0])
    if world not in (None, "", "1"):
        raise LaunchError(
            f"{launcher.world[0]}={world} is set but {launcher.rank} is not: a rank must know "
            f"its number. Unset {launcher.world[0]} for a single process, or start the ranks "
            "with samestep launch or torchrun"
        )


_GUESSED = "no variable gives it: assumed to be all ranks"


class _LaunchVariables:
    """The facts that a launcher's variables give, each with its reason."""

    def __init__(self, environ: Mapping[str, str], launcher: _Launcher) -> None:
        self.environ = environ
        self.launcher = launcher
        self.reasons = {"launcher": f"{launcher.rank} is set"}

    def facts(self) -> LaunchFacts:
        source = self.launcher
        rank = self._must("rank", (source.rank,))
        world = self._must("world", source.world)
        if not 0 <= rank < world:
            raise LaunchError(
                f"{source.rank}={rank} does not fit a world of {world} ranks: ranks run from 0 to {world - 1}"
            )
        nodes = self._may("nodes", source.nodes, 0, "ranks over ranks per node")
        local_world = self._local_world(world, nodes)
        if local_world < 1:
            raise LaunchError(
                f"{local_world} ranks on this machine ({self.reasons['local_world']}) are none: look "
                "at what was exported before the launch"
            )
        nodes = nodes or -(-world // local_world)
        local_rank = self._may("local_rank", source.local_rank, rank % local_world, "rank modulo ranks per node")
        node_rank = self._may("node_rank", source.node_rank, rank // local_world, "rank over ranks per node")
        if not 0 <= local_rank < local_world <= world:
            raise LaunchError(
                f"local rank {local_rank} ({self.reasons['local_rank']}) does not fit {local_world} "
                f"ranks on this machine ({self.reasons['local_world']}) of {world} in all: look at "
                "what was exported before the launch"
            )
        job = self._job()
        address, ports = self._master(world, local_world, job)
        return LaunchFacts(
            self._name(),
            rank,
            world,
            local_rank,
            local_world,
            node_rank,
            nodes,
            address,
            ports[0] if ports else None,
            self.reasons,
            ports[1:],
            job,
            self._cpus_per_rank(),
            requested_threads(self.environ),
        )

    def _name(self) -> str:
        if self.launcher.name == "environment" and "TORCHELASTIC_RUN_ID" in self.environ:
            return "torchrun"
        return self.launcher.name

    def _local_world(self, world: int, nodes: int) -> int:
        default, why = (-(-world // nodes), "ranks over nodes") if nodes else (world, _GUESSED)
        # srun's PMI plugin gives a task its rank but not how many share its node.
        if "SLURM_STEP_ID" in self.environ and self.launcher.name in ("slurm", "mpich"):
            tasks = _slurm_tasks_here(self.environ)
            if tasks is not None:
                default, why = tasks, "SLURM_STEP_TASKS_PER_NODE"
        return self._may("local_world", self.launcher.local_world, default, why)

    def _must(self, fact: str, names: tuple[str, ...]) -> int:
        for name in names:
            if name in self.environ:
                self.reasons[fact] = f"{name}={self.environ[name]}"
                return self._integer(name)
        raise LaunchError(
            f"{self.launcher.rank} is set but {names[0]} is not: a rank must know the size of "
            f"its world. Set {names[0]}, or unset {self.launcher.rank} for a single process"
        )

    def _may(self, fact: str, names: tuple[str, ...], default: int, why: str) -> int:
        for name in names:
            if name in self.environ:
                self.reasons[fact] = f"{name}={self.environ[name]}"
                return self._integer(name)
        self.reasons[fact] = why
        return default

    def _integer(self, name: str) -> int:
        number = signed_number(self.environ[name])
        if number is None:
            raise LaunchError(
                f"{name} is {short(repr(self.environ[name]))}, which is not a whole number; the "
                "launcher sets it, so look at what was exported before the launch"
            )
        return number

    def _master(self, world: int, local_world: int, job: str | None) -> tuple[str | None, tuple[int, ...]]:
        address = self.environ.get("MASTER_ADDR")
        nodelist = self._nodelist()
        if address is not None:
            self.reasons["master_addr"] = "MASTER_ADDR is set"
        elif nodelist is not None:
            address = expand_hosts(nodelist)[0]
            self.reasons["master_addr"] = f"first host of {nodelist}"
        elif local_world == world and self.reasons["local_world"] != _GUESSED:
            address = "127.0.0.1"
            self.reasons["master_addr"] = "all ranks are on this machine"
        if "MASTER_PORT" in self.environ:
            self.reasons["master_port"] = "MASTER_PORT is set"
            return address, (self._port(),)
        if job is None:
            return address, ()
        self.reasons["master_port"] = f"derived from the job ({job})"
        return address, rendezvous_ports(job)

    def _port(self) -> int:
        port = self._integer("MASTER_PORT")
        if not 1 <= port <= 65535:
            raise LaunchError(f"MASTER_PORT is {port}: ports run from 1 to 65535")
        return port

    def _nodelist(self) -> str | None:
        """Return the hosts that Slurm started the ranks on, the one of rank 0 first."""
        names: tuple[str, ...] = ()
        if self.launcher.name in ("slurm", "mpich") and "SLURM_STEP_ID" in self.environ:
            names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
        elif self.launcher.name == "openmpi":
            # mpirun forks the ranks of the first node and uses a step for the others only.
            names = ("SLURM_JOB_NODELIST",)
        return next((self.environ[name] for name in names if name in self.environ), None)

    def _cpus_per_rank(self) -> Fact[int] | None:
        """Under torchrun a Slurm task is all ranks of a node, elsewhere it is one rank."""
        if "SLURM_CPUS_PER_TASK" not in self.environ or self.launcher.name == "environment":
            return None
        number = self._integer("SLURM_CPUS_PER_TASK")
        return Fact(number, f"SLURM_CPUS_PER_TASK={number}")

    def _job(self) -> str | None:
        """Return what all ranks of one launch share, and no two launches do."""
        names = [LAUNCH_ID, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]
        by_step = self.launcher.name != "openmpi" and LAUNCH_ID not in self.environ
        if by_step and "SLURM_STEP_ID" in self.environ:
            return f"{self.environ.get('SLURM_JOB_ID')}.{self.environ['SLURM_STEP_ID']}"
        return next((self.environ[name] for name in names if name in self.environ), None)


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node, from '2(x3),1' and the node's number."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = whole_number(environ.get("SLURM_NODEID", "0"))
    if not text or node is None:
        return None
    counts = expand_counts(text)
    return counts[node] if node < len(counts) else None


def check_local_rank(passed: int | None, launch: LaunchFacts) -> None:
    """Refuse a `--local-rank` that contradicts the launcher's variables."""
    if passed is not None and launch.external and passed != launch.local_rank:
        raise LaunchError(
            f"--local-rank is {passed} but {launch.local_rank} according to {launch.launcher}: "
            "torch.distributed.launch passes it by itself, so leave it out"
        )
