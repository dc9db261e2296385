"""Learning rates over a run, by name: curves of our own, and the schedulers of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from samestep.config.optim import ScheduleConfig
from samestep.errors import ConfigError, Mistake
from samestep.optim.registry import Takes, argument_mistakes, arguments_of, classes_of, with_tuples
from samestep.optim.warmup import Warmed, Warmup

Every = Literal["step", "epoch", "evaluation"]
Curve = Callable[[int], float]
"""The share of the full rate by how often the schedule has moved on."""


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
    """The schedules that a config names, for optimizers with their full rates.

    `steps` is the length of the run, None if it is not known; `mode` is for plateau: whether
    lower or higher is better.
    """
    kind = _kind(section)
    mistakes = [*_mistakes(section, kind), *_length_mistakes(section, kind, steps, steps_per_epoch)]
    if mistakes:
        raise ConfigError("the schedule section", mistakes)
    warmup = _warmup_steps(section, steps)
    length = _length(kind.every, steps, steps_per_epoch, warmup)
    found: list[Schedule] = []
    for optimizer in optimizers:
        found += _schedules_of(optimizer, section, kind, length, warmup, mode)
    return found


def describe_schedule(section: ScheduleConfig, schedules: Sequence[Schedule]) -> str:
    """Describes name, warm-up and pace."""
    every = {s.every for s in schedules if not isinstance(s.scheduler, Warmup)}
    warmups = [s.scheduler.length for s in schedules if isinstance(s.scheduler, Warmup)]
    pace = f", moving on with every {every.pop()}" if every else ""
    rise = f", after {warmups[0]} steps of warm-up" if warmups else ""
    return f"{section.name}{pace}{rise}"


# -- curves: each moves from its beginning to `length`, or for ever --------------------------


def _linear(length: int, final: float) -> Curve:
    return lambda moved: 1 - (1 - final) * min(moved / length, 1.0)


def _cosine(length: int, final: float) -> Curve:
    return lambda moved: final + (1 - final) * _half_cosine(min(moved / length, 1.0))


def _warm_restarts(final: float, *, T_0: int, T_mult: int = 1) -> Curve:  # noqa: N803 - torch's names
    _require("T_0", T_0, isinstance(T_0, int) and T_0 >= 1, "a whole number from 1")
    _require("T_mult", T_mult, isinstance(T_mult, int) and T_mult >= 1, "a whole number from 1")

    def share(moved: int) -> float:
        period = T_0
        if T_mult == 1:
            moved %= period
        while moved >= period:
            moved, period = moved - period, period * T_mult
        return final + (1 - final) * _half_cosine(moved / period)

    return share


def _step(*, step_size: int, gamma: float = 0.1) -> Curve:
    good = isinstance(step_size, int) and step_size >= 1
    _require("step_size", step_size, good, "a whole number from 1")
    _require("gamma", gamma, gamma > 0, "a number above 0")
    return lambda moved: gamma ** (moved // step_size)


def _one_cycle(
    length: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Curve:
    """As OneCycleLR has it, but for the momentum, which stays."""
    _require("pct_start", pct_start, 0 <= pct_start <= 1, "a share from 0 to 1")
    known = anneal_strategy in ("cos", "linear")
    _require("anneal_strategy", anneal_strategy, known, "cos or linear")
    _require("div_factor", div_factor, div_factor > 0, "a number above 0")
    _require("final_div_factor", final_div_factor, final_div_factor > 0, "a number above 0")
    first, last = 1 / div_factor, 1 / div_factor / final_div_factor
    top = pct_start * length - 1
    middle = [(2 * top, first)] if three_phase else []
    points = [(0.0, first), (top, 1.0), *middle, (length - 1.0, last)]

    def share(moved: int) -> float:
        at = min(float(moved), length - 1.0)
        left, right = next(
            (pair for pair in pairwise(points) if at <= pair[1][0]), (points[-2], points[-1])
        )
        width = right[0] - left[0]
        gone = (at - left[0]) / width if width else 1.0
        if anneal_strategy == "linear":
            return left[1] + (right[1] - left[1]) * gone
        return right[1] + (left[1] - right[1]) * _half_cosine(gone)

    return share


def _half_cosine(gone: float) -> float:
    """From 1 to 0."""
    return (1 + math.cos(math.pi * gone)) / 2


def _require(name: str, value: Any, good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}: it takes {what}")


# -- kinds by name -------------------------------------------------------------------------

_CURVES: dict[str, tuple[Callable[..., Curve], Every]] = {
    "linear": (_linear, "step"),
    "cosine": (_cosine, "step"),
    "one_cycle": (_one_cycle, "step"),
    "step": (_step, "epoch"),
    "warm_restarts": (_warm_restarts, "step"),
}
_BY_STEPS = ("onecyclelr", "cycliclr")
"""Schedulers of torch that are made to move on with every step."""
_WITH_OWN_RISE = ("one_cycle", "onecyclelr")
_PLATEAU = ("plateau", "reducelronplateau")
_GIVEN = ("optimizer", "last_epoch", "length", "final", "cycle_momentum")
"""Arguments that are not the config's to give; momentum stays, since CUDA graphs bake it in."""


@dataclass(frozen=True)
class _Kind:
    """What a name refers to."""

    name: str
    every: Every
    takes: Takes
    curve: Callable[..., Curve] | None = None
    scheduler: type[LRScheduler] | None = None

    @property
    def needs_length(self) -> bool:
        return self.curve is not None and "length" in arguments_of(self.curve, ())

    @property
    def takes_final(self) -> bool:
        in_curve = self.curve is not None and "final" in arguments_of(self.curve, ())
        return in_curve or self.name in _PLATEAU


def _kind(section: ScheduleConfig) -> _Kind:
    name = section.name.lower()
    chosen: Every | None = None if section.every == "auto" else section.every
    if name == "constant":
        return _Kind(name, "step", {})
    if name in _CURVES:
        curve, every = _CURVES[name]
        return _Kind(name, chosen or every, arguments_of(curve, _GIVEN), curve)
    if name in _PLATEAU:
        takes = arguments_of(ReduceLROnPlateau, (*_GIVEN, "mode", "min_lr"))
        return _Kind(name, "evaluation", takes, scheduler=ReduceLROnPlateau)
    classes = _torch_schedulers()
    if name not in classes:
        of_torch = [kind.__name__ for kind in classes.values()]
        choices = ", ".join(["constant", *_CURVES, "plateau", *of_torch])
        message = f"there is no schedule {section.name!r}: there are {choices}"
        raise ConfigError("the schedule section", [Mistake("schedule.name", message)])
    takes = arguments_of(classes[name], _GIVEN)
    every = "step" if name in _BY_STEPS else "epoch"
    return _Kind(name, chosen or every, takes, scheduler=classes[name])


def _torch_schedulers() -> dict[str, type[LRScheduler]]:
    """Those that a config can describe: not what is made of functions or other schedulers."""
    found = classes_of(lr_scheduler, LRScheduler)
    return {
        name: kind
        for name, kind in found.items()
        if name not in _PLATEAU and not {"lr_lambda", "schedulers"} & arguments_of(kind, ()).keys()
    }


# -- what is wrong -------------------------------------------------------------------------


def _mistakes(section: ScheduleConfig, kind: _Kind) -> list[Mistake]:
    found = argument_mistakes("schedule.args", section.name, kind.takes, section.args)
    if section.final and not kind.takes_final:
        message = f"{section.name} does not take it: linear, cosine, warm_restarts and plateau do"
        found.append(Mistake("schedule.final", message))
    if kind.every == "evaluation" and section.every != "auto":
        message = f"{section.name} moves on with every evaluation: remove it"
        found.append(Mistake("schedule.every", message))
    if section.warmup and kind.name in _WITH_OWN_RISE:
        message = f"{section.name} rises by itself: remove it, and set schedule.args.pct_start"
        found.append(Mistake("schedule.warmup", message))
    return found


def _length_mistakes(
    section: ScheduleConfig, kind: _Kind, steps: int | None, steps_per_epoch: int | None
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
    """How often a schedule moves on in the run; with steps, it begins after the warm-up."""
    if steps is None:
        return None
    if every == "step":
        return steps - warmup
    return None if per_epoch is None else math.ceil(steps / per_epoch)


# -- making them ---------------------------------------------------------------------------


def _schedules_of(
    optimizer: Optimizer,
    section: ScheduleConfig,
    kind: _Kind,
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
    return [
        Schedule(Warmed(inner, rise, waits=kind.every == "step"), kind.every),
        Schedule(rise),
    ]


def _scheduler(
    optimizer: Optimizer,
    section: ScheduleConfig,
    kind: _Kind,
    length: int | None,
    mode: Literal["min", "max"],
) -> LRScheduler | None:
    args: Mapping[str, Any] = with_tuples(section.args)
    try:
        if kind.curve is not None:
            given = {"length": length, "final": section.final}
            wanted = arguments_of(kind.curve, ())
            curve = kind.curve(**{k: v for k, v in given.items() if k in wanted}, **args)
            # A checkpoint holds nothing of functions that are created again.
            return LambdaLR(optimizer, lambda moved: curve(moved))
        if kind.name in _PLATEAU:
            least = [section.final * float(group["lr"]) for group in optimizer.param_groups]
            return ReduceLROnPlateau(optimizer, mode, min_lr=least, **args)
        if kind.scheduler is None:
            return None
        make = cast("Callable[..., LRScheduler]", kind.scheduler)
        if "cycle_momentum" in arguments_of(make, ()):
            make = partial(make, cycle_momentum=False)
        return make(optimizer, **args)
    except (ValueError, TypeError, ZeroDivisionError, IndexError) as error:
        message = f"{section.name} refuses {section.args}: {error}"
        raise ConfigError("the schedule section", [Mistake("schedule.args", message)]) from error
