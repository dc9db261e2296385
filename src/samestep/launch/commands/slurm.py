"""A Slurm job as the text of its sbatch script. No torch here, and nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.config import Config
from samestep.environment.secret import SHELL_SECRET
from samestep.environment.variables import launch_variables
from samestep.errors import LaunchError
from samestep.launch.commands.mpirun import ProgramCommand
from samestep.launch.commands.rank_command import RankCommand, check_world, quoted, surroundings
from samestep.launch.commands.size import Size
from samestep.launch.commands.summary import Rows, plan_rows
from samestep.parsing.numbers import whole_number

ARRAY = "{array}"
"""In an override, this is replaced by the number of the array's task."""


def for_the_first_task(overrides: Sequence[str]) -> list[str]:
    """Return the overrides as an array's first task gets them: what can be checked beforehand."""
    return [override.replace(ARRAY, "0") for override in overrides]


@dataclass(frozen=True)
class SlurmJob:
    """A job to be submitted."""

    rank_command: RankCommand
    nodes: Size
    """With the style torchrun it may be a range, from the fewest that are enough to continue."""
    ranks_per_node: int
    max_restarts: int = 0

    @property
    def world(self) -> int:
        return self.nodes.most * self.ranks_per_node

    @property
    def folder(self) -> Path:
        """Return where the script, Slurm's output and the job's number are kept."""
        return self.rank_command.working_folder / self.rank_command.config.run_path / "slurm"

    def script(self) -> str:
        """Return the whole script. Every value from outside is quoted, or refused if it has several lines."""
        style = self.rank_command.config.launch.slurm.style
        body = {"srun": _by_srun, "torchrun": _by_agents, "mpirun": _by_mpirun}[style](self)
        lines = [
            "#!/bin/bash",
            "# Written by samestep launch --via slurm. It may be submitted again: the run resumes from",
            "# its newest checkpoint.",
            *(f"#SBATCH {line}" for line in directives(self)),
            "",
            "set -eo pipefail",  # not -u, which breaks modules and conda
            *surroundings(self.rank_command, {}),
            # In the job's environment, which is the user's alone, and in no file.
            SHELL_SECRET,
            *body,
        ]
        return "\n".join(lines) + "\n"

    def summary(self) -> Rows:
        config = self.rank_command.config
        threads = config.launch.slurm.cpus_per_task
        return plan_rows(config, self.world, self.nodes.most, threads, threads_are_share=True)


def slurm_job(rank_command: RankCommand, nodes: Size | None, nproc: int | None, max_restarts: int = 0) -> SlurmJob:
    """Return the job of a config: on each node `nproc` ranks, or one per requested GPU, or one."""
    config, options = rank_command.config, rank_command.config.launch.slurm
    section = config.distributed
    if nodes is None:
        count = 1 if section.num_nodes == "auto" else section.num_nodes
        nodes = Size(count, count)
    gpus = options.gpus_per_node
    if gpus is not None and nproc not in (None, gpus):
        raise LaunchError(f"--nproc is {nproc} but --gpus-per-node {gpus}: one rank drives one GPU")
    ranks = nproc or gpus
    if ranks is None:
        ranks = 1 if section.num_gpus_per_node == "auto" else section.num_gpus_per_node
    if options.style != "torchrun":
        nodes.one("--nodes", f"ranks of the style {options.style} do not come and go")
        if max_restarts:
            raise LaunchError(
                f"--max-restarts is {max_restarts}, but with the style {options.style} Slurm restarts "
                "the job: leave it out, or set launch.slurm.style=torchrun"
            )
    if options.array is not None:
        rank_command = _in_an_array(rank_command)
    elif any(ARRAY in override for override in rank_command.overrides):
        raise LaunchError(f"an override has {ARRAY}, but there is no --array")
    job = SlurmJob(rank_command, nodes, ranks, max_restarts)
    check_world(config, job.world, f"the job has {job.world} ranks")
    return job


def _in_an_array(rank_command: RankCommand) -> RankCommand:
    """Return every task of an array is a separate run, in its own directory."""
    named = [o for o in rank_command.overrides if o.partition("=")[0] in ("name", "run_dir")]
    for text in (*named, str(rank_command.config.run_path)):
        if ARRAY in text:
            raise LaunchError(
                f"{text}: the tasks of an array already have their own directories, 0 and so on in the run's directory"
            )
    # As JSON, which is YAML in which no character has another meaning.
    own = "run_dir=" + json.dumps(f"{rank_command.config.run_path}/{ARRAY}", ensure_ascii=False)
    others = [o for o in rank_command.overrides if o.partition("=")[0] != "run_dir"]
    return replace(rank_command, overrides=(*others, own))


def directives(job: SlurmJob) -> list[str]:
    """Return the options of sbatch, one a line."""
    config = job.rank_command.config
    options = config.launch.slurm
    by_agents = options.style == "torchrun"
    # One agent on a node starts that node's ranks, and needs the CPUs of all of them.
    tasks, cpus = job.ranks_per_node, options.cpus_per_task
    if by_agents:
        tasks, cpus = 1, cpus and cpus * job.ranks_per_node
    file = "%A_%a.out" if options.array else "%j.out"
    found: list[tuple[str, object | None]] = [
        ("job-name", re.sub(r"[^\w.-]", "_", config.name)),
        ("nodes", job.nodes.most),
        ("ntasks-per-node", tasks),
        ("cpus-per-task", cpus),
        ("gpus-per-node", options.gpus_per_node),
        ("partition", options.partition),
        ("time", options.time),
        ("account", options.account),
        ("mem", options.mem),
        ("array", options.array),
        ("output", str(job.folder).replace("%", "%%") + f"/{file}"),
        ("open-mode", "append"),
        ("signal", options.warn_seconds and _signal(options.style, options.warn_seconds)),
    ]
    lines = [f"--{name}={_directive(str(value))}" for name, value in found if value is not None]
    lines.append("--requeue" if options.requeue else "--no-requeue")
    if by_agents and job.nodes.is_range:
        lines.append("--no-kill")  # or the loss of one node would end the job
    return [*lines, *map(_directive, options.extra)]


def _signal(style: str, seconds: int) -> str:
    """Return the option that signals the ranks; mpirun's ranks on its own node are in no step, but it forwards signals."""
    return f"B:USR1@{seconds}" if style == "mpirun" else f"USR1@{seconds}"


def _directive(text: str) -> str:
    """Return a value as sbatch reads it from a comment: quoted unless it is harmless."""
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise LaunchError(f"{text!r} goes into a line of the job script and must be one line")
    if re.fullmatch(r"[\w.,:@%+=/\[\]-]*", text, re.ASCII):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _exec(job: SlurmJob, *words: str) -> str:
    """Return the last line of the script, with the array task's number in its place."""
    line = quoted(words)
    if job.rank_command.config.launch.slurm.array is not None:
        # Braces are always quoted: this closes the quotes, and opens them again.
        line = line.replace(ARRAY, """'"$SLURM_ARRAY_TASK_ID"'""")
    return f"exec {line}"


def _by_srun(job: SlurmJob) -> list[str]:
    cpus = job.rank_command.config.launch.slurm.cpus_per_task
    # Since Slurm 22.05 a step does not get sbatch's --cpus-per-task by itself.
    more = [f"--cpus-per-task={cpus}"] if cpus else []
    srun = ["srun", "--kill-on-bad-exit=1", *more]
    return [
        "# One task is one rank, and finds its place in Slurm's variables.",
        _exec(job, *srun, job.rank_command.python, *job.rank_command.train()),
    ]


def _by_agents(job: SlurmJob) -> list[str]:
    options = ["--via", "torchrun", "--nproc", str(job.ranks_per_node), "--nodes", str(job.nodes)]
    options += ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    cpus = job.rank_command.config.launch.slurm.cpus_per_task
    srun = ["srun", "--kill-on-bad-exit=0" if job.nodes.is_range else "--kill-on-bad-exit=1"]
    srun += ["--no-kill"] if job.nodes.is_range else []
    srun += [f"--cpus-per-task={cpus * job.ranks_per_node}"] if cpus else []
    return [
        "# An agent on each node starts that node's ranks; they meet on the job's first node.",
        _exec(job, *srun, job.rank_command.python, *job.rank_command.launch(*options)),
    ]


def _by_mpirun(job: SlurmJob) -> list[str]:
    options = ["--via", "mpirun", "--nproc", str(job.world)]
    return [
        "# mpirun starts the ranks on all nodes of the job.",
        _exec(job, job.rank_command.python, *job.rank_command.launch(*options)),
    ]


HIDDEN = ("SLURM_MEM_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GRES", "SLURM_NTASKS_PER_NODE")
"""Variables that srun would take for its own options: a step would request all that the allocation has."""


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
    """Return as large a share of a node's memory as of its CPUs: with all of it, the next step would wait."""
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
