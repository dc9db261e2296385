"""The `launch:` section: what a job needs around its ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from samestep.config.bounds import MOST_ENTRIES, Cpus, Gpus, SlurmSeconds
from samestep.config.secrets import is_secret, referred
from samestep.errors import LaunchError, Mistake


@dataclass(frozen=True)
class Meaning:
    """A pattern in words, which messages and docs/config.md show in its place."""

    meaning: str


Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$"), Meaning("one line, not empty")]
"""Text of one line: a value in a script must not become another line of it."""

MaybeLine = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$"), Meaning("one line")]

Style = Literal["srun", "torchrun", "mpirun"]


class SlurmConfig(BaseModel):
    """A Slurm job's options, under sbatch's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    style: Style = Field("srun", description="srun starts every rank, or an elastic agent on each node, or mpirun")
    partition: Line | None = Field(None, description="sbatch --partition")
    time: Line | None = Field(None, description="sbatch --time, such as 12:00:00")
    account: Line | None = Field(None, description="sbatch --account")
    mem: Line | None = Field(None, description="sbatch --mem, such as 64G")
    cpus_per_task: Cpus | None = Field(None, description="CPUs for each rank")
    gpus_per_node: Gpus | None = Field(None, description="GPUs, and so ranks, on each node")
    array: Line | None = Field(None, description="sbatch --array; {array} in overrides is the task's number")
    warn_seconds: SlurmSeconds | None = Field(
        120, description="seconds before the time limit at which the run saves and is requeued"
    )
    requeue: bool = Field(True, description="let Slurm start the job again after a preemption")
    extra: tuple[Line, ...] = Field((), max_length=MOST_ENTRIES, description="more sbatch options, such as --qos=high")


class LaunchConfig(BaseModel):
    """Settings of a job around its ranks. Nothing here changes the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    python: Line | None = Field(None, description="the ranks' interpreter; the launcher's if not set")
    modules: tuple[Line, ...] = Field((), max_length=MOST_ENTRIES, description="module load, in a job script")
    environment: dict[str, MaybeLine] = Field(
        {}, max_length=MOST_ENTRIES, description="variables that every rank gets; ${NAME}: the launcher's own"
    )
    before: tuple[Line, ...] = Field(
        (), max_length=MOST_ENTRIES, description="shell commands before the ranks, in a script"
    )
    mpirun: Line = Field("mpirun", description="the mpirun to use")
    ssh: Line = Field("ssh", description="the ssh to use, with options")
    slurm: SlurmConfig = SlurmConfig()

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that every rank gets.

        Raises:
            LaunchError: if it lacks some of them.
        """
        wanted = {name: referred(value) for name, value in self.environment.items()}
        missing = [
            f"launch.environment.{name} is {self.environment[name]}, and {source} is not set here"
            for name, source in wanted.items()
            if source is not None and source not in environ
        ]
        if missing:
            raise LaunchError("\n".join(missing) + "\nSet it in the environment that launches the run")
        return {name: value if (s := wanted[name]) is None else environ[s] for name, value in self.environment.items()}

    def mistakes(self) -> list[Mistake]:
        """Return what is wrong in this section beyond its types."""
        odd = [name for name in self.environment if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]
        path = "launch.environment"
        found = [Mistake(path, f"{name!r} is not a variable's name") for name in odd]
        # Whatever shows or stores a config must not tell them.
        found += [
            Mistake(
                f"{path}.{name}",
                f"looks like a secret, and configs are stored with runs: write ${{{name}}}, and set it where the run is "
                "launched",
            )
            for name, value in self.environment.items()
            if referred(value) is None and is_secret(name, value)
        ]
        try:
            shlex.split(self.ssh)
        except ValueError as error:
            found.append(Mistake("launch.ssh", f"{self.ssh!r} is not a command: {error}"))
        return found
