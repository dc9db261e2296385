"""Hardware that torch sees: GPUs and communication backends, beside the CPUs."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist

from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware, cpu_limit, detect_platform, owned_cpus
from samestep.environment.variables import process_environment


def detect_hardware(environ: Mapping[str, str] | None = None) -> Hardware:
    """Return what this machine has: GPUs, CPUs, communication backends, platform.

    Values that a limit or a variable decides carry their reason:

        hardware = samestep.detect_hardware()
        print(hardware.cpus.value, hardware.cpus.reason)   # 4 CPUs this process may run on
        print(hardware.device_count, hardware.devices)     # 1 ('NVIDIA H200',)

    Args:
        environ: Environment variables to read instead of this process's own.
    """
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
        cpus=owned_cpus(environ),
        backends=_backends(),
        host=socket.gethostname(),
        platform=detect_platform(environ),
        cuda=cuda,
        cpu_limit=cpu_limit(environ),
    )


def gpu_id(index: int) -> str:
    """Return what distinguishes a GPU from every other, whatever its index is here."""
    properties = torch.cuda.get_device_properties(index)
    return str(getattr(properties, "uuid", f"number {index}"))


def _backends() -> tuple[str, ...]:
    found = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    return tuple(name for name, available in found.items() if available())
