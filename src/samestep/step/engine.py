"""The parts that all steps of a run share, and their protocols; observers of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.reduce.build import LaneReduction
from samestep.reduce.stats import RankFlags
from samestep.run_setup import RunSetup
from samestep.step.forward_check import ForwardCheck
from samestep.step.global_batchnorm import GlobalBatchNorm
from samestep.step.loss_terms import LossTerms, LossValue
from samestep.step.step_log import StepLog


class LaneWatch(Protocol):
    """Looks into steps while they run: for a trace of everything that they compute."""

    reads_gradients: bool
    """Whether `summed` reads `.grad`, which `distributed.shard` leaves with owners alone unless asked."""

    def enter_lane(self, step: int, lane: int) -> None:
        """A lane's forward pass begins; the last one is over."""

    def forget_lane(self) -> None:
        """Forget the open lane: what it has computed so far was a trial, and counts for nothing."""

    def leave_lane(self, loss: Tensor | float, count: Tensor | float) -> None:
        """The lane's forward pass is over, its last backward pass comes next."""

    def leave_lanes(self) -> None:
        """The last lane of a pass over all of them is over."""

    def summed(self, step: int) -> None:
        """Gradients and buffers are those of all lanes; the update comes next."""


LossFunction = Callable[[LaneBatch], LossValue]
"""Returns a batch's summed loss and what it was summed over, or several of them by name."""


class LaneRunner(Protocol):
    """Runs a step whose loss is a function.

    Lane by lane (`WholeLanes`), in micro-batches (`MicroBatches`), or as CUDA graphs
    (`GraphedSteps`): chosen when a run is prepared.
    """

    needs_function: str
    """The config's key for which a step must be given its loss as a function; "" if none."""

    def run_step(self, passes: Any, loss: LossFunction) -> None:
        """Run the forward and backward pass of every lane, and the update; `passes` are the step's `LanePasses`."""


class GlobalRunner(Protocol):
    """Runs a step whose loss is over the whole global batch."""

    def run(self, passes: Any, embed: Callable[[LaneBatch], Any], loss: Callable[[Any, Any], LossValue]) -> None:
        """Run the whole step."""


@dataclass(frozen=True)
class StepEngine:
    """The parts that all steps of a run share."""

    setup: RunSetup
    reduction: LaneReduction
    guard: FiniteGuard
    update: Update
    runner: LaneRunner
    forward_check: ForwardCheck
    terms: LossTerms
    step_log: StepLog
    optimizers: Sequence[Optimizer]
    params: Sequence[Parameter]
    """The parameters that the optimizers train and this rank holds."""
    all_params: Sequence[Parameter]
    """The parameters that the optimizers train, on all ranks."""
    frozen: Sequence[tuple[str, Parameter]]
    """The tensors that they hold and do not train, by name."""
    copies: DeviceCopies
    flags: Callable[[], RankFlags]
    """The message from this rank to all others with the step."""
    on_batch: Callable[[int, LaneBatch], None]
    """Called with the step and every batch, when it is read."""
    draws_between: bool
    """True if random numbers drawn between lanes and steps are the same on all ranks."""
    global_steps: GlobalRunner
    """Runs steps whose loss is over the whole global batch."""
    watch: LaneWatch | None = None
    """Looks into the steps, if something does."""
    batchnorm: GlobalBatchNorm | None = None
    """The meeting point of BatchNorm layers, if they normalise over the global batch."""

    def begin_lanes(self, adds: bool = False) -> None:
        """Before the first lane of a step, on the device: remember what lanes begin with."""
        if self.batchnorm is None:
            self.begin_buffers()
        if not adds:
            self.reduction.gradients.scaling.begin()

    def begin_buffers(self) -> None:
        """Before the first forward pass of a step."""
        self.guard.keep_buffers()
        self.terms.begin_step()
        self.reduction.buffers.begin_step()
