"""A step whose lanes are the turns of a loop over a DataLoader, as people write loops.

Each turn sees one lane: its batch, its random numbers, its buffers. The last turn's backward pass leaves
the mean over all lanes of all ranks in `.grad`, where a loop's own clipping finds it, and only then
does the optimizer's step count, as with accumulated gradients. What else the loop's body does comes once
for each lane: what would make the run depend on how many a rank has is refused where it can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import StepError
from samestep.pytree import map_leaves
from samestep.reduce.buffer_slots import keep_buffers
from samestep.step.lane_passes import LanePasses
from samestep.step.loss_terms import LossValue
from samestep.step.turn_checks import BackwardPasses, Tensors

_COMPARED_STEPS = 2
"""Steps in which weights are compared by value: changes through `.data` do not show otherwise."""

_Call = tuple[str, tuple[Any, ...]]
"""An optimizer or scheduler that was stepped, and with which settings."""


class LaneTurns:
    """One step, turn by turn."""

    def __init__(
        self, passes: LanePasses, modules: Sequence[nn.Module], backwards: BackwardPasses, done: int
    ) -> None:
        """Args:
        passes: The step as the engine runs it.
        modules: The run's.
        backwards: Counts the backward passes of their parameters.
        done: How many steps this loop has made before.
        """
        self._passes, self._modules, self._backwards = passes, modules, backwards
        self._position = 0
        self._forward = ExitStack()
        self._has_backward = False
        self._calls: list[_Call] = []
        self._first_calls: list[_Call] = []
        """Of the first turn, which all others must repeat."""
        self._weights = Tensors(passes.engine.params, by_value=done < _COMPARED_STEPS)
        self._buffers: Tensors | None = None
        """As the step left them."""

    @property
    def is_last(self) -> bool:
        """Whether the update follows in this turn."""
        return self._position >= len(self._passes.data.units) - 1

    @property
    def left(self) -> str:
        """What is wrong if the loop is left here; empty if nothing is."""
        if self._passes.updated:
            return ""
        turns = max(len(self._passes.data.units), 1)
        return (
            f"the loop was left in turn {self._position + 1} of {turns} of step {self._passes.data.index}, which then "
            "counts for nothing, on some ranks: leave it where run.ends_step"
        )

    def batches(self) -> Iterator[Any]:
        """What a DataLoader would yield, lane by lane, on the device."""
        spare = self._spare() if self._passes.data.ragged else None
        for position in range(max(len(self._passes.data.units), 1)):
            self._position = position
            self._has_backward, self._calls = False, []
            with ExitStack() as self._forward:
                yield self._enter(spare)
            self._end_turn()

    def backward(self, value: LossValue) -> Tensor:
        """Backpropagate this turn's loss; in the last turn, leave the step's gradients in `.grad`.

        Returns:
            The mean loss of this turn's lane; in the last turn, that of the whole global batch.
        """
        if self._has_backward:
            raise StepError(
                "run.backward was called twice for one batch: add the losses up and call it once"
            )
        self._has_backward = True
        self._forward.close()
        passes = self._passes
        if passes.data.units:
            self._backwards.refuse_others()
            passes.backward(value)
        self._backwards.expect()
        if not self.is_last:
            return passes.lane_loss(self._position)
        passes.leave_lanes()
        passes.reduce()
        self._keep_buffers()
        return passes.mean_loss()

    def step(self, optimizer: Optimizer) -> None:
        """What a call of an optimizer's `step` in the loop does."""
        name = type(optimizer).__name__
        if not self._has_backward:
            raise StepError(
                f"{name}.step() came before run.backward(loss): write run.backward(loss) in place of "
                "loss.backward(), before it"
            )
        if self._passes.updated:
            raise StepError(
                f"{name}.step() was called after another optimizer's: a step has one update. Give one "
                "optimizer the parameters of both, or loop over run.steps(loader)"
            )
        settings = tuple(_settings(group) for group in optimizer.param_groups)
        self.note(name, (id(optimizer), *settings))
        if self.is_last:
            self._refuse_other_calls(self._first_calls[: len(self._calls)])
            self._backwards.refuse_others()
            self._refuse_other_buffers()
            self._passes.update([optimizer])
            self._keep_buffers()

    def note(self, name: str, settings: tuple[Any, ...]) -> None:
        """Something was moved on in this turn, which all turns of the step must do alike."""
        self._calls.append((name, settings))

    def _enter(self, spare: Any) -> Any:
        passes = self._passes
        if not passes.data.units:
            self._forward.enter_context(keep_buffers(self._modules))
            return spare
        batch = passes.on_device(passes.enter_lane(self._position))
        self._backwards.expect()
        passes.enter_stream()
        self._forward.enter_context(passes.forward_scope())
        self._forward.enter_context(passes.engine.setup.precision.forward())
        return batch.data

    def _spare(self) -> Any:
        """Lane 0's batch, for ranks without samples: they compute on it for nothing, since every rank
        must come to the loop's own lines. All ranks call this."""
        context, passes = self._passes.engine.setup.context, self._passes
        first = passes.read_lanes()[0].data if context.is_main else None
        found = context.broadcast(map_leaves(_on_host, first))
        return None if passes.data.units else passes.engine.copies.to_device(found)

    def _keep_buffers(self) -> None:
        self._buffers = Tensors([b for module in self._modules for b in module.buffers()])

    def _end_turn(self) -> None:
        index = self._passes.data.index
        if not self._has_backward:
            raise StepError(
                f"a batch of step {index} was left without run.backward(loss): call it in place of "
                "loss.backward(), for every batch"
            )
        self._backwards.refuse_others()
        if self._position == 0:
            self._first_calls = self._calls
        else:
            self._refuse_other_calls(self._first_calls)
        if not self.is_last:
            self._refuse_other_weights()
        elif not self._passes.updated:
            raise StepError(
                f"step {index} was left without optimizer.step(): call it in every turn of the loop, it counts in "
                "a step's last. Lanes are gradient accumulation: give the loader the batch of a whole update, and "
                "remove what counts batches"
            )
        else:
            self._refuse_other_buffers()

    def _refuse_other_calls(self, expected: Sequence[_Call]) -> None:
        """What a loop counts by batches would depend on how many of them a rank has."""
        if self._position == 0 or self._calls == list(expected):
            return
        raise StepError(
            f"the turns of step {self._passes.data.index} step other optimizers or schedulers, or with other "
            f"settings: {_words(expected)} at first, then {_words(self._calls)}. A loop over the loader has a "
            "turn for each lane of a step, so count steps in place of batches (for i, batch in "
            "run.enumerate(loader)), and give run.prepare every scheduler"
        )

    def _refuse_other_weights(self) -> None:
        if self._weights.have_changed:
            raise StepError(
                f"the loop changed weights in a turn of step {self._passes.data.index} that is not its last: it would "
                "do so as often as a rank has lanes. Do it once a step: if run.ends_step: ..."
            )

    def _refuse_other_buffers(self) -> None:
        if self._buffers is not None and self._buffers.have_changed:
            raise StepError(
                f"after run.backward in step {self._passes.data.index} something changed buffers, such as BatchNorm's "
                "statistics, by this rank's samples alone: run the model before run.backward, or in "
                "evaluation mode"
            )


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _settings(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    plain = (bool, int, float, str, tuple, type(None))
    return tuple((k, v) for k, v in group.items() if k != "params" and isinstance(v, plain))


def _words(calls: Sequence[_Call]) -> str:
    return " and ".join(f"{name}{_shown(settings)}" for name, settings in calls) or "none"


def _shown(settings: tuple[Any, ...]) -> str:
    rates = [f"lr {dict(group)['lr']}" for group in settings[1:] if isinstance(group, tuple)]
    return f" ({', '.join(rates or map(str, settings[1:]))})" if settings[1:] else ""
