"""From what a person asked for to a launch, by whichever launcher; and its start."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samestep.config.distributed import LaunchMethod
from samestep.environment.hardware import owned_cpus
from samestep.environment.ports import job_rendezvous
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError
from samestep.launch.commands.local import LocalLaunch, default_nproc, local_launch
from samestep.launch.commands.mpirun import MpiLaunch, mpi_launch
from samestep.launch.commands.rank_command import RankCommand, check_world
from samestep.launch.commands.size import Size, parse_hosts, ranks_of
from samestep.launch.commands.slurm import SlurmJob, slurm_job
from samestep.launch.commands.ssh import SshLaunch, ssh_launch
from samestep.launch.commands.summary import Rows, plan_rows
from samestep.launch.commands.torchrun import torchrun_script
from samestep.launch.run.mpirun import find_flavour, run_mpi
from samestep.launch.run.slurm import cancel, follow, submit
from samestep.launch.run.ssh import run_over_ssh

Launch = LocalLaunch | MpiLaunch | SlurmJob | SshLaunch
Tell = Callable[[str], None]

_MASTER_PORT = 29500
"""torchrun's own."""


@dataclass(frozen=True)
class Request:
    """What `samestep launch` was asked for; nothing of it is in the config."""

    nproc: Size | None = None
    nodes: Size | None = None
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    rendezvous: str = ""
    hosts: str = ""
    max_restarts: int = 0

    def fixed_nproc(self, why: str) -> int | None:
        return None if self.nproc is None else self.nproc.one("--nproc", why)

    def refuse(self, via: LaunchMethod, *options: str) -> None:
        """Refuse options that mean nothing to this launcher, instead of ignoring them."""
        unset = Request()
        given = [name for name in options if getattr(self, name) != getattr(unset, name)]
        if given:
            shown = ", ".join("--" + name.replace("_", "-") for name in given)
            raise LaunchError(f"{shown} means nothing with --via {via}: leave it out")


def prepare(rank_command: RankCommand, request: Request, quiet: bool = False) -> Launch:
    """The launch of a config by the launcher that it names; nothing is started."""
    method = rank_command.config.distributed.launch_method
    if method == "mpirun":
        return _by_mpirun(rank_command, request)
    if method == "slurm":
        request.refuse(method, "node_rank", "master_addr", "master_port", "rendezvous", "hosts")
        nproc = request.fixed_nproc("Slurm starts a fixed number")
        return slurm_job(rank_command, request.nodes, nproc, request.max_restarts)
    if method == "ssh":
        return _by_ssh(rank_command, request)
    request.refuse(method, "hosts")
    return _here(rank_command, request, quiet)


def _here(rank_command: RankCommand, request: Request, quiet: bool) -> LocalLaunch:
    rendezvous, node_rank = request.rendezvous, request.node_rank
    if request.master_addr or request.master_port is not None:
        if rendezvous:
            raise LaunchError("--rendezvous and --master-addr both say where to meet: keep one")
        if node_rank is None:
            raise LaunchError("--master-addr is for machines numbered by hand: add --node-rank")
    if node_rank is not None:
        if not request.master_addr:
            raise LaunchError(f"--node-rank is {node_rank}: add --master-addr, node 0's host")
        rendezvous = f"{request.master_addr}:{request.master_port or _MASTER_PORT}"
    elif request.nodes is not None and not rendezvous:
        rendezvous = job_rendezvous(process_environment())
    nproc = request.nproc
    if nproc is None:
        from samestep.distributed.hardware import detect_hardware

        count = default_nproc(rank_command.config, detect_hardware().device_count)
        nproc = Size(count, count)
    return local_launch(
        rank_command,
        nproc,
        nodes=request.nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        max_restarts=request.max_restarts,
        quiet=quiet,
    )


def _by_mpirun(rank_command: RankCommand, request: Request) -> MpiLaunch:
    config, environ = rank_command.config, process_environment()
    request.refuse(
        "mpirun", "nodes", "node_rank", "master_addr", "master_port", "rendezvous", "max_restarts"
    )
    world = request.fixed_nproc("mpirun starts a fixed number")
    hosts = parse_hosts(request.hosts, world) if request.hosts else ()
    world = ranks_of(hosts) if hosts else world
    if world is None and not hosts and config.distributed.world_size != "auto":
        world = config.distributed.world_size
    if world is None:
        raise LaunchError("mpirun must know the number of ranks: add --nproc, or --hosts a:4,b:4")
    check_world(config, world, f"mpirun is to start {world} ranks")
    in_a_job = "SLURM_JOB_ID" in environ  # where mpirun knows what each node has
    return mpi_launch(
        rank_command,
        find_flavour(config.launch.mpirun),
        world,
        hosts,
        f"mpirun-{uuid.uuid4().hex}",
        environ,
        cpus=world if in_a_job else owned_cpus(environ).value,
        as_root=os.geteuid() == 0,
    )


def _by_ssh(rank_command: RankCommand, request: Request) -> SshLaunch:
    request.refuse("ssh", "nodes", "node_rank", "master_addr", "rendezvous", "max_restarts")
    if not request.hosts:
        raise LaunchError("--via ssh must know the machines: add --hosts, such as --hosts a:4,b:4")
    nproc = request.fixed_nproc("ssh starts a fixed number")
    launch = ssh_launch(rank_command, parse_hosts(request.hosts, nproc), f"ssh-{uuid.uuid4().hex}")
    return launch if request.master_port is None else launch.at(request.master_port)


def script_of(launch: Launch) -> str:
    """The command or job script of a launch, as a shell script that does the same by hand."""
    return torchrun_script(launch) if isinstance(launch, LocalLaunch) else launch.script()


def plan_of(launch: Launch) -> Rows:
    """What the launch comes to."""
    config, threads = launch.rank_command.config, None
    if isinstance(launch, LocalLaunch):
        machines = 1 if launch.nodes is None else launch.nodes.most
        threads = launch.threads
    elif isinstance(launch, SlurmJob):
        machines, threads = launch.nodes.most, config.launch.slurm.cpus_per_task
    else:
        machines = max(1, len(launch.hosts))
        if isinstance(launch, MpiLaunch) and not launch.hosts:
            threads = max(1, owned_cpus(process_environment()).value // launch.world)
    return plan_rows(config, launch.world, machines, threads)


def _tell_what_is_left_out(launch: Launch, tell: Tell) -> None:
    section = launch.rank_command.config.launch
    if isinstance(launch, (LocalLaunch, MpiLaunch)) and (section.modules or section.before):
        tell(
            "launch.modules and launch.before are for scripts, and not done here: do it before, or "
            "keep the script with --write and run that"
        )


def start(launch: Launch, tell: Tell, *, follows: bool = False, quiet: bool = False) -> None:
    """Start it and stay with it to its end; a Slurm job is left alone unless it is followed."""
    _tell_what_is_left_out(launch, tell)
    if isinstance(launch, MpiLaunch):
        run_mpi(launch, process_environment(), quiet)
    elif isinstance(launch, SshLaunch):
        run_over_ssh(launch)
    elif isinstance(launch, SlurmJob):
        job = submit(launch)
        run: Path = launch.folder.parent
        tell(f"submitted job {job.job}; its output: {launch.folder}; samestep slurm status {run}")
        if follows and not quiet:
            follow(run, job, tell, sys.stdout)
        elif follows:
            try:
                follow(run, job, tell, None)
            except KeyboardInterrupt:
                cancel(job)  # nobody else knows of a job that is not for a person to see
                raise
    else:
        from samestep.launch.run.agent import run_ranks

        run_ranks(launch, tell)
