"""From the summed gradients to the next weights: check, clip, step, schedule, average.

Whether a step counts is found out on the device. Where the optimizers can be told there (torch's
fused ones), nothing waits: the host learns it when the next update is due, and only then moves
schedules and averages on, or says that the step was skipped. Other optimizers are asked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import StepError
from samestep.optim.clipping import Clipping
from samestep.optim.device_lr import DeviceRates
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.optim.nonfinite import FiniteGuard
from samestep.reduce.stats import LocalStats


@dataclass(slots=True)
class Updated:
    """What an update measured; on the device until somebody reads it."""

    rates: tuple[float, ...]
    norms: Tensor | None = None
    skipped: Tensor | None = None
    """1 if the step changed nothing; None if that cannot be."""
    scale: Tensor | None = None
    """The loss scale of the step."""


@dataclass(frozen=True)
class _Unsettled:
    step: int
    stats: LocalStats
    optimizers: Sequence[Optimizer]
    found: Tensor
    """Whether the step was skipped, in host memory once `copied` has happened."""
    copied: torch.cuda.Event | None
    scale: Tensor | None


class Update:
    """Changes the weights, once a step, the same on every rank."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler],
        followers: Sequence[Callable[[], None]],
        clipping: Clipping,
        check: CheckedScaling | None,
        guard: FiniteGuard,
        device: torch.device,
    ) -> None:
        self._optimizers, self._schedules = optimizers, schedules
        self._followers = followers
        """Called after every update that changed the weights."""
        self._clipping, self._check, self._guard = clipping, check, guard
        self._rates = DeviceRates(optimizers, device)
        self._told_on_device = device.type == "cuda" and all(map(_can_be_told, optimizers))
        self._unsettled: _Unsettled | None = None
        self.replay: Callable[[Callable[[], Tensor | None]], Tensor | None] | None = None
        """What runs `change` instead, such as a CUDA graph of it."""

    def apply(self, step: int, stats: LocalStats, chosen: Sequence[Optimizer]) -> Updated:
        """Change the weights by the gradients that lie in `.grad`, if they are finite."""
        self.sync_update()
        self._refuse_strangers(chosen)
        optimizers = chosen or self._optimizers
        rates = tuple(float(group["lr"]) for opt in self._optimizers for group in opt.param_groups)
        check = self._check
        if check is None:
            norms = self._change(optimizers)
            self._follow(optimizers)
            return Updated(rates, norms)
        check.see(stats.losses())
        scale = check.scale.clone() if isinstance(check, LossScale) else None
        skipped = check.found.clone()
        norms = None
        if self._told_on_device or not bool(skipped):
            norms = self._change(optimizers)
        self._guard.restore_buffers(skipped)
        if isinstance(check, LossScale):
            check.update(stats.count())
        self._unsettled = self._begin_to_read(step, stats, optimizers, skipped, scale)
        if not self._told_on_device:
            self.sync_update()
        return Updated(rates, norms, skipped, scale)

    def sync_update(self) -> None:
        """Do what follows the last update, now that it must be known whether it counted."""
        last, self._unsettled = self._unsettled, None
        if last is None:
            return
        if last.copied is not None:
            last.copied.synchronize()
        if not bool(last.found):
            self._guard.passed()
            self._follow(last.optimizers)
            return
        scale = None if last.scale is None else float(last.scale)
        self._guard.skipped(last.step, last.stats, scale)

    def refresh_rates(self) -> None:
        """Before a replay of something that updates the weights itself."""
        self._rates.refresh()

    def _refuse_strangers(self, chosen: Sequence[Optimizer]) -> None:
        for optimizer in chosen:
            if not any(optimizer is known for known in self._optimizers):
                raise StepError(
                    f"step.update got a {type(optimizer).__name__} that run.prepare did not: its "
                    "gradients are summed over no lanes. Give run.prepare every optimizer"
                )

    def _change(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        self._rates.refresh()

        def change() -> Tensor | None:
            found = None if self._check is None else self._check.found
            norms = self._clipping.apply(found)
            self._rates.put()
            try:
                for optimizer in optimizers:
                    _step(optimizer, found if self._told_on_device else None)
            finally:
                self._rates.put_back()
            return norms

        if self.replay is None or len(optimizers) < len(self._optimizers):
            return change()
        return self.replay(change)

    def _follow(self, optimizers: Sequence[Optimizer]) -> None:
        for schedule in self._schedules:
            if any(schedule.optimizer is optimizer for optimizer in optimizers):
                schedule.step()
        for follower in self._followers:
            follower()

    def _begin_to_read(
        self,
        step: int,
        stats: LocalStats,
        optimizers: Sequence[Optimizer],
        skipped: Tensor,
        scale: Tensor | None,
    ) -> _Unsettled:
        if not self._told_on_device:
            return _Unsettled(step, stats, optimizers, skipped, None, scale)
        found = torch.empty(skipped.shape, pin_memory=True).copy_(skipped, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Unsettled(step, stats, optimizers, found, copied, scale)


def _can_be_told(optimizer: Optimizer) -> bool:
    """Whether its step can be made to change nothing by a number on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _step(optimizer: Optimizer, found: Tensor | None) -> None:
    if found is None:
        optimizer.step()
        return
    # As torch's GradScaler tells fused optimizers.
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
