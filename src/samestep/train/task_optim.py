"""Updates a training's weights: by the task's own optimizers and schedules, or the config's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep.data.batch import Source
from samestep.errors import TaskError
from samestep.optim.optimizers import build_optimizers, describe_optimizer
from samestep.optim.schedules import Schedule, build_schedules, describe_schedule
from samestep.run.run import Run
from samestep.train.task import Task


def choose_optimizers(run: Run, task: Task, modules: Sequence[nn.Module]) -> list[Optimizer]:
    """Return the optimizers of a model and extra modules, their rates scaled by `lr_scaling`."""
    section = run.config.optimizer
    if section is None:
        found = _as_list(task.optimizers(modules[0]), Optimizer, "optimizers")
    else:
        _refuse_both(task, "optimizers", "optimizer")
        found = build_optimizers(section, modules, run.context.device)
        run.context.log.main("Optimizers: " + "; ".join(map(describe_optimizer, found)))
    _scale_rates(found, run.scaled_lr(1.0))
    return found


def choose_schedules(
    run: Run, task: Task, optimizers: Sequence[Optimizer], source: Source, evaluates: bool
) -> list[Schedule]:
    """Return the schedules of a training over a source of steps."""
    config, steps = run.config, run.total_steps(source)
    if config.schedule is None:
        found = _as_list(task.schedules(optimizers, steps), Schedule, "schedules")
        _refuse_wrong_pace(found)
    else:
        _refuse_both(task, "schedules", "schedule")
        per_epoch = source.steps_per_epoch
        mode = config.best.mode
        found = build_schedules(config.schedule, optimizers, steps, per_epoch, mode)
        run.context.log.main(f"Schedule: {describe_schedule(config.schedule, found)}")
    if not evaluates and any(schedule.every == "evaluation" for schedule in found):
        raise TaskError(
            "a schedule moves on with every evaluation, and there is none: valid_data() must give "
            "a validation set, and evaluation.every_epochs or every_steps be set"
        )
    return found


def _scale_rates(optimizers: Sequence[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(factor)
            else:
                group["lr"] *= factor


def _refuse_both(task: Task, method: str, section: str) -> None:
    if getattr(getattr(task, method), "__func__", None) is not getattr(Task, method):
        raise TaskError(
            f"the config has a section {section}, and {type(task).__name__} defines {method}(): remove one of them"
        )


def _refuse_wrong_pace(schedules: Sequence[Schedule]) -> None:
    for schedule in schedules:
        takes_value = isinstance(schedule.scheduler, ReduceLROnPlateau)
        if takes_value != (schedule.every == "evaluation"):
            raise TaskError(
                f"schedules() gave a {type(schedule.scheduler).__name__} with every="
                f"{schedule.every!r}: ReduceLROnPlateau, and only it, has every='evaluation'"
            )


def _as_list(value: Any, kind: type, what: str) -> list[Any]:
    items = [value] if isinstance(value, kind) else list(value or ())
    for item in items:
        if not isinstance(item, kind):
            raise TaskError(f"{what}() gave a {type(item).__name__}: it must give {kind.__name__} objects")
    return items
