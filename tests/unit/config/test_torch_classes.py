"""What torch has, without importing it: the same as with."""

from __future__ import annotations

import inspect
import subprocess
import sys

import torch
from torch.optim import Optimizer, lr_scheduler

from samestep.config.names import arguments_of, classes_of, torch_optimizers, torch_schedulers


def test_the_source_has_the_classes_and_arguments_of_the_modules() -> None:
    for found, module, base in (
        (torch_optimizers(), torch.optim, Optimizer),
        (torch_schedulers(), lr_scheduler, lr_scheduler.LRScheduler),
    ):
        live = classes_of(module, base)
        assert list(found) == list(live)
        for key, kind in live.items():
            takes = arguments_of(kind, ())
            assert found[key].name == kind.__name__
            assert list(found[key].takes) == list(takes), key
            for name, parameter in takes.items():
                is_needed = parameter.default is inspect.Parameter.empty
                assert (found[key].takes[name].default is inspect.Parameter.empty) == is_needed


def test_a_config_is_read_without_torch() -> None:
    code = (
        "import sys; from samestep.config import load_config; load_config({'global_batch': 8, 'epochs': 1,"
        "'task': 't.py:T', 'optimizer': {'name': 'sgd'}, 'schedule': {'name': 'steplr', 'args': {'step_size': 1}}});"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_nothing_is_refused_where_there_is_no_source() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from samestep.config import load_config;"
        "load_config({'global_batch': 8, 'epochs': 1, 'task': 't.py:T', 'optimizer': {'name': 'zzz'}})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
