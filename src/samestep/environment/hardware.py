"""Hardware of this machine. No torch here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.environment.cgroups import read_limits
from samestep.environment.fact import Fact
from samestep.environment.torch_build import installed_torch
from samestep.parsing.numbers import whole_number

PLATFORMS = ("local", "colab", "kaggle")


def detect_platform(environ: Mapping[str, str]) -> Fact[str]:
    """Return where this runs: colab, kaggle or local."""
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return Fact("kaggle", "KAGGLE_KERNEL_RUN_TYPE is set")
    if "COLAB_RELEASE_TAG" in environ or "COLAB_GPU" in environ:
        return Fact("colab", "COLAB_RELEASE_TAG or COLAB_GPU is set")
    return Fact("local", "no Kaggle or Colab variable is set")


@dataclass(frozen=True)
class Hardware:
    """The hardware of this machine."""

    device_count: int
    """GPUs that torch sees."""
    devices: tuple[str, ...]
    """Their names."""
    cpus: Fact[int]
    """The number that the ranks here share."""
    backends: tuple[str, ...]
    """Of nccl and gloo, what this torch is built with."""
    host: str
    platform: Fact[str]
    """colab, kaggle or local."""
    cuda: Fact[bool]
    """Whether GPUs can be used."""
    cpu_limit: Fact[int] | None = None
    """What a container or a batch system grants the ranks here, whatever CPUs they see."""

    @property
    def cuda_available(self) -> bool:
        return self.cuda.value


def expects_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether this machine seems to offer a GPU: a guess for before torch is imported."""
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def hardware_without_torch(environ: Mapping[str, str]) -> Hardware | None:
    """Return what a machine without GPUs offers; None where only torch can tell."""
    torch = installed_torch()
    if torch is None or expects_gpu(environ):
        return None
    if torch.cuda is None:
        why = f"torch {torch.version} is built without CUDA"
    elif environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        why = "CUDA_VISIBLE_DEVICES hides every GPU"
    else:
        why = "torch is built with CUDA but this machine has no GPU device"
    return Hardware(
        device_count=0,
        devices=(),
        cpus=owned_cpus(environ),
        backends=torch.backends,
        host=socket.gethostname(),
        platform=detect_platform(environ),
        cuda=Fact(False, why),
        cpu_limit=cpu_limit(environ),
    )


def allowed_cpus() -> tuple[int, ...]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def owned_cpus(environ: Mapping[str, str]) -> Fact[int]:
    """Return how many CPUs the ranks here share, by the tightest of all limits."""
    seen, limit = Fact(len(allowed_cpus()), "CPUs this process may run on"), cpu_limit(environ)
    return limit if limit is not None and limit.value < seen.value else seen


def cpu_limit(environ: Mapping[str, str]) -> Fact[int] | None:
    """Return what a container or a batch system grants the ranks here; None if nothing limits them."""
    found: list[Fact[int]] = []
    quota = read_limits().cpus
    if quota is not None:
        found.append(Fact(max(1, int(quota)), "CPUs of the container's limit"))
    given = environ.get("SLURM_CPUS_ON_NODE", "")
    number = whole_number(given)
    # Where mpirun starts its daemons by a Slurm step, that step is not what the job was given.
    if number is not None and "OMPI_COMM_WORLD_RANK" not in environ:
        found.append(Fact(number, f"SLURM_CPUS_ON_NODE={given}"))
    return min(found, key=lambda fact: fact.value, default=None)
