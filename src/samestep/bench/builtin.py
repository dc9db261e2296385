"""The config of what is measured where none is given. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.config import Config, load_config

_TASK = f"{Path(__file__).resolve().with_name('builtin_tasks.py')}:Mlp"


def builtin_config(**params: Any) -> Config:
    """Return a small training that has everything that one has."""
    return load_config(
        {
            "name": "built-in",
            "task": _TASK,
            "params": params,
            "global_batch": 128,
            "lanes": 1,
            "steps": 1,
            "optimizer": {"name": "adamw", "lr": 0.001},
        }
    )


def is_builtin(config: Config) -> bool:
    """Return whether it trains what is built in."""
    return config.task == _TASK
