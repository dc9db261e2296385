"""The `launch:` section: what a job needs around its ranks."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from samestep.config.distributed import Positive
from samestep.errors import Mistake

Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
"""Text of one line: a value in a script must not become another line of it."""

MaybeLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")]

Style = Literal["srun", "torchrun", "mpirun"]


class SlurmConfig(BaseModel):
    """A Slurm job's options, under sbatch's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    style: Style = Field(
        "srun", description="srun starts every rank, or an elastic agent on each node, or mpirun"
    )
    partition: Line | None = Field(None, description="sbatch --partition")
    time: Line | None = Field(None, description="sbatch --time, such as 12:00:00")
    account: Line | None = Field(None, description="sbatch --account")
    qos: Line | None = Field(None, description="sbatch --qos")
    mem: Line | None = Field(None, description="sbatch --mem, such as 64G")
    cpus_per_task: Positive | None = Field(None, description="CPUs for each rank")
    gpus_per_node: Positive | None = Field(None, description="GPUs, and so ranks, on each node")
    constraint: Line | None = Field(None, description="sbatch --constraint")
    array: Line | None = Field(
        None, description="sbatch --array; {array} in overrides is the task's number"
    )
    mail_user: Line | None = Field(None, description="sbatch --mail-user")
    mail_type: Line = Field("END,FAIL", description="sbatch --mail-type, with mail_user")
    warn_seconds: Positive | None = Field(
        120, description="seconds before the time limit at which the run saves and is requeued"
    )
    requeue: bool = Field(True, description="let Slurm start the job again after a preemption")
    extra: tuple[Line, ...] = Field((), description="more sbatch options, such as --nice=100")


class LaunchConfig(BaseModel):
    """What a job needs around its ranks. Nothing here changes the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    python: Line | None = Field(
        None, description="the ranks' interpreter; the launcher's if not set"
    )
    modules: tuple[Line, ...] = Field((), description="module load, in a job script")
    environment: dict[str, MaybeLine] = Field({}, description="variables that every rank gets")
    before: tuple[Line, ...] = Field((), description="shell commands before the ranks, in a script")
    mpirun: Line = Field("mpirun", description="the mpirun to use")
    ssh: Line = Field("ssh", description="the ssh to use, with options")
    slurm: SlurmConfig = SlurmConfig()

    def mistakes(self) -> list[Mistake]:
        """What is wrong in this section beyond its types."""
        odd = [
            name for name in self.environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        ]
        path = "launch.environment"
        found = [Mistake(path, f"{name!r} is not a variable's name") for name in odd]
        try:
            shlex.split(self.ssh)
        except ValueError as error:
            found.append(Mistake("launch.ssh", f"{self.ssh!r} is not a command: {error}"))
        return found
