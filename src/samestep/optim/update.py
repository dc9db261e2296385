"""Turns the summed gradients into the next weights: check, clip, step, schedule, average.

Whether a step counts is decided on the device. Where the optimizers can read that decision there
(torch's fused ones), nothing waits: the host learns it when the next update is due, and only then
advances schedules and averages, or reports that the step was skipped. With other optimizers the
host waits for the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.optim.clipping import Clipping
from samestep.optim.loop_calls import move
from samestep.optim.nonfinite import FiniteGuard
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LocalStats, to_host
from samestep.reduce.stats_ring import RingRow


def takes_rate_from_device(optimizer: Optimizer) -> bool:
    """Return whether the optimizer reads its rates on the device: fused and capturable ones do."""
    return all(bool(group.get("fused")) or bool(group.get("capturable")) for group in optimizer.param_groups)


class DeviceRates:
    """The rates of the optimizers that can read them on a GPU, where a CUDA graph finds them at each replay.

    Whether a step is replayed or not, they are rounded to float32 there: both give the same bits.
    Schedules still see plain numbers.
    """

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._groups: list[dict[str, Any]] = []
        if device.type == "cuda":
            able = [optimizer for optimizer in optimizers if takes_rate_from_device(optimizer)]
            self._groups = [group for optimizer in able for group in optimizer.param_groups]
        self._known: list[float] = [float(group["lr"]) for group in self._groups]
        self._tensors: list[Tensor] = [torch.tensor(rate, dtype=torch.float32, device=device) for rate in self._known]

    def refresh(self) -> None:
        """Bring what a schedule has changed to the device."""
        for place, group in enumerate(self._groups):
            if group["lr"] != self._known[place]:
                self._known[place] = float(group["lr"])
                self._tensors[place].fill_(self._known[place])

    @contextmanager
    def put(self) -> Iterator[None]:
        """Let optimizers see the tensors; schedules see the numbers, also those not brought to the device yet."""
        numbers = [group["lr"] for group in self._groups]
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate in zip(self._groups, numbers, strict=True):
                group["lr"] = rate


@dataclass(slots=True)
class Updated:
    """The measurements of an update; on the device until they are read."""

    rates: tuple[float, ...]
    norms: Tensor | None = None
    """Norms of the gradients before clipping, if they are measured."""
    skipped: Tensor | None = None
    """1 if the step changed nothing; None if that cannot be."""
    scale: Tensor | None = None
    """The loss scale of the step."""
    numbers: RingRow | None = None
    """All that a replayed step measured, in the step log's order; else None."""


@dataclass(frozen=True)
class _Undecided:
    """An update of which the host does not know yet whether it counted."""

    step: int
    stats: LocalStats
    optimizers: Sequence[Optimizer]
    found: Tensor
    """Whether the step was skipped, in host memory once `copied` has happened."""
    copied: torch.cuda.Event | None
    scale: Tensor | None


Stepping = Callable[[Sequence[Optimizer]], AbstractContextManager[Any]]


class Update:
    """Changes the weights, once a step, the same on every rank."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler],
        clipping: Clipping,
        scaling: Scaling,
        guard: FiniteGuard,
        device: torch.device,
        stepping: Stepping = nullcontext,
        before_change: Callable[[int], None] = lambda step: None,
        after_update: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Args:
        stepping: Called with the optimizers that step, and entered around their steps.
        before_change: Called with the step before its weights are changed.
        after_update: Called with the step after every update that changed the weights.
        """
        self._optimizers, self._schedules = optimizers, schedules
        self._clipping, self._scaling, self._guard = clipping, scaling, guard
        self._rates = DeviceRates(optimizers, device)
        self._stepping = stepping
        self._before_change, self._after_update = before_change, after_update
        on_gpu = device.type == "cuda"
        self._decided_on_device = on_gpu and all(map(_reads_decision, optimizers))
        self._undecided: _Undecided | None = None

    @property
    def waits(self) -> bool:
        """Return whether the host must learn in each step whether it counts."""
        return self._scaling.found is not None and not self._decided_on_device

    def begin(self, step: int) -> tuple[float, ...]:
        """Before the weights are changed; returns the learning rates of all groups."""
        self.sync_update()
        rates = tuple(float(group["lr"]) for opt in self._optimizers for group in opt.param_groups)
        self._rates.refresh()
        self._before_change(step)
        return rates

    def change(self, stats: LocalStats, rates: tuple[float, ...], chosen: Sequence[Optimizer] = ()) -> Updated:
        """Change the weights by the gradients in `.grad`, if they are finite.

        Nothing but kernels for the device, unless it `waits`: it can be captured.
        """
        scaling = self._scaling
        scaling.check_losses(stats.losses())
        if scaling.found is None:
            return Updated(rates, self._clip_and_step(chosen))
        scale = None if scaling.scale is None else scaling.scale.clone()
        skipped = scaling.found.clone()
        norms = None
        if self._decided_on_device or not bool(skipped):
            norms = self._clip_and_step(chosen)
        self._guard.restore_buffers(skipped)
        scaling.update(stats.count())
        return Updated(rates, norms, skipped, scale)

    def end(self, step: int, stats: LocalStats, updated: Updated, chosen: Sequence[Optimizer] = ()) -> None:
        """After the weights have changed: let everything else follow, now or when it is known."""
        optimizers = chosen or self._optimizers
        if updated.skipped is None:
            self._follow(step, optimizers)
            return
        self._undecided = _Undecided(step, stats, optimizers, *to_host(updated.skipped), updated.scale)
        if not self._decided_on_device:
            self.sync_update()

    def apply(self, step: int, stats: LocalStats, chosen: Sequence[Optimizer] = ()) -> Updated:
        """Return the whole update of a step."""
        rates = self.begin(step)
        updated = self.change(stats, rates, chosen)
        self.end(step, stats, updated, chosen)
        return updated

    def sync_update(self) -> None:
        """Wait until it is known whether the last update counted, and do what follows from that."""
        last, self._undecided = self._undecided, None
        if last is None:
            return
        if last.copied is not None:
            last.copied.synchronize()
        if not bool(last.found):
            self._guard.passed()
            self._before_change(last.step)  # what schedules draw is that step's
            self._follow(last.step, last.optimizers)
            return
        scale = None if last.scale is None else float(last.scale)
        self._guard.skipped(last.step, last.stats, scale)

    def _clip_and_step(self, chosen: Sequence[Optimizer]) -> Tensor | None:
        found = self._scaling.found
        norms = self._clipping.apply(found)
        stepped = chosen or self._optimizers
        with self._rates.put(), self._stepping(stepped):
            for optimizer in stepped:
                _step(optimizer, found if self._decided_on_device else None)
        return norms

    def _follow(self, step: int, optimizers: Sequence[Optimizer]) -> None:
        for schedule in self._schedules:
            if any(schedule.optimizer is optimizer for optimizer in optimizers):
                move(schedule)
        self._after_update(step)


def _reads_decision(optimizer: Optimizer) -> bool:
    """Return whether its step can be made to change nothing by a number on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _step(optimizer: Optimizer, found: Tensor | None) -> None:
    if found is None:
        optimizer.step()
        return
    # As torch's GradScaler hands it to fused optimizers.
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
