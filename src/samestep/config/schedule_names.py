"""Finds mistakes in the `schedule:` section, given the schedulers that there are. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from samestep.config.lr_curves import CURVES, Curve, Every
from samestep.config.named_classes import NamedClasses, Takes, argument_mistakes, arguments_of, leave_out
from samestep.config.optim import ScheduleConfig
from samestep.errors import Mistake

_BY_STEPS = ("onecyclelr", "cycliclr")
"""Schedulers of torch that are made to move on with every step."""
_WITH_OWN_RISE = ("one_cycle", "onecyclelr")
PLATEAU = ("plateau", "reducelronplateau")
_GIVEN = ("optimizer", "last_epoch", "length", "final", "cycle_momentum")
"""Arguments that are not the config's to give; momentum stays, since CUDA graphs bake it in."""


@dataclass(frozen=True)
class ScheduleKind:
    """The kind of a schedule: one of our curves, a scheduler of torch, or a constant rate."""

    name: str
    every: Every
    takes: Takes
    curve: Callable[..., Curve] | None = None

    @property
    def needs_length(self) -> bool:
        return self.curve is not None and "length" in arguments_of(self.curve, ())

    @property
    def takes_final(self) -> bool:
        in_curve = self.curve is not None and "final" in arguments_of(self.curve, ())
        return in_curve or self.name in PLATEAU


def schedule_kind(section: ScheduleConfig, known: NamedClasses) -> ScheduleKind | Mistake:
    """Return what the section's name refers to, or that it is no schedule."""
    name = section.name.lower()
    chosen: Every | None = None if section.every == "auto" else section.every
    if name == "constant":
        return ScheduleKind(name, "step", {})
    if name in CURVES:
        curve, every = CURVES[name]
        return ScheduleKind(name, chosen or every, arguments_of(curve, _GIVEN), curve)
    if name in PLATEAU:
        takes = leave_out(known[PLATEAU[1]].takes, (*_GIVEN, "mode", "min_lr"))
        return ScheduleKind(name, "evaluation", takes)
    of_torch = describable(known)
    if name not in of_torch:
        names = [named.name for named in of_torch.values()]
        choices = ", ".join(["constant", *CURVES, "plateau", *names])
        message = f"there is no schedule {section.name!r}: there are {choices}"
        return Mistake("schedule.name", message)
    every = "step" if name in _BY_STEPS else "epoch"
    return ScheduleKind(name, chosen or every, leave_out(of_torch[name].takes, _GIVEN))


def describable(known: NamedClasses) -> NamedClasses:
    """Schedulers that a config can describe: not what is made of functions or other schedulers."""
    return {
        key: named
        for key, named in known.items()
        if key not in PLATEAU and not {"lr_lambda", "schedulers"} & named.takes.keys()
    }


def schedule_mistakes(section: ScheduleConfig, known: NamedClasses) -> list[Mistake]:
    """Return a name that is no schedule, and keys that this one does not take; nothing about values."""
    kind = schedule_kind(section, known)
    if isinstance(kind, Mistake):
        return [kind]
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
