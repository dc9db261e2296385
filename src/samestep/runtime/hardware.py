"""What this machine offers to a training run. Imports torch only to look."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.runtime.environment import Fact, process_environment


def detect_platform(environ: Mapping[str, str]) -> Fact[str]:
    """Where this runs: colab, kaggle or local."""
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return Fact("kaggle", "KAGGLE_KERNEL_RUN_TYPE is set")
    if "COLAB_RELEASE_TAG" in environ or "COLAB_GPU" in environ:
        return Fact("colab", "COLAB_RELEASE_TAG or COLAB_GPU is set")
    return Fact("local", "no Kaggle or Colab variable is set")


@dataclass(frozen=True)
class Hardware:
    """What this machine offers to a training run."""

    device_count: int
    devices: tuple[str, ...]
    cpus: Fact[int]
    backends: tuple[str, ...]
    host: str
    platform: Fact[str]
    cuda: Fact[bool]

    @property
    def cuda_available(self) -> bool:
        return self.cuda.value


def detect_hardware(environ: Mapping[str, str] | None = None) -> Hardware:
    """Look at this machine: GPUs, CPUs, communication backends, platform."""
    import torch

    environ = process_environment() if environ is None else environ
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        cuda = Fact(True, f"torch sees {count} GPU(s)")
    elif torch.version.cuda is None:
        cuda = Fact(False, f"torch {torch.__version__} is built without CUDA")
    else:
        cuda = Fact(False, "torch is built with CUDA but sees no GPU")
    return Hardware(
        device_count=count,
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        cpus=owned_cpus(),
        backends=_backends(),
        host=socket.gethostname(),
        platform=detect_platform(environ),
        cuda=cuda,
    )


def owned_cpus() -> Fact[int]:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return Fact(len(os.sched_getaffinity(0)), "CPUs this process may run on")
    return Fact(os.cpu_count() or 1, "CPUs of this machine")


def _backends() -> tuple[str, ...]:
    import torch.distributed as dist

    found = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    return tuple(name for name, available in found.items() if available())
