"""Distributed PyTorch training that is the same run at any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from samestep import orders as orders
    from samestep.assemble import train_once as train_once
    from samestep.config import Config as Config
    from samestep.config import DistributedConfig as DistributedConfig
    from samestep.config import load_config as load_config
    from samestep.data import LaneBatch as LaneBatch
    from samestep.errors import SamestepError as SamestepError
    from samestep.run import Run as Run
    from samestep.run import start as start
    from samestep.runtime.context import RunContext as RunContext
    from samestep.runtime.context import create_run_context as create_run_context
    from samestep.runtime.hardware import detect_hardware as detect_hardware
    from samestep.step import Step as Step
    from samestep.streams import strided as strided
    from samestep.task import Schedule as Schedule
    from samestep.task import Task as Task

# Found when first asked for: `samestep --help` and the config need no torch.
_HOMES = {
    "Config": "samestep.config",
    "DistributedConfig": "samestep.config",
    "LaneBatch": "samestep.data",
    "Run": "samestep.run",
    "RunContext": "samestep.runtime.context",
    "SamestepError": "samestep.errors",
    "Schedule": "samestep.task",
    "Step": "samestep.step",
    "Task": "samestep.task",
    "create_run_context": "samestep.runtime.context",
    "detect_hardware": "samestep.runtime.hardware",
    "load_config": "samestep.config",
    "orders": "samestep.orders",
    "start": "samestep.run",
    "strided": "samestep.streams",
    "train_once": "samestep.assemble",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_HOMES[name])
    return module if _HOMES[name] == f"samestep.{name}" else getattr(module, name)
