"""Ranks by mpirun: OpenMPI's, or hydra's (MPICH, Intel MPI, MVAPICH). No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from samestep.config.secrets import referred
from samestep.environment.hardware import owned_cpus
from samestep.environment.secret import SECRET, SHELL_SECRET
from samestep.environment.variables import launch_variables
from samestep.errors import LaunchError
from samestep.launch.commands.rank_command import RankCommand, exec_line, shell_script
from samestep.launch.commands.size import Host
from samestep.launch.commands.summary import Rows, plan_rows

Flavour = Literal["openmpi", "hydra"]

_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
_FORWARDED_KINDS = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "SAMESTEP_")
"""What the ranks on other machines need of the launching environment."""


@dataclass(frozen=True)
class ProgramCommand:
    """One program that starts all ranks: an mpirun, or an srun."""

    via: Literal["mpirun", "srun"]
    rank_command: RankCommand
    world: int
    machines: int
    threads: int | None
    """Each rank's share of the CPUs, as far as it is known."""
    argv: tuple[str, ...]
    named: Mapping[str, str]
    """Set for the program, which passes them to the ranks by name: values do not show in `ps`. Some may be
    references to this process's own."""
    stops_by: str
    """The signal that it forwards to its ranks without killing them, and without a requeue."""
    ends_by: str
    """The signal that ends it and its ranks at once."""
    hidden: tuple[str, ...] = ()
    """Variables of this process that it must not read."""

    @property
    def variables(self) -> dict[str, str]:
        """The same with the values that are referred to; raises if one is not set here."""
        found = self.rank_command.variables()
        return {k: v if referred(v) is None else found[k] for k, v in self.named.items()}

    def script(self) -> str:
        inside = ", inside of an allocation" if self.via == "srun" else ""
        # Each time the script runs it is another launch.
        variables = {k: v for k, v in self.named.items() if k not in launch_variables("")}
        name = [f'export {variable}="{self.via}-$HOSTNAME-$$"' for variable in launch_variables("")]
        unset = [f"unset {' '.join(self.hidden)}"] if self.hidden else []
        command = "\n".join([*name, SHELL_SECRET, *unset, exec_line(self.argv)])
        return shell_script(
            f"What samestep launch --via {self.via} starts{inside}.", self.rank_command, variables, command
        )

    def summary(self) -> Rows:
        return plan_rows(self.rank_command.config, self.world, self.machines, self.threads, threads_are_share=True)


def flavour_of(version: str) -> Flavour:
    """Return which mpirun this is, by the output of --version."""
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prterun")):
        return "openmpi"
    if any(name in version for name in ("HYDRA", "Intel(R) MPI", "MPICH", "mvapich", "MVAPICH")):
        return "hydra"
    first = next(iter(version.strip().splitlines()), "nothing")
    raise LaunchError(
        f"mpirun is neither OpenMPI's nor hydra's (MPICH, Intel MPI, MVAPICH): it prints {first!r}. "
        "Load the one you want, or name it with launch.mpirun"
    )


def mpirun_command(
    rank_command: RankCommand,
    flavour: Flavour,
    world: int,
    hosts: tuple[Host, ...],
    name: str,
    environ: Mapping[str, str],
    *,
    cpus: int,
    as_root: bool,
) -> ProgramCommand:
    """Return the mpirun of a config; `name` is what the ranks of this launch share."""
    config = rank_command.config
    variables = {**config.launch.environment, **launch_variables(name)}
    if hosts:
        # mpirun fills the hosts in order: rank 0 is on the first one.
        variables.setdefault("MASTER_ADDR", hosts[0].address)
    threads = config.distributed.threads_per_rank
    if threads != "auto":
        variables.setdefault("OMP_NUM_THREADS", str(threads))
    command = (rank_command.python, *rank_command.train())
    mpirun = config.launch.mpirun
    if flavour == "openmpi":
        argv = [mpirun, "-np", str(world)]
        argv += ["--host", ",".join(map(str, hosts))] if hosts else []
        argv += ["--allow-run-as-root"] if as_root else []
        argv += ["--oversubscribe"] if not hosts and world > cpus else []
        # By default it binds a rank to one core, which all its threads would share.
        argv += ["--bind-to", "none"]
        for variable in [*variables, SECRET, *_forwarded(environ, variables)]:
            argv += ["-x", variable]
    else:
        argv = [mpirun, "-n", str(world)]
        argv += ["-hosts", ",".join(map(str, hosts))] if hosts else []
        argv += ["-bind-to", "none", "-genvall"]
    # OpenMPI's kills its ranks on SIGTERM, and they outlive it if it is killed itself; hydra's
    # forwards SIGTERM, does not know SIGUSR2, and its ranks end with it.
    stops_by, ends_by = ("SIGUSR2", "SIGTERM") if flavour == "openmpi" else ("SIGTERM", "SIGKILL")
    # Without hosts all ranks share the CPUs of this machine.
    share = None if hosts else max(1, owned_cpus(environ).value // world)
    return ProgramCommand(
        "mpirun", rank_command, world, max(1, len(hosts)), share, (*argv, *command), variables, stops_by, ends_by
    )


def _forwarded(environ: Mapping[str, str], ours: Iterable[str]) -> list[str]:
    wanted = {name for name in environ if name in _FORWARDED or name.startswith(_FORWARDED_KINDS)}
    return sorted(wanted - {*ours, SECRET})
