"""The schedulers of a custom loop, and what moves each of them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import StepError
from samestep.optim.loop_calls import call_before_steps, move, refuse_own_steps
from samestep.optim.schedules import Schedule


@dataclass(frozen=True)
class LoopSchedules:
    """The schedules that `run.prepare` got."""

    per_step: Sequence[LRScheduler] = ()
    """The run moves them on with every update."""
    per_epoch: Sequence[LRScheduler] = ()
    own: Sequence[LRScheduler] = ()
    """The loop calls their `step`."""

    @classmethod
    def of(cls, objects: Sequence[Any]) -> LoopSchedules:
        """Those among the objects.

        Raises:
            StepError: The run cannot move one on.
        """
        by_run = [item for item in objects if isinstance(item, Schedule)]
        for item in by_run:
            if item.every == "evaluation":
                raise StepError(
                    f"{type(item.scheduler).__name__} moves on with a value that your loop measures: give run.prepare "
                    "the scheduler itself, and call scheduler.step(value)"
                )
        return cls(
            [item.scheduler for item in by_run if item.every == "step"],
            [item.scheduler for item in by_run if item.every == "epoch"],
            [item for item in objects if isinstance(item, LRScheduler)],
        )

    def take_over(self, before_move: Callable[[], None]) -> None:
        """Let only the run step its own from now on, and the loop the others."""
        for scheduler in self.per_step:
            refuse_own_steps(scheduler, "step")
        for scheduler in self.per_epoch:
            refuse_own_steps(scheduler, "epoch")
        for scheduler in self.own:
            call_before_steps(scheduler, before_move)

    @property
    def kept(self) -> dict[str, LRScheduler]:
        """Return, by name, those that are saved besides the run's per-step ones."""
        pairs = (("epoch", self.per_epoch), ("call", self.own))
        return {
            f"{pace} schedule {number}": scheduler
            for pace, schedulers in pairs
            for number, scheduler in enumerate(schedulers)
        }

    def end_epoch(self, sync_update: Callable[[], None]) -> None:
        """Move on those that do so with every epoch."""
        if self.per_epoch:
            sync_update()
        for scheduler in self.per_epoch:
            move(scheduler)
