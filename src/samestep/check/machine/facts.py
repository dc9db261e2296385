"""The facts of one machine as one process sees them: plain values, the input of all checks."""

from __future__ import annotations

import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.check.machine.findings import Finding, Place
from samestep.config import Config
from samestep.distributed.placement import Placement
from samestep.environment.hardware import Hardware, allowed_cpus, hardware_without_torch, read_limits, read_text
from samestep.environment.interfaces import Interface, list_interfaces
from samestep.environment.torch_build import installed_torch
from samestep.version import __version__

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
)
"""Only these are sent: an environment holds secrets."""


@dataclass(frozen=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """A machine as one process finds it."""

    hardware: Hardware
    versions: Mapping[str, str]
    """Versions of python, torch and samestep."""
    processor: str
    """The architecture, and the instructions that torch chose its kernels by."""
    cpus: tuple[int, ...]
    """Numbers of the CPUs this process may run on."""
    numa: tuple[tuple[int, ...], ...]
    """The CPUs of each part of the machine that has its own memory."""
    cpu_quota: float | None
    """CPUs of the container's limit."""
    memory: Space
    shared_memory: Space | None
    open_files: tuple[int, int]
    """The soft and the hard limit."""
    nvidia_devices: int
    """Under /dev, whether or not torch sees them."""
    gpu_ids: tuple[str, ...]
    """What distinguishes a GPU from every other, whatever its index is here."""
    interfaces: tuple[Interface, ...]
    variables: Mapping[str, str]

    @property
    def host(self) -> str:
        return self.hardware.host


@dataclass(frozen=True)
class Load:
    """The load that a run puts on this machine."""

    world: int = 1
    nodes: int = 1
    node: int = 0
    ranks_here: int = 1
    threads: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    workers: int = 0
    """Loader processes per rank."""
    prefetch: int = 2
    bits: bool = True
    """Whether identical bits are promised."""


@dataclass(frozen=True)
class RankReport:
    """The report of a rank to the others."""

    place: Place
    machine: Machine
    load: Load
    config: str | None
    """A digest; None without a config."""
    findings: tuple[Finding, ...]


def load_of(place: Placement | None, config: Config | None) -> Load:
    """Return what the run puts on this machine; without a placement, one process."""
    loader = None if config is None else config.loader
    workers = 0 if loader is None else loader.workers
    prefetch = 2 if loader is None else loader.prefetch
    bits = config is None or config.same == "bits"
    if place is None:
        return Load(workers=workers, prefetch=prefetch, bits=bits)
    return Load(
        world=place.world.value,
        nodes=place.nodes.value,
        node=place.node_rank.value,
        ranks_here=place.local_world.value,
        threads=place.threads.value,
        device=place.device.value,
        backend=place.backend.value,
        workers=workers,
        prefetch=prefetch,
        bits=bits,
    )


def inspect_machine(environ: Mapping[str, str], *, quick: bool = False) -> Machine:
    """Return what this process sees of its machine.

    Args:
        quick: Whether the files of torch are enough where there is no GPU: importing it takes seconds.
    """
    limits = read_limits()
    hardware, version, kernels, gpus = _seen_by_torch(environ, quick)
    return Machine(
        hardware=hardware,
        versions={"python": platform.python_version(), "torch": version, "samestep": __version__},
        processor=f"{platform.machine()} {kernels}".rstrip(),
        cpus=allowed_cpus(),
        numa=_numa(),
        cpu_quota=limits.cpus,
        memory=_memory(limits.memory),
        shared_memory=space_of(Path("/dev/shm")),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        nvidia_devices=len([*Path("/dev").glob("nvidia[0-9]*")]),
        gpu_ids=gpus,
        interfaces=list_interfaces(),
        variables={name: environ[name] for name in _VARIABLES if name in environ},
    )


def _seen_by_torch(environ: Mapping[str, str], quick: bool) -> tuple[Hardware, str, str, tuple[str, ...]]:
    """Return the hardware, torch's version, the instructions that it chose, the GPUs."""
    build = installed_torch() if quick and "torch" not in sys.modules else None
    found = None if build is None else hardware_without_torch(environ)
    if build is not None and found is not None:
        return found, build.version, "", ()
    import torch

    from samestep.distributed.hardware import detect_hardware, gpu_id

    hardware = detect_hardware(environ)
    gpus = tuple(gpu_id(index) for index in range(hardware.device_count))
    return hardware, str(torch.__version__), torch.backends.cpu.get_cpu_capability(), gpus


def space_of(folder: Path) -> Space | None:
    """Return the space of the file system at a folder; None if there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(usage.total, usage.free)


def _numa(root: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    lists = [read_text(path) or "" for path in sorted(root.glob("node[0-9]*/cpulist"))]
    return tuple(_cpu_list(text) for text in lists if text)


def _cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's '0-3,8'."""
    cpus: list[int] = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _memory(limit: int | None) -> Space:
    import psutil  # here alone, as in `list_interfaces`

    found = psutil.virtual_memory()
    # A group's usage includes file caches that it may drop, so it shows nothing.
    most = found.total if limit is None else min(found.total, limit)
    return Space(most, min(most, found.available))
