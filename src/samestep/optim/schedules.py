"""Learning rates over a run, by name: curves of our own, and the schedulers of torch.

Rates are scaled with the global batch, against the batch that they were chosen for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from samestep.config import Config
from samestep.config.lr_curves import Every
from samestep.config.names import (
    PLATEAU,
    Named,
    ScheduleKind,
    arguments_of,
    classes_of,
    schedule_kind,
    schedule_mistakes,
    with_tuples,
)
from samestep.config.optim import ScheduleConfig
from samestep.errors import ConfigError, Mistake


class Warmup(LRScheduler):
    """Raises an optimizer's rates from near 0 to their full height in `length` steps.

    Step n, counted from 0, has (n + 1) / (length + 1) of the full rate.
    """

    def __init__(self, optimizer: Optimizer, length: int) -> None:
        self.optimizer = optimizer
        self.length = length
        self._done = 0
        self._full = _rates(optimizer)
        self._apply()

    @property
    def is_over(self) -> bool:
        return self._done >= self.length

    def step(self, epoch: int | None = None) -> None:
        if not self.is_over:
            self._done += 1
            self._apply()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The full rates inside; what they are in the end is what the rise goes to."""
        _set_rates(self.optimizer, self._full)
        yield
        self._full = _rates(self.optimizer)
        self._apply()

    def _apply(self) -> None:
        share = (self._done + 1) / (self.length + 1) if not self.is_over else 1.0
        _set_rates(self.optimizer, [share * rate for rate in self._full])

    def get_last_lr(self) -> list[float | Tensor]:
        return [*_rates(self.optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "full": list(self._full)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done, self._full = state_dict["done"], list(state_dict["full"])


class Warmed(LRScheduler):
    """Another scheduler, whose rates a warm-up lowers; one that `waits` begins after it."""

    def __init__(self, inner: LRScheduler, warmup: Warmup, waits: bool) -> None:
        self.optimizer = inner.optimizer
        self._inner, self._warmup, self._waits = inner, warmup, waits

    def step(self, *values: Any) -> None:
        """Move on; the values are the inner scheduler's."""
        if self._warmup.is_over:
            self._inner.step(*values)
        elif not self._waits:
            with self._warmup.set_aside():
                self._inner.step(*values)

    def get_last_lr(self) -> list[float | Tensor]:
        return [*_rates(self.optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a CUDA graph reads it where it is
        else:
            group["lr"] = rate


@dataclass(frozen=True)
class Schedule:
    """A learning-rate scheduler and when it steps.

    After an evaluation it gets the value of `best.metric`, as ReduceLROnPlateau takes it.

    Example:
        def schedules(self, optimizers, steps):
            return [Schedule(CosineAnnealingLR(optimizers[0], T_max=steps), every="step")]
    """

    scheduler: LRScheduler
    every: Every = "step"


def build_schedules(
    section: ScheduleConfig,
    optimizers: Sequence[Optimizer],
    steps: int | None,
    steps_per_epoch: int | None,
    mode: Literal["min", "max"] = "min",
) -> list[Schedule]:
    """Return the schedules that a config names, for optimizers with their full rates.

    `steps` is the length of the run, None if it is not known; `mode` is for plateau: whether
    lower or higher is better.
    """
    known = _named_schedulers()
    kind = schedule_kind(section, known)
    mistakes = schedule_mistakes(section, known)
    if not isinstance(kind, Mistake):
        mistakes += _length_mistakes(section, kind, steps, steps_per_epoch)
    if mistakes or isinstance(kind, Mistake):
        raise ConfigError("the schedule section", mistakes)
    warmup = _warmup_steps(section, steps)
    length = _length(kind.every, steps, steps_per_epoch, warmup)
    found: list[Schedule] = []
    for optimizer in optimizers:
        found += _schedules_of(optimizer, section, kind, length, warmup, mode)
    return found


def _named_schedulers() -> dict[str, Named]:
    found = classes_of(lr_scheduler, LRScheduler)
    return {key: Named(kind.__name__, arguments_of(kind, ())) for key, kind in found.items()}


def describe_schedule(section: ScheduleConfig, schedules: Sequence[Schedule]) -> str:
    """Describes name, warm-up and pace."""
    every = {s.every for s in schedules if not isinstance(s.scheduler, Warmup)}
    warmups = [s.scheduler.length for s in schedules if isinstance(s.scheduler, Warmup)]
    pace = f", moving on with every {every.pop()}" if every else ""
    rise = f", after {warmups[0]} steps of warm-up" if warmups else ""
    return f"{section.name}{pace}{rise}"


# -- what is wrong -------------------------------------------------------------------------


def _length_mistakes(
    section: ScheduleConfig, kind: ScheduleKind, steps: int | None, steps_per_epoch: int | None
) -> list[Mistake]:
    unknown = "the run's length, which is not known for this data: set steps, or steps_per_epoch"
    warmup = _warmup_steps(section, steps)
    if steps is not None and steps <= warmup:
        message = f"{warmup} steps are not fewer than the run's {steps}"
        return [Mistake("schedule.warmup", message)]
    if steps is None and isinstance(section.warmup, float):
        return [Mistake("schedule.warmup", f"a share needs {unknown}; or give steps")]
    if kind.needs_length and steps is None:
        return [Mistake("schedule.name", f"{section.name} needs {unknown}")]
    if kind.needs_length and kind.every == "epoch" and steps_per_epoch is None:
        message = f"{section.name} by epochs needs their length: set steps_per_epoch"
        return [Mistake("schedule.every", message)]
    return []


def _warmup_steps(section: ScheduleConfig, steps: int | None) -> int:
    if isinstance(section.warmup, int):
        return section.warmup
    return 0 if steps is None else max(1, round(section.warmup * steps))


def _length(every: Every, steps: int | None, per_epoch: int | None, warmup: int) -> int | None:
    """Return how often a schedule moves on in the run; with steps, it begins after the warm-up."""
    if steps is None:
        return None
    if every == "step":
        return steps - warmup
    return None if per_epoch is None else math.ceil(steps / per_epoch)


# -- making them ---------------------------------------------------------------------------


def _schedules_of(
    optimizer: Optimizer,
    section: ScheduleConfig,
    kind: ScheduleKind,
    length: int | None,
    warmup: int,
    mode: Literal["min", "max"],
) -> list[Schedule]:
    inner = _scheduler(optimizer, section, kind, length, mode)
    if not warmup:
        return [] if inner is None else [Schedule(inner, kind.every)]
    rise = Warmup(optimizer, warmup)
    if inner is None:
        return [Schedule(rise)]
    # The rise last: what waits for its end must not move on in the step that ends it.
    return [Schedule(Warmed(inner, rise, waits=kind.every == "step"), kind.every), Schedule(rise)]


def _scheduler(
    optimizer: Optimizer, section: ScheduleConfig, kind: ScheduleKind, length: int | None, mode: Literal["min", "max"]
) -> LRScheduler | None:
    args: Mapping[str, Any] = with_tuples(section.args)
    try:
        if kind.curve is not None:
            given = {"length": length, "final": section.final}
            wanted = arguments_of(kind.curve, ())
            curve = kind.curve(**{k: v for k, v in given.items() if k in wanted}, **args)
            # A checkpoint holds nothing of functions that are created again.
            return LambdaLR(optimizer, lambda moved: curve(moved))
        if kind.name in PLATEAU:
            least = [section.final * float(group["lr"]) for group in optimizer.param_groups]
            return ReduceLROnPlateau(optimizer, mode, min_lr=least, **args)
        if kind.name == "constant":
            return None
        make = cast("Callable[..., LRScheduler]", classes_of(lr_scheduler, LRScheduler)[kind.name])
        if "cycle_momentum" in arguments_of(make, ()):
            make = partial(make, cycle_momentum=False)
        return make(optimizer, **args)
    except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
        message = f"{section.name} refuses {section.args}: {error}"
        raise ConfigError("the schedule section", [Mistake("schedule.args", message)]) from error


def lr_factor(config: Config, global_batch: int) -> float:
    """Return what `lr_scaling` multiplies every learning rate by."""
    if config.lr_scaling == "none" or config.base_batch is None:
        return 1.0
    times = global_batch / config.base_batch
    return times if config.lr_scaling == "linear" else math.sqrt(times)


def describe_scaling(config: Config, global_batch: int) -> str | None:
    """One line on what was scaled, or could be; None if there is nothing to report."""
    base = config.base_batch
    if base is None or base == global_batch:
        return None
    batches = f"global batch {global_batch}, base_batch {base}"
    if config.lr_scaling != "none":
        factor = lr_factor(config, global_batch)
        return f"Learning rates are multiplied by {factor:.6g} (lr_scaling {config.lr_scaling}: {batches})"
    times = global_batch / base
    return (
        f"Learning rates are as they were set ({batches}): lr_scaling sqrt would multiply them by "
        f"{math.sqrt(times):.6g}, linear by {times:.6g}"
    )
