"""Ranks started on this machine, as torchrun or torch.distributed.launch would. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.config import Config
from samestep.distributed.placement import chosen_threads
from samestep.environment.hardware import expects_gpu, owned_cpus
from samestep.environment.launch import requested_threads
from samestep.environment.variables import process_environment, thread_variables
from samestep.errors import LaunchError
from samestep.launch.commands.rank_command import MODULE, RankCommand, check_world, exec_line, shell_script
from samestep.launch.commands.size import Size, check_endpoint
from samestep.launch.commands.summary import Rows, plan_rows


@dataclass(frozen=True)
class TorchrunCommand:
    """Processes to start on this machine, one per rank."""

    rank_command: RankCommand
    nproc: int
    """Ranks on this machine."""
    threads: int
    """For each rank."""
    min_nproc: int = 1
    """Ranks that must remain when lost ones are left out."""
    max_restarts: int = 0
    nodes: Size | None = None
    """The machines that take part, if there are others."""
    node_rank: int | None = None
    """This machine's number, if they are numbered manually."""
    rendezvous: str = ""
    """HOST:PORT where the machines meet."""

    @property
    def rank_argv(self) -> tuple[str, ...]:
        """The command of one rank."""
        # --launched: the launcher shows a rank's failure, so the rank itself need not.
        options = ["--launched"]
        if self._is_legacy:
            options.append("--local-rank=${local_rank}")
        return (self.rank_command.python, *self.rank_command.train(*options))

    keeps_logs: ClassVar[bool] = True
    """Whether every rank writes a log beside that folder."""

    @property
    def folder(self) -> Path:
        """Return where the ranks' output goes."""
        return self.rank_command.config.run_path / "launch"

    @property
    def patience(self) -> float:
        """Seconds the ranks get to save and stop after a signal."""
        return max(30.0, self.rank_command.config.distributed.timeout)

    @property
    def run_id(self) -> str:
        """The name under which the machines of one run find each other."""
        return f"samestep-{self.rank_command.config.name}"

    @property
    def world(self) -> int:
        """The largest possible number of ranks, if all machines start as many as this one."""
        return self.nproc * (1 if self.nodes is None else self.nodes.most)

    def script(self) -> str:
        """Return a script that starts the same ranks by torch's own command.

        samestep runs that command's agent in its own process, so that it can name the rank that
        failed, leave out ranks that were lost, and let ranks save when they are stopped.
        """
        module = "torch.distributed.launch" if self._is_legacy else "torch.distributed.run"
        argv = [self.rank_command.python, "-m", module, *self._nodes_options()]
        argv += [f"--nproc-per-node={self.nproc}"]
        argv += [f"--max-restarts={self.max_restarts}"] if self.max_restarts else []
        argv += self._for_torchrun()
        comment = (
            f"The ranks of samestep launch, by {module} itself. Other than samestep\n# launch, it "
            "listens at every address of the machine and believes whoever connects."
        )
        variables = thread_variables(self.threads)
        return shell_script(comment, self.rank_command, variables, exec_line(argv))

    def summary(self) -> Rows:
        machines = 1 if self.nodes is None else self.nodes.most
        return plan_rows(self.rank_command.config, self.world, machines, self.threads)

    def _for_torchrun(self) -> tuple[str, ...]:
        """Return what torch's own command is to start."""
        return (*MODULE, *self.rank_command.rank_words())

    @property
    def _is_legacy(self) -> bool:
        method = self.rank_command.config.distributed.launch_method
        return method == "torch.distributed.launch"

    def _nodes_options(self) -> list[str]:
        if self.nodes is None:
            return ["--standalone"]
        if self.node_rank is not None:
            address, _, port = self.rendezvous.rpartition(":")
            return [
                f"--nnodes={self.nodes.most}",
                f"--node-rank={self.node_rank}",
                f"--master-addr={address}",
                f"--master-port={port}",
            ]
        return [
            f"--nnodes={self.nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.rendezvous}",
            f"--rdzv-id={self.run_id}",
        ]


def torchrun_command(
    rank_command: RankCommand,
    nproc: int | Size,
    *,
    nodes: Size | None = None,
    node_rank: int | None = None,
    rendezvous: str = "",
    max_restarts: int = 0,
) -> TorchrunCommand:
    """Return the processes that train a config on `nproc` ranks of this machine, and of other ones."""
    ranks = nproc if isinstance(nproc, Size) else Size(nproc, nproc)
    if ranks.fewest < 1:
        raise LaunchError(f"--nproc is {ranks}: start at least one rank")
    threads = _chosen_threads(rank_command.config)
    command = TorchrunCommand(
        rank_command,
        nproc=ranks.most,
        # Divided by the most ranks, so that threads stay the same when some are lost.
        threads=max(1, _cpus() // ranks.most) if threads is None else threads,
        min_nproc=ranks.fewest,
        max_restarts=max_restarts,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )
    check_restarts(command, ranks)
    check_nodes(command)
    _check_config(command, ranks)
    return command


def check_nodes(command: TorchrunCommand) -> None:
    """Refuse machines that do not know where to meet, or which one this is."""
    nodes, node_rank = command.nodes, command.node_rank
    configured = command.rank_command.config.distributed.num_nodes
    if nodes is None:
        if command.rendezvous or node_rank is not None:
            option = "--rendezvous" if command.rendezvous else "--node-rank"
            raise LaunchError(f"{option} is for several machines: add --nodes, such as --nodes 2")
        if configured not in ("auto", 1):
            raise LaunchError(
                f"distributed.num_nodes is {configured}, but without --nodes samestep launch starts "
                "ranks on this machine only: add --nodes, and --rendezvous or --node-rank"
            )
        return
    if not command.rendezvous:
        raise LaunchError(
            f"--nodes is {nodes} but no meeting point is given: add --rendezvous HOST:PORT, or "
            "--node-rank N --master-addr HOST"
        )
    option = "--rendezvous" if node_rank is None else "--master-addr with its port"
    check_endpoint(command.rendezvous, option)
    if node_rank is None:
        return
    if node_rank >= nodes.one("--nodes", "with --node-rank the machines do not come and go"):
        raise LaunchError(f"--node-rank is {node_rank}: {nodes} nodes run from 0 to {nodes.most - 1}")
    if command.max_restarts:
        raise LaunchError(
            f"--max-restarts is {command.max_restarts} beside --node-rank: machines that restart "
            "ranks must meet again, so give --rendezvous HOST:PORT instead of --node-rank"
        )


def check_restarts(command: TorchrunCommand, ranks: Size) -> None:
    """Refuse what could not be restarted on fewer ranks, or would begin anew."""
    config, nodes = command.rank_command.config, command.nodes
    if ranks.is_range and nodes is not None:
        raise LaunchError(f"--nproc is {ranks} beside --nodes {nodes}: give a range for one of them")
    if ranks.is_range and not command.max_restarts:
        raise LaunchError(f"--nproc is {ranks}, but no rank can be left out without a restart: add --max-restarts")
    changes = ranks.is_range or (nodes is not None and nodes.is_range)
    if changes and config.batch_per_rank is not None:
        raise LaunchError(
            "batch_per_rank makes the run depend on the number of ranks, which may change here: set "
            "global_batch instead"
        )
    begins = {"never": "from step 0", "best": "from its best step"}.get(config.resume.checkpoint)
    if nodes is not None and command.node_rank is None and begins is not None:
        raise LaunchError(
            f"resume: {config.resume.checkpoint} would start {begins} whenever a node joins or leaves: give "
            "the run another name"
        )


def _check_config(command: TorchrunCommand, ranks: Size) -> None:
    section, nodes = command.rank_command.config.distributed, command.nodes
    if section.world_size != "auto" and (ranks.is_range or (nodes is not None and nodes.is_range)):
        raise LaunchError(
            f"distributed.world_size is {section.world_size} but the number of ranks may change: set world_size: auto"
        )
    if command.node_rank is None:  # else other machines may start more or fewer ranks than this
        given = f"--nproc is {ranks}" + (f" and --nodes {nodes}" if nodes is not None else "")
        check_world(command.rank_command.config, command.world, given)


def _chosen_threads(config: Config) -> int | None:
    """Return the threads of each rank here; None for a share of the CPUs."""
    section, environ = config.distributed, process_environment()
    on_cpu = section.device == "cpu" or not expects_gpu(environ)
    chosen = chosen_threads(section, requested_threads(environ), on_cpu, config.same)
    return None if chosen is None else chosen.value


def _cpus() -> int:
    return owned_cpus(process_environment()).value


def default_nproc(config: Config, device_count: int, nodes: int = 1) -> int:
    """Return how many ranks to start without --nproc: what the config sets, or one per GPU.

    On CPUs as many as have lanes and CPUs, where the threads of a rank are decided, as they are
    for `same: bits`; elsewhere one, which has all CPUs.
    """
    section = config.distributed
    for configured in (section.world_size, section.num_gpus_per_node):
        if configured != "auto":
            return configured
    if section.device_ids is not None:
        return len(section.device_ids)
    if device_count and section.device != "cpu":
        return device_count
    threads = _chosen_threads(config)
    if threads is None or config.batch_per_rank is not None or section.enabled is False:
        return 1  # with batch_per_rank, another number of ranks would be another run
    if section.lane_weights is not None:
        return max(1, len(section.lane_weights) // nodes)
    return max(1, min(config.lane_count(1) // nodes, _cpus() // threads))
