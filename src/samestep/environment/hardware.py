"""Hardware of this machine, and the limits of control groups. No torch here."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """Those of nccl and gloo that this torch is built with."""
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


@dataclass(frozen=True)
class Limits:
    """None where there is no limit."""

    cpus: float | None
    """Number of CPUs whose time may be used."""
    memory: int | None
    """Bytes."""


def read_limits(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Limits:
    """Return the tightest limits of this process's groups and of all groups around them."""
    cpus, memory = [], []
    for folder in _groups(root, read_text(membership) or ""):
        quota, period = _numbers(folder, "cpu.max") or [*_old_quota(folder), 0, 0][:2]
        if period:
            cpus.append(quota / period)
        memory += _numbers(folder, "memory.max") or _numbers(folder, "memory.limit_in_bytes")
    return Limits(min(cpus, default=None), min(memory, default=None))


def read_text(path: Path) -> str | None:
    """Return a file of the kernel; None where this kernel or container has none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _groups(root: Path, membership: str) -> Iterator[Path]:
    """Yield the folders of lines such as '0::/job/step' and, in version 1, '4:cpu,cpuacct:/job'."""
    for line in membership.splitlines():
        _, kinds, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for top in (root / kinds, *(root / kind for kind in kinds.split(","))):
            yield from (top / folder for folder in (own, *own.parents))


def _numbers(folder: Path, name: str) -> list[int]:
    """Return a file's numbers; none if it is not there, or holds 'max' or -1, which is no limit."""
    words = (read_text(folder / name) or "").split()
    numbers = [number for word in words if (number := whole_number(word)) is not None]
    return numbers if len(numbers) == len(words) else []


def _old_quota(folder: Path) -> list[int]:
    quota, period = (_numbers(folder, f"cpu.cfs_{which}_us") for which in ("quota", "period"))
    return [*quota, *period] if quota else []
