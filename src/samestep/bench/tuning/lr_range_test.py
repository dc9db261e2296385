"""The learning-rate range test: a short separate run at ever higher rates."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.bench.tuning.lr_suggestion import Curve, RangeTest, suggest, what_is_wrong
from samestep.checkpoint.ownership import claim
from samestep.config import Config, load_config
from samestep.config.measuring_run import measuring_run
from samestep.config.optim import SpeedConfig
from samestep.distributed.context import RunContext
from samestep.errors import ConfigError, NonFiniteLoss, RangeTestError
from samestep.run.run import Run
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener
from samestep.tracking.progress import TrainingProgress
from samestep.train.task import Task, load_task, stepper
from samestep.train.task_optim import choose_optimizers

FOLDER = "tune-lr"
"""Where in the run's directory the test is kept; the run itself is not touched."""


@dataclass(frozen=True)
class Target:
    """The config file whose learning rate is to be written, and the overrides it is used with."""

    file: Path
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class RangeTestResult:
    """The measurements of a range test, and its suggestions."""

    curve: Curve
    suggestions: dict[str, float]
    """By rule; empty if something is wrong."""
    wrong: str | None
    """Why there are no suggestions."""
    key: str | None
    """The config's key for the rate, if it is known."""
    rate_now: float
    """The rate in the config at present."""
    folder: Path

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "suggestions": self.suggestions,
            "wrong": self.wrong,
            "key": self.key,
            "rate_now": self.rate_now,
            "stopped": self.curve.stopped,
            "test": vars(self.curve.test),
            "rates": self.curve.rates,
            "losses": self.curve.losses,
            "smoothed": self.curve.smoothed,
        }


def find_lr(
    config: Config, context: RunContext, test: RangeTest, key: str | None = None, target: Target | None = None
) -> RangeTestResult:
    """Run a range test; every rank calls this and gets the same result.

    Args:
        key: the config's key for the learning rate; by default it is found.
        target: the config that the suggestion will be for. Nothing is written here, but what would
            prevent it is raised before the first step.

    Raises:
        RangeTestError: if the test cannot be run with these settings.
    """
    claim(config.run_path)  # the run itself may come later
    with Run(range_test_config(config, test.steps), context) as run:
        task = load_task(config)
        key = key or default_key(config, task)
        if target is not None:
            _refuse_unwritable(target, key, task)
        model, source, rates = _prepare(run, task, key)
        curve = Curve(test)
        _measure(run, task, model, source, rates, curve)
    wrong = what_is_wrong(curve)
    return RangeTestResult(curve, {} if wrong else suggest(curve), wrong, key, rates.base, run.run_dir)


def range_test_config(config: Config, steps: int) -> Config:
    """Return the config of the short run: in its own directory, without saves, schedules or averages."""
    return measuring_run(
        config,
        run_dir=str(config.run_path / FOLDER),
        steps=steps,
        log_every=1,  # each loss decides whether the test continues
        on_nonfinite="stop",
        ema=None,
        speed=SpeedConfig(graph=False),  # too short to be worth a capture
    )


def default_key(config: Config, task: Task) -> str | None:
    """Return the config's key for the learning rate; None if it cannot be determined."""
    if config.optimizer is not None:
        return "optimizer.lr"
    takes_it = "lr" in inspect.signature(type(task)).parameters
    return "params.lr" if takes_it or "lr" in config.params else None


class GroupRates:
    """Sets the rates of all parameter groups, which keep their ratios to the base rate."""

    def __init__(self, optimizers: Sequence[Optimizer], base: float) -> None:
        self.base = base
        self._groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._ratios = [group["lr"] / base for group in self._groups]

    def set(self, base: float) -> None:
        """Set the base rate, and with it the rate of every group."""
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            group["lr"] = base * ratio


def _prepare(run: Run, task: Task, key: str | None) -> tuple[nn.Module, Any, GroupRates]:
    run.once_per_node(task.prepare_data)
    run.on_all_ranks(task.prepare_ranks)
    data = task.train_data()
    modules = [task.model(), *task.extra_modules()]
    optimizers = choose_optimizers(run, task, modules)
    source = run.source(data, task.order(data), task.collate)
    objects: list[Any] = [*modules, *optimizers]
    model: nn.Module = run.prepare(*objects)[0]
    rates = GroupRates(optimizers, base_rate(run.config, task, key, optimizers))
    return model, source, rates


class _CurveListener(RunListener):
    """Puts every step's loss on the curve."""

    draws = False

    def __init__(self, curve: Curve) -> None:
        self._curve = curve

    def on_record(self, record: StepRecord) -> None:
        self._curve.add(record.loss)


def _measure(run: Run, task: Task, model: nn.Module, source: Any, rates: GroupRates, curve: Curve) -> None:
    test, context = curve.test, run.context
    progress = TrainingProgress(test.steps, run.batch.global_batch, context.log, context.is_main)
    run.add_listener(progress)
    run.add_listener(_CurveListener(curve))
    model.train()
    run_step = stepper(task, model)
    with progress:
        try:
            for step in run.steps(source):
                rates.set(test.rate(step.index))
                run_step(step)
                if curve.stopped:
                    run.stop(curve.stopped)
        except NonFiniteLoss:
            # The divergence the test looks for; the ranks have agreed on it, and all end here.
            curve.stop("the loss or the weights are NaN or infinite")


def base_rate(config: Config, task: Task, key: str | None, optimizers: Sequence[Optimizer]) -> float:
    """Return the present rate of the key; the first group's if that cannot be determined."""
    value = None if key is None else _value_at(config, task, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        key, value = "the optimizer", optimizers[0].param_groups[0]["lr"]
    if not value > 0:
        raise RangeTestError(
            f"{key} has a learning rate of {value:g}: set one above 0, so that the parameter "
            "groups can keep their ratios to it"
        )
    return float(value)


def _value_at(config: Config, task: Task, key: str) -> Any:
    first, *rest = key.split(".")
    if first == "params" and len(rest) == 1 and rest[0] not in config.params:
        parameter = inspect.signature(type(task)).parameters.get(rest[0])
        return None if parameter is None else parameter.default
    value: Any = config
    for name in (first, *rest):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


def _refuse_unwritable(target: Target, key: str | None, task: Task) -> None:
    if key is None:
        raise RangeTestError(
            f"--write does not know the learning rate's key: the config has no optimizer section, "
            f"and {type(task).__name__} takes no lr. Give the key as --key params.NAME, or omit "
            "--write"
        )
    try:
        load_config(target.file, [*target.overrides, f"{key}=0.001"])
    except ConfigError as error:
        reasons = "; ".join(f"{mistake.path} {mistake.message}" for mistake in error.mistakes)
        raise RangeTestError(f"--key is {key}, but {target.file} cannot hold it: {reasons}") from None
    inside = key.rpartition(".")[0]
    holder = _value_at(load_config(target.file, target.overrides), task, inside)
    if inside.startswith("params.") and not isinstance(holder, (dict, type(None))):
        raise RangeTestError(f"--key is {key}, but {inside} is {holder!r}, which has no keys")
    first, _, name = key.partition(".")
    if first == "params" and not _takes(task, name.partition(".")[0]):
        raise RangeTestError(
            f"--key is {key}, but {type(task).__name__} takes no {name}: give the name of one of its arguments"
        )


def _takes(task: Task, name: str) -> bool:
    parameters = inspect.signature(type(task)).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return any_name or name in parameters
