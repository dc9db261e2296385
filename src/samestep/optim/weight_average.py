"""Averages of a model's weights, kept beside the weights that train: EMA, and SWA's mean.

    update()       once after every update of the weights that was applied
    swapped()      the model has the averaged weights in this block, and its own ones after it

On the functions of torch.optim.swa_utils, but not on its AveragedModel, which reads a number
from the device in every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from samestep.checkpoint.state import stored_once
from samestep.config.optim import EmaConfig, SwaConfig
from samestep.distributed.collectives import Collectives
from samestep.errors import CheckpointError, StepError, TaskError
from samestep.reduce.owners import is_held

Mix = Callable[[list[Tensor], list[Tensor], int], None]
"""Takes the weights as they are now into their average, of so many before."""


class WeightAverage(ABC):
    """An average of a model's weights, in at least float32.

    Parameters are averaged, and the statistics of normalisation layers, which belong to the
    weights that they were measured with. Other buffers are the model's: counters have no mean,
    and the mean of a mask's infinities is not a number.
    """

    def __init__(self, model: nn.Module, settle: Callable[[], None] = lambda: None, statistics: bool = True) -> None:
        """Args:
        model: Whose weights are averaged.
        settle: Called before the weights are swapped. Where a GPU decides whether a step counts, an
            update follows the next step; inside the block it would average averages.
        statistics: Whether the statistics of normalisation layers are averaged; else they are the
            model's.
        """
        self._model, self._settle = model, settle
        self._is_swapped = False
        live = stored_once(model.state_dict(keep_vars=True))
        norms = [layer for layer in model.modules() if isinstance(layer, _NormBase)]
        measured = {id(buffer) for layer in norms for buffer in layer.buffers(recurse=False)}
        self._statistics = [name for name, tensor in live.items() if id(tensor) in measured]
        if not statistics:
            measured = set()
        self._live = {
            name: tensor
            for name, tensor in live.items()
            if (isinstance(tensor, nn.Parameter) or id(tensor) in measured)
            and (tensor.is_floating_point() or tensor.is_complex())
            and is_held(tensor)
        }
        self.others: dict[str, Tensor] = {}
        """Averages of weights that other ranks own, while a save needs them (`distributed.shard: weights`)."""
        self._average: dict[str, Tensor] = {}
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        """Averages and what they are of, by type: a list of one type is one kernel."""
        self.updates = 0
        """Number of weights in the average."""

    @abstractmethod
    def update(self) -> None:
        """The model's weights have been updated."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged weights in the model, for a block; its own, to the bit, after it."""
        self._settle()
        state = stored_once(self._model.state_dict(keep_vars=True))
        own = {name: tensor for name, tensor in state.items() if is_held(tensor)}
        copies = [tensor.detach().clone() for tensor in own.values()]
        try:
            with torch.no_grad():
                self._put()
            self._is_swapped = True
            yield
        finally:
            self._is_swapped = False
            with torch.no_grad():
                for tensor, copy in zip(own.values(), copies, strict=True):
                    tensor.copy_(copy)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's state with the averaged weights; the same on every rank."""
        with self.swapped():
            state = stored_once(self._model.state_dict())
            return {name: tensor.clone() for name, tensor in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state with the averaged weights, and how many were averaged.

        Nothing is copied: a checkpoint's snapshot does that.
        """
        state = stored_once(self._model.state_dict()) if self._average else {}
        return {"model": {**state, **self._average, **self.others}, "updates": self.updates}

    @property
    def is_of_held(self) -> bool:
        """Return whether this rank holds all weights that it averages."""
        return all(map(is_held, self._live.values()))

    @property
    def held(self) -> dict[str, Tensor]:
        """The averages that this rank holds, by name."""
        return self._average

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        if state["model"]:
            self._begin(state["model"])

    def _begin(self, values: dict[str, Tensor]) -> None:
        """Take these values for the average so far."""
        missing = self._live.keys() - values.keys()
        if missing:
            raise CheckpointError(f"the saved average has no {', '.join(sorted(missing))}")
        for name, tensor in self._live.items():
            value = values[name].detach()
            self._average[name] = value.to(tensor.device, _wide(tensor), copy=True)
        groups: dict[Any, list[str]] = {}
        for name, tensor in self._live.items():
            groups.setdefault((tensor.device, tensor.dtype), []).append(name)
        self._groups = [
            ([self._average[name] for name in names], [self._live[name] for name in names]) for names in groups.values()
        ]

    def _mix(self, mix: Mix) -> None:
        if self._is_swapped:
            raise StepError(
                "the average was updated inside `with average.swapped()`, where the model has averaged "
                "weights: let the last update follow before, Ema(..., settle=run.sync_update)"
            )
        with torch.no_grad():
            for averages, live in self._groups:
                if averages[0].dtype != live[0].dtype:
                    live = [tensor.to(averages[0].dtype) for tensor in live]
                mix(averages, live, self.updates)
        self.updates += 1

    def _put(self) -> None:
        for name, average in self._average.items():
            self._live[name].copy_(average)


class Ema(WeightAverage):
    """An exponential moving average, which begins with the weights that the model has now.

    With policy rank0 only rank 0 holds it; `swapped` broadcasts it to all ranks for its block.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: EmaConfig,
        steps_per_epoch: int | None,
        collectives: Collectives,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model, settle, statistics=rule.buffers == "average")
        self._every, self._warmup = rule.every, rule.warmup
        self._stays = _per_step(rule, steps_per_epoch) ** rule.every
        self._rank0_only, self._collectives = rule.policy == "rank0", collectives
        self._holds = collectives.rank == 0 or not self._rank0_only
        self._steps = 0
        if self._holds:
            self._begin(self._live)

    @property
    def decay(self) -> float:
        """Return how much of the average stays in its next update."""
        if not self._warmup:
            return self._stays
        number = self.updates + 1  # from 1, as torch-ema counts
        return min(self._stays, (1 + number) / (10 + number))

    def update(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self._mix(get_ema_multi_avg_fn(self.decay))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        super().load_state_dict(state if self._holds else {**state, "model": {}})

    def _put(self) -> None:
        super()._put()
        if self._rank0_only:
            self._collectives.broadcast_tensors(list(self._live.values()))


class RunningMean(WeightAverage):
    """The plain mean of the weights at chosen moments; holds nothing before the first."""

    def update(self) -> None:
        """Take the weights as they are now into the mean."""
        if self.updates:
            self._mix(get_swa_multi_avg_fn())
        else:
            self._begin(self._live)
            self.updates = 1

    def take_statistics(self) -> None:
        """Take the statistics of normalisation that the model has now for the average's own."""
        for name in self._statistics:
            if name in self._average:
                self._average[name].copy_(self._live[name])

    def _put(self) -> None:
        if not self.updates:
            raise StepError("there is no mean of weights yet: update() takes the first")
        super()._put()


class Swa(RunningMean):
    """Stochastic weight averaging: the mean over the last part of a run, at its own learning rate."""

    def __init__(
        self,
        model: nn.Module,
        rule: SwaConfig,
        optimizers: Sequence[Optimizer],
        total: int | None,
        steps_per_epoch: int | None,
    ) -> None:
        super().__init__(model)
        self._start = _first_step(rule, total)
        self._every = rule.every
        _refuse_no_sample(rule, self._start, total, steps_per_epoch)
        self._rate = PhaseRate(optimizers, rule)
        self._steps = 0
        if self._start == 0:
            self._rate.begin()

    def update(self) -> None:
        self._steps += 1
        if self._steps == self._start:
            self._rate.begin()
        elif self._steps > self._start:
            self._rate.advance()
            if self._every != "epoch" and (self._steps - self._start) % self._every == 0:
                super().update()

    def end_epoch(self) -> None:
        """An epoch has ended, whether or not its last step was applied."""
        if self._every == "epoch" and self._steps > self._start:
            super().update()

    def hold_rate(self) -> None:
        """Undo what other schedules did to the learning rates since the last update."""
        self._rate.hold()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps, "rate": self._rate.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
        self._rate.load_state_dict(state["rate"])


class PhaseRate:
    """Learning rates that go to a constant by torch's SWALR, whatever other schedules do."""

    def __init__(self, optimizers: Sequence[Optimizer], rule: SwaConfig) -> None:
        self._optimizers = () if rule.lr is None else tuple(optimizers)
        self._rule = rule
        self._schedules: list[SWALR] = []
        self._rates: list[Any] = []

    def begin(self) -> None:
        """Set the rates to this phase's."""
        lr, steps = self._rule.lr, self._rule.anneal
        assert lr is not None or not self._optimizers
        self._schedules = [SWALR(o, lr, steps) for o in self._optimizers]  # type: ignore[arg-type]
        self._remember()

    def advance(self) -> None:
        """One more step of the phase has been applied."""
        self.hold()
        for schedule in self._schedules:
            schedule.step()
        self._remember()

    def hold(self) -> None:
        """Put back the rates of this phase; before it begins there are none."""
        for group, rate in zip(self._groups(), self._rates, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        # Older releases of torch have a function there, which a checkpoint cannot hold; SWALR's
        # constructor sets it.
        schedules = [
            {name: value for name, value in schedule.state_dict().items() if name != "anneal_func"}
            for schedule in self._schedules
        ]
        return {"schedules": schedules, "rates": self._rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["schedules"]:
            self.begin()
            for schedule, saved in zip(self._schedules, state["schedules"], strict=True):
                schedule.load_state_dict(saved)
            self._rates = state["rates"]
            self.hold()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _remember(self) -> None:
        rates = [group["lr"] for group in self._groups()]
        self._rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _wide(tensor: Tensor) -> torch.dtype:
    """bf16 and fp16 are too coarse for an average's small steps: it would stand still."""
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


def _per_step(rule: EmaConfig, steps_per_epoch: int | None) -> float:
    if rule.per == "step":
        return rule.decay
    if steps_per_epoch is None:
        raise TaskError(
            f"ema.per is epoch, with decay {rule.decay:g}, but the training data have no length "
            "that knows how many steps an epoch has: set steps_per_epoch, or ema.per: step"
        )
    return float(rule.decay ** (1 / steps_per_epoch))


def _first_step(rule: SwaConfig, total: int | None) -> int:
    if isinstance(rule.start, int):
        return rule.start
    if total is None:
        raise TaskError(
            f"swa.start is {rule.start:g} of the run, whose length shows only at the data's end: "
            "give the step that it begins at, or set steps or steps_per_epoch"
        )
    return round(rule.start * total)


def _refuse_no_sample(rule: SwaConfig, start: int, total: int | None, steps_per_epoch: int | None) -> None:
    if total is None:
        return
    if rule.every == "epoch":
        nothing = steps_per_epoch is not None and total - total % steps_per_epoch <= start
        every = "the end of each epoch"
    else:
        nothing, every = start + rule.every > total, f"every {rule.every} steps"
    if nothing:
        raise TaskError(
            f"swa would average nothing: it begins after step {start} of {total} and takes the "
            f"weights at {every}. Set an earlier swa.start, or another swa.every"
        )
