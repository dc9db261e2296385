"""A step whose lanes are the turns of a loop over a DataLoader, as people write loops.

Each turn sees one lane: its batch, its random numbers, its buffers. The last turn's backward pass leaves
the mean over all lanes of all ranks in `.grad`, where a loop's own clipping finds it, and only then
does the optimizer's step count, as with accumulated gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.errors import StepError
from samestep.reduce.buffer_slots import keep_buffers
from samestep.step.lane_passes import LanePasses
from samestep.step.loss_terms import LossValue

_Call = tuple[Optimizer, tuple[float, ...]]
"""An optimizer that was stepped, and the learning rates of its groups."""


class LaneTurns:
    """One step, turn by turn."""

    def __init__(self, passes: LanePasses, modules: Sequence[nn.Module], spare: Any) -> None:
        """Args:
        passes: The step as the engine runs it.
        modules: The run's.
        spare: A batch of an earlier step, for a rank that has no lane in this one: its turn computes
            on it for nothing, since every rank must come to the loop's own lines; None if there is none.
        """
        self._passes, self._modules, self.spare = passes, modules, spare
        self._position = 0
        self._forward = ExitStack()
        self._has_backward = False
        self._calls: list[_Call] = []
        self._first_calls: list[_Call] = []
        """Of the first turn, which all others must repeat."""

    @property
    def is_last(self) -> bool:
        """Whether the update follows in this turn."""
        return self._position >= len(self._passes.data.units) - 1

    def batches(self) -> Iterator[Any]:
        """What a DataLoader would yield, lane by lane, on the device."""
        for position in range(max(len(self._passes.data.units), 1)):
            self._position = position
            self._has_backward, self._calls = False, []
            with ExitStack() as self._forward:
                yield self._enter()
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
            passes.backward(value)
        if not self.is_last:
            return passes.lane_loss(self._position)
        passes.leave_lanes()
        passes.reduce()
        return passes.mean_loss()

    def step(self, optimizer: Optimizer) -> None:
        """What a call of an optimizer's `step` in the loop does."""
        name = type(optimizer).__name__
        if not self._has_backward:
            raise StepError(f"{name}.step() came before run.backward(loss): call it after")
        if self._passes.updated:
            raise StepError(
                f"{name}.step() was called after another optimizer's: a step has one update. Give one "
                "optimizer the parameters of both, or loop over run.steps(loader)"
            )
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        self._calls.append((optimizer, rates))
        if self.is_last:
            self._refuse_other_calls(self._first_calls[: len(self._calls)])
            self._passes.update([optimizer])

    def _enter(self) -> Any:
        passes = self._passes
        if not passes.data.units:
            if self.spare is None:
                raise StepError(
                    f"this rank has no samples in step {passes.data.index}, nor had it any before: there "
                    "are fewer samples than ranks need. Start fewer ranks, or set drop_last"
                )
            self._forward.enter_context(keep_buffers(self._modules))
            return self.spare
        batch = passes.on_device(passes.enter_lane(self._position))
        passes.enter_stream()
        self._forward.enter_context(passes.forward_scope())
        self._forward.enter_context(passes.engine.setup.precision.forward())
        self.spare = batch.data
        return batch.data

    def _end_turn(self) -> None:
        index = self._passes.data.index
        if not self._has_backward:
            raise StepError(
                f"a batch of step {index} was left without run.backward(loss): call it in place of "
                "loss.backward()"
            )
        if self._position == 0:
            self._first_calls = self._calls
        else:
            self._refuse_other_calls(self._first_calls)
        if self.is_last and not self._passes.updated:
            raise StepError(f"step {index} was left without optimizer.step()")

    def _refuse_other_calls(self, expected: Sequence[_Call]) -> None:
        """What a loop counts by batches would depend on how many of them a rank has."""
        if self._position == 0 or self._calls == list(expected):
            return
        raise StepError(
            f"the turns of step {self._passes.data.index} step other optimizers, or with other learning rates: "
            f"{_words(expected)} at first, then {_words(self._calls)}. A loop over the loader has a turn for "
            "each lane of a step, so count steps in place of batches: for i, batch in run.enumerate(loader)"
        )


def _words(calls: Sequence[_Call]) -> str:
    said = [f"{type(one).__name__} (lr {', '.join(map(str, rates))})" for one, rates in calls]
    return " and ".join(said) or "none"
