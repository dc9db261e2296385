"""Ranks that this command starts on this machine, as plain values. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samestep.config import Config
from samestep.environment.hardware import owned_cpus
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError
from samestep.launch.commands.rank_command import RankCommand, check_world
from samestep.launch.commands.size import Size


@dataclass(frozen=True)
class LocalLaunch:
    """Processes to start on this machine, one per rank."""

    rank_command: RankCommand
    nproc: int
    """Ranks on this machine."""
    threads: int
    """For each rank."""
    quiet: bool = False
    """Whether rank 0's output goes to its file as well, and not to the terminal."""
    min_nproc: int = 1
    """Ranks that must be left when lost ones are left out."""
    max_restarts: int = 0
    nodes: Size | None = None
    """The machines that take part, if there are others."""
    node_rank: int | None = None
    """This machine's number, if they are numbered by hand."""
    rendezvous: str = ""
    """HOST:PORT where the machines meet."""

    @property
    def command(self) -> tuple[str, ...]:
        # --launched: the launcher shows a rank's failure, so the rank itself need not.
        more = ["--launched"]
        if self.rank_command.config.distributed.launch_method == "torch.distributed.launch":
            more.append("--local-rank=${local_rank}")
        return (self.rank_command.python, *self.rank_command.train(*more))

    @property
    def folder(self) -> Path:
        """Where the ranks' output goes."""
        return self.rank_command.config.run_path / "launch"

    @property
    def patience(self) -> float:
        """Seconds the ranks get to save and stop after a signal."""
        return max(30.0, self.rank_command.config.distributed.timeout)

    @property
    def run_id(self) -> str:
        """What the machines of one run know each other by."""
        return f"samestep-{self.rank_command.config.name}"

    @property
    def world(self) -> int:
        """The most ranks that there can be, if all machines start as many as this one."""
        return self.nproc * (1 if self.nodes is None else self.nodes.most)


def local_launch(
    rank_command: RankCommand,
    nproc: int | Size,
    *,
    nodes: Size | None = None,
    node_rank: int | None = None,
    rendezvous: str = "",
    max_restarts: int = 0,
    quiet: bool = False,
) -> LocalLaunch:
    """The processes that train a config on `nproc` ranks of this machine, and of other ones."""
    ranks = nproc if isinstance(nproc, Size) else Size(nproc, nproc)
    if ranks.fewest < 1:
        raise LaunchError(f"--nproc is {ranks}: start at least one rank")
    asked = rank_command.config.distributed.threads_per_rank
    # Of the most ranks, so that the same threads, and bits, stay when some are lost.
    cpus = owned_cpus(process_environment()).value
    launch = LocalLaunch(
        rank_command,
        nproc=ranks.most,
        threads=max(1, cpus // ranks.most) if asked == "auto" else asked,
        quiet=quiet,
        min_nproc=ranks.fewest,
        max_restarts=max_restarts,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )
    _check_restarts(launch, ranks)
    _check_nodes(launch)
    _check_config(launch, ranks)
    return launch


def _check_nodes(launch: LocalLaunch) -> None:
    nodes, node_rank = launch.nodes, launch.node_rank
    said = launch.rank_command.config.distributed.num_nodes
    if nodes is None:
        if launch.rendezvous or node_rank is not None:
            option = "--rendezvous" if launch.rendezvous else "--node-rank"
            raise LaunchError(f"{option} is for several machines: add --nodes, such as --nodes 2")
        if said not in ("auto", 1):
            raise LaunchError(
                f"distributed.num_nodes is {said}, but without --nodes samestep launch starts ranks "
                "on this machine only: add --nodes, and --rendezvous or --node-rank"
            )
        return
    if not launch.rendezvous:
        raise LaunchError(
            f"--nodes is {nodes} but nothing says where they meet: add --rendezvous HOST:PORT, or "
            "--node-rank N --master-addr HOST"
        )
    if node_rank is None:
        return
    if node_rank >= nodes.one("--nodes", "with --node-rank the machines do not come and go"):
        raise LaunchError(
            f"--node-rank is {node_rank}: {nodes} nodes run from 0 to {nodes.most - 1}"
        )
    if launch.max_restarts:
        raise LaunchError(
            f"--max-restarts is {launch.max_restarts} beside --node-rank: machines that start ranks "
            "again must meet again, so give --rendezvous HOST:PORT instead of --node-rank"
        )


def _check_restarts(launch: LocalLaunch, ranks: Size) -> None:
    config, nodes = launch.rank_command.config, launch.nodes
    if ranks.is_range and nodes is not None:
        raise LaunchError(
            f"--nproc is {ranks} beside --nodes {nodes}: give a range for one of them"
        )
    if ranks.is_range and not launch.max_restarts:
        raise LaunchError(
            f"--nproc is {ranks}, but no rank can be left out without a restart: add --max-restarts"
        )
    changes = ranks.is_range or (nodes is not None and nodes.is_range)
    if changes and config.batch_per_rank is not None:
        raise LaunchError(
            "batch_per_rank makes the run depend on the number of ranks, which may change here: set "
            "global_batch instead"
        )
    if nodes is not None and launch.node_rank is None and config.resume.checkpoint == "never":
        raise LaunchError(
            "resume: never would begin anew whenever a node comes or goes: give the run another name"
        )


def _check_config(launch: LocalLaunch, ranks: Size) -> None:
    section, nodes = launch.rank_command.config.distributed, launch.nodes
    if section.world_size != "auto" and (ranks.is_range or (nodes is not None and nodes.is_range)):
        raise LaunchError(
            f"distributed.world_size is {section.world_size} but the number of ranks may change: set "
            "world_size: auto"
        )
    if launch.node_rank is None:  # else other machines may start more or fewer ranks than this
        said = f"--nproc is {ranks}" + (f" and --nodes {nodes}" if nodes is not None else "")
        check_world(launch.rank_command.config, launch.world, said)


def default_nproc(config: Config, device_count: int) -> int:
    """How many ranks to start when nobody said: as the config says, or one per GPU."""
    section = config.distributed
    for said in (section.world_size, section.num_gpus_per_node):
        if said != "auto":
            return said
    if section.device_ids is not None:
        return len(section.device_ids)
    return max(1, device_count) if section.device != "cpu" else 1
