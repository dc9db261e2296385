"""Turns the command line's request into a launch, by the launcher that the config names."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Any

from samestep.distributed.quick_hardware import quick_hardware
from samestep.environment.hardware import owned_cpus
from samestep.environment.launch import LaunchMethod
from samestep.environment.node_lists import job_rendezvous
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError
from samestep.launch.commands.mpirun import mpirun_command
from samestep.launch.commands.plain_script import PlainScript, plain_command
from samestep.launch.commands.rank_command import RankCommand, check_world
from samestep.launch.commands.size import Size, parse_hosts, ranks_of
from samestep.launch.commands.slurm import slurm_job, srun_command
from samestep.launch.commands.ssh import ssh_commands
from samestep.launch.commands.torchrun import default_nproc, torchrun_command
from samestep.launch.run.launches import Launch
from samestep.launch.run.mpirun import find_flavour

_MASTER_PORT = 29500
"""torchrun's own default."""


@dataclass(frozen=True)
class LaunchRequest:
    """The options of `samestep launch` that are not in the config."""

    nproc: Size | None = None
    nodes: Size | None = None
    node_rank: int | None = None
    master_addr: str = ""
    master_port: int | None = None
    rendezvous: str = ""
    hosts: str = ""
    max_restarts: int = 0
    only_shown: bool = False
    """Whether nothing is started, and so nothing may run that the config names."""

    def fixed_nproc(self, why: str) -> int | None:
        return None if self.nproc is None else self.nproc.one("--nproc", why)

    def refuse(self, via: LaunchMethod, *options: str) -> None:
        """Refuse options that mean nothing to this launcher, instead of ignoring them."""
        unset = LaunchRequest()
        given = [name for name in options if getattr(self, name) != getattr(unset, name)]
        if given:
            shown = ", ".join("--" + name.replace("_", "-") for name in given)
            raise LaunchError(f"{shown} means nothing with --via {via}: leave it out")


def prepare(rank_command: RankCommand, request: LaunchRequest) -> Launch:
    """Return the launch of a config by the launcher that it names; no rank is started."""
    method = rank_command.config.distributed.launch_method
    if method == "mpirun":
        return _by_mpirun(rank_command, request)
    if method == "slurm":
        request.refuse(method, "node_rank", "master_addr", "master_port", "rendezvous", "hosts")
        nproc = request.fixed_nproc("Slurm starts a fixed number")
        return slurm_job(rank_command, request.nodes, nproc, request.max_restarts)
    if method == "srun":
        return _by_srun(rank_command, request)
    if method == "ssh":
        return _by_ssh(rank_command, request)
    request.refuse(method, "hosts")
    return _by_torchrun(rank_command, request)


def prepare_plain(script: PlainScript, request: LaunchRequest) -> Launch:
    """Return the launch of a script as torchrun would start it; no rank is started."""
    request.refuse("torchrun", "hosts")
    nproc = request.nproc
    if nproc is None:
        count = quick_hardware(process_environment()).device_count or 1
        nproc = Size(count, count)
    return plain_command(script, nproc, **_machines(request))


def _by_torchrun(rank_command: RankCommand, request: LaunchRequest) -> Launch:
    nproc = request.nproc
    if nproc is None:
        machines = 1 if request.nodes is None else request.nodes.most
        count = default_nproc(rank_command.config, quick_hardware(process_environment()).device_count, machines)
        nproc = Size(count, count)
    return torchrun_command(rank_command, nproc, **_machines(request))


def _machines(request: LaunchRequest) -> dict[str, Any]:
    """Return the options of torchrun that are about machines and restarts."""
    return {
        "nodes": request.nodes, "node_rank": request.node_rank, "rendezvous": _rendezvous_endpoint(request),
        "max_restarts": request.max_restarts,
    }  # fmt: skip


def _rendezvous_endpoint(request: LaunchRequest) -> str:
    """HOST:PORT where machines meet; empty for one alone."""
    rendezvous, node_rank = request.rendezvous, request.node_rank
    if request.master_addr or request.master_port is not None:
        if rendezvous:
            raise LaunchError("--rendezvous and --master-addr both set the meeting point: keep one")
        if node_rank is None:
            raise LaunchError("--master-addr is for machines numbered manually: add --node-rank")
    if node_rank is not None:
        if not request.master_addr:
            raise LaunchError(f"--node-rank is {node_rank}: add --master-addr, node 0's host")
        rendezvous = f"{request.master_addr}:{request.master_port or _MASTER_PORT}"
    elif request.nodes is not None and not rendezvous:
        rendezvous = job_rendezvous(process_environment())
    return rendezvous


def _by_mpirun(rank_command: RankCommand, request: LaunchRequest) -> Launch:
    config, environ = rank_command.config, process_environment()
    request.refuse("mpirun", "nodes", "node_rank", "master_addr", "master_port", "rendezvous", "max_restarts")
    world = request.fixed_nproc("mpirun starts a fixed number")
    hosts = parse_hosts(request.hosts, world) if request.hosts else ()
    world = ranks_of(hosts) if hosts else world
    if world is None and not hosts and config.distributed.world_size != "auto":
        world = config.distributed.world_size
    if world is None:
        raise LaunchError("mpirun must know the number of ranks: add --nproc, or --hosts a:4,b:4")
    check_world(config, world, f"mpirun is to start {world} ranks")
    in_a_job = "SLURM_JOB_ID" in environ  # where mpirun knows what each node has
    return mpirun_command(
        rank_command,
        find_flavour(config.launch.mpirun, may_run=not request.only_shown),
        world,
        hosts,
        f"mpirun-{uuid.uuid4().hex}",
        environ,
        cpus=world if in_a_job else owned_cpus(environ).value,
        as_root=os.geteuid() == 0,
    )


def _by_srun(rank_command: RankCommand, request: LaunchRequest) -> Launch:
    request.refuse("srun", "node_rank", "master_addr", "master_port", "rendezvous", "hosts", "max_restarts")
    nproc = request.fixed_nproc("a step has a fixed number of ranks")
    name = f"srun-{uuid.uuid4().hex}"
    return srun_command(rank_command, request.nodes, nproc, name, process_environment())


def _by_ssh(rank_command: RankCommand, request: LaunchRequest) -> Launch:
    request.refuse("ssh", "nodes", "node_rank", "master_addr", "rendezvous", "max_restarts")
    if not request.hosts:
        raise LaunchError("--via ssh must know the machines: add --hosts, such as --hosts a:4,b:4")
    nproc = request.fixed_nproc("ssh starts a fixed number")
    hosts = parse_hosts(request.hosts, nproc)
    return ssh_commands(rank_command, hosts, f"ssh-{uuid.uuid4().hex}", request.master_port)
