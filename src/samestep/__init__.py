"""Distributed PyTorch training that is the same run at any size.

A config and a task, trained by `samestep train`, or your own loop:

    import samestep

    with samestep.start("config.yaml") as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for epoch in run.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep.version import __version__ as __version__

if TYPE_CHECKING:
    from samestep import errors as errors
    from samestep import losses as losses
    from samestep.bench.programs import benchmark_strong_scaling as benchmark_strong_scaling
    from samestep.bench.programs import benchmark_weak_scaling as benchmark_weak_scaling
    from samestep.config import Config as Config
    from samestep.config import DistributedConfig as DistributedConfig
    from samestep.config import load_config as load_config
    from samestep.data import orders as orders
    from samestep.data.batch import LaneBatch as LaneBatch
    from samestep.data.generated import Generated as Generated
    from samestep.data.iterable import Strided as Strided
    from samestep.data.orders import Order as Order
    from samestep.distributed.context import RunContext as RunContext
    from samestep.distributed.context import create_run_context as create_run_context
    from samestep.distributed.hardware import detect_hardware as detect_hardware
    from samestep.errors import SamestepError as SamestepError
    from samestep.errors import UserError as UserError
    from samestep.evaluation import retrieval as retrieval
    from samestep.launch.run.notebook import notebook_launcher as notebook_launcher
    from samestep.optim.schedules import Schedule as Schedule
    from samestep.reduce.buffer_slots import Concatenate as Concatenate
    from samestep.run.run import Run as Run
    from samestep.step.step import Step as Step
    from samestep.step.step_log import StepRecord as StepRecord
    from samestep.tracking.contract import TrackedRun as TrackedRun
    from samestep.tracking.contract import Tracker as Tracker
    from samestep.tracking.listeners import RunListener as RunListener
    from samestep.train import callbacks as callbacks
    from samestep.train.start import start as start
    from samestep.train.task import Task as Task
    from samestep.train.train_once import train_once as train_once

# Imported when first used: `samestep --help` and the config need no torch.
_MODULES = {
    "Concatenate": "samestep.reduce.buffer_slots",
    "Config": "samestep.config",
    "DistributedConfig": "samestep.config",
    "Generated": "samestep.data.generated",
    "LaneBatch": "samestep.data.batch",
    "Order": "samestep.data.orders",
    "Run": "samestep.run.run",
    "RunContext": "samestep.distributed.context",
    "RunListener": "samestep.tracking.listeners",
    "SamestepError": "samestep.errors",
    "Schedule": "samestep.optim.schedules",
    "Step": "samestep.step.step",
    "StepRecord": "samestep.step.step_log",
    "Strided": "samestep.data.iterable",
    "Task": "samestep.train.task",
    "TrackedRun": "samestep.tracking.contract",
    "Tracker": "samestep.tracking.contract",
    "UserError": "samestep.errors",
    "benchmark_strong_scaling": "samestep.bench.programs",
    "benchmark_weak_scaling": "samestep.bench.programs",
    "callbacks": "samestep.train",
    "create_run_context": "samestep.distributed.context",
    "detect_hardware": "samestep.distributed.hardware",
    "errors": "samestep",
    "load_config": "samestep.config",
    "losses": "samestep",
    "notebook_launcher": "samestep.launch.run.notebook",
    "orders": "samestep.data",
    "retrieval": "samestep.evaluation",
    "start": "samestep.train.start",
    "train_once": "samestep.train.train_once",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'samestep' has no attribute {name!r}")
    home = import_module(_MODULES[name])
    # These are modules: importing them makes them attributes of their package.
    if name in ("callbacks", "errors", "losses", "orders", "retrieval"):
        return import_module(f"{home.__name__}.{name}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
