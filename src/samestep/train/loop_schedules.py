"""The schedulers of a custom loop, and when each of them moves on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch.optim.lr_scheduler import (
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from samestep.errors import StepError
from samestep.optim.scheduler_calls import leave_to_loop, leave_to_run, move
from samestep.optim.schedules import Pace, Schedule

_BY_EPOCHS = (StepLR, MultiStepLR, ExponentialLR)
"""What most scripts move on once an epoch; by steps, their rates would be gone within one."""


@dataclass(frozen=True)
class LoopSchedules:
    """What `run.prepare` got, by what moves them on."""

    by_pace: Mapping[str, Sequence[LRScheduler]]

    @classmethod
    def of(cls, objects: Sequence[Any], every: Pace | None) -> LoopSchedules:
        """Those among the objects.

        Args:
            objects: Anything; schedulers, and such with their own pace as a `Schedule`.
            every: The pace of those without; None if nothing was said.

        Raises:
            StepError: It is not known when one is to move on, or it cannot move so.
        """
        found: dict[str, list[LRScheduler]] = {pace: [] for pace in get_args(Pace)}
        bare = [item for item in objects if isinstance(item, LRScheduler)]
        if every is not None and every not in found:
            raise StepError(f"run.prepare got every={every!r}: it takes 'step', 'epoch' or 'call'")
        if every is not None and not bare:
            raise StepError(
                f"run.prepare got every={every!r}, which is for schedulers, and no scheduler: "
                "give it those of the loop"
            )
        for item in objects:
            if isinstance(item, LRScheduler):
                found[_pace(item, every)].append(item)
            elif isinstance(item, Schedule):
                found[_pace(item.scheduler, item.every)].append(item.scheduler)
        return cls(found)

    def take_over(self, may_move: Callable[..., bool]) -> None:
        """From now on only the run moves its own on, and the loop the others.

        Args:
            may_move: Whether a call of the loop's counts; it gets the scheduler and the call's values.
        """
        for pace in ("step", "epoch"):
            for scheduler in self.by_pace[pace]:
                leave_to_run(scheduler, pace)
        for scheduler in self.by_pace["call"]:
            leave_to_loop(scheduler, may_move)

    @property
    def kept(self) -> dict[str, LRScheduler]:
        """By name, those that are saved besides the run's per-step ones."""
        return {
            f"{pace} schedule {number}": scheduler
            for pace in ("epoch", "call")
            for number, scheduler in enumerate(self.by_pace[pace])
        }

    def end_epoch(self, sync_update: Callable[[], None]) -> None:
        """Move on those that do so with every epoch.

        Args:
            sync_update: Lets what follows the last update happen first.
        """
        if self.by_pace["epoch"]:
            sync_update()
        for scheduler in self.by_pace["epoch"]:
            move(scheduler)


def _pace(scheduler: LRScheduler, every: Pace | None) -> Pace:
    name = type(scheduler).__name__
    if every == "evaluation" or (isinstance(scheduler, ReduceLROnPlateau) and every != "call"):
        raise StepError(
            f"{name} moves on with a value that your loop measures: say run.prepare(..., scheduler, "
            "every='call'), and call scheduler.step(value) after step.update()"
        )
    if every is None and isinstance(scheduler, _BY_EPOCHS):
        raise StepError(
            f"when does the {name} move on? With every epoch: run.prepare(..., scheduler, every='epoch'); with "
            "every step: every='step'; or where your loop calls scheduler.step(): every='call'. For "
            "schedulers that differ: samestep.Schedule(scheduler, every='epoch') in its place"
        )
    return every or "step"
