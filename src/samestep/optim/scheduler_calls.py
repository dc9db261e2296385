"""Decides who moves a learning-rate scheduler on: the run or the loop, never both.

A scheduler that both move on runs twice as fast, and nothing shows it but the curve. Its class is
replaced by one of the same name, since an attribute on the object would be in its `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import StepError

_KIND = "_samestep_kind"


def leave_to_run(scheduler: LRScheduler, every: str) -> None:
    """Refuse calls of its `step` other than by `move`."""

    def refuse() -> None:
        raise StepError(
            f"{type(scheduler).__name__}.step() was called, but the run moves this scheduler on with every "
            f"{every}: remove the call, or give run.prepare the scheduler itself in place of a samestep.Schedule"
        )

    leave_to_loop(scheduler, refuse)


def leave_to_loop(scheduler: LRScheduler, before_move: Callable[[], None]) -> None:
    """Call a function before each call of its `step`."""
    kind: Any = type(scheduler)

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        before_move()
        kind.step(self, *args, **kwargs)

    members = {"step": step, _KIND: kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), members)


def move(scheduler: LRScheduler) -> None:
    """Move a scheduler on, whoever else must not."""
    getattr(type(scheduler), _KIND, type(scheduler)).step(scheduler)
