"""Programs that some tests need and a user's machine need not have: Slurm, two MPIs, sshd."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

COMPONENTS = (
    "mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec", "mpiexec.openmpi", "mpiexec.mpich",
    "mpiexec.hydra", "orterun", "munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "squeue",
    "scontrol", "scancel", "sacct", "sinfo", "sshd", "ssh", "ssh-keygen",
)  # fmt: skip


def missing_commands(*commands: str) -> str | None:
    """Return a sentence that names those of the commands that are not installed, or None."""
    missing = [command for command in commands if shutil.which(command) is None]
    if not missing:
        return None
    return f"not installed: {', '.join(missing)} (tests/cluster/install.sh installs them)"


def path_without_components(folder: Path) -> str:
    """Return this process's PATH without the components: folders that have one are linked file by file."""
    kept = []
    for number, place in enumerate(os.environ["PATH"].split(os.pathsep)):
        programs = Path(place)
        if not any((programs / name).exists() for name in COMPONENTS):
            kept.append(place)
            continue
        links = folder / str(number)
        links.mkdir(parents=True)
        for program in programs.iterdir():
            if program.name not in COMPONENTS:
                (links / program.name).symlink_to(program)
        kept.append(str(links))
    return os.pathsep.join(kept)
