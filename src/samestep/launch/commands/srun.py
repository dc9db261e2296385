"""Ranks as a step of the Slurm allocation that this command runs in. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from samestep.config import Config
from samestep.environment.variables import launch_variables
from samestep.errors import LaunchError
from samestep.launch.commands.mpirun import ProgramCommand
from samestep.launch.commands.rank_command import RankCommand, check_world
from samestep.launch.commands.size import Size
from samestep.parsing.numbers import whole_number

HIDDEN = ("SLURM_MEM_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GRES", "SLURM_NTASKS_PER_NODE")
"""What srun would take for its own options: a step would request all that the allocation has."""


def srun_command(
    rank_command: RankCommand, nodes: Size | None, nproc: int | None, name: str, environ: Mapping[str, str]
) -> ProgramCommand:
    """Return the step of a config.

    Raises:
        LaunchError: outside of an allocation, or if it has too few nodes.
    """
    config, options = rank_command.config, rank_command.config.launch.slurm
    job, present = environ.get("SLURM_JOB_ID"), whole_number(environ.get("SLURM_NNODES", "1"))
    if job is None:
        raise LaunchError(
            "--via srun starts ranks in a Slurm allocation, and this is none: use salloc or sbatch first, or "
            "--via slurm, which submits a job"
        )
    count = nodes.one("--nodes", "ranks of a step do not come and go") if nodes is not None else None
    if count is None:
        count = 1 if config.distributed.num_nodes == "auto" else config.distributed.num_nodes
    if present is not None and count > present:
        raise LaunchError(f"--nodes is {count}, but job {job} has {present} node(s)")
    ranks = nproc or options.gpus_per_node or 1
    check_world(config, count * ranks, f"the step has {count * ranks} ranks")
    cpus = options.cpus_per_task or whole_number(environ.get("SLURM_CPUS_PER_TASK", ""))
    argv = ["srun", f"--nodes={count}", f"--ntasks={count * ranks}", f"--ntasks-per-node={ranks}"]
    # Else a step takes all CPUs of its nodes, and the next one waits for its end.
    argv += ["--exact", "--kill-on-bad-exit=1", f"--cpus-per-task={cpus or 1}"]
    argv += [*_memory(options.mem, ranks * (cpus or 1), environ), *_gpus(config, ranks, environ)]
    variables = {**config.launch.environment, **launch_variables(name)}
    command = (rank_command.python, *rank_command.train())
    # srun forwards SIGUSR2 to its ranks; SIGTERM would kill them.
    return ProgramCommand(
        "srun", rank_command, count * ranks, count, options.cpus_per_task, (*argv, *command), variables,
        stops_by="SIGUSR2", ends_by="SIGTERM", hidden=HIDDEN,
    )  # fmt: skip


def _memory(asked: str | None, cpus: int, environ: Mapping[str, str]) -> list[str]:
    """As much of a node's memory as of its CPUs: with all of it, the next step would wait."""
    if asked is not None:
        return [f"--mem={asked}"]
    total = whole_number(environ.get("SLURM_MEM_PER_NODE", ""))
    present = whole_number(environ.get("SLURM_CPUS_ON_NODE", ""))
    return [f"--mem={max(1, total * min(cpus, present) // present)}M"] if total and present else []


def _gpus(config: Config, ranks: int, environ: Mapping[str, str]) -> list[str]:
    """One for each rank, if the allocation has any and the run may use them."""
    asked = config.launch.slurm.gpus_per_node
    has = "SLURM_GPUS_ON_NODE" in environ or "SLURM_JOB_GPUS" in environ
    if asked is None and (config.distributed.device == "cpu" or not has):
        return ["--gres=none"] if has else []
    return [f"--gpus-per-node={asked or ranks}"]
