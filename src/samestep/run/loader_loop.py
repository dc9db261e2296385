"""A loop over the training loader: what all of its bodies share."""

from __future__ import annotations

from samestep.errors import StepError
from samestep.run.saver import Saver
from samestep.run_setup import RunSetup
from samestep.step.build_engine import Prepared
from samestep.step.deferred_body import KnownBodies
from samestep.step.graphs import GraphedSteps
from samestep.step.lane_cost import LaneCost
from samestep.step.lane_passes import LanePasses
from samestep.step.loop_body import LoopBody
from samestep.step.micro_batches import MicroBatches
from samestep.step.module_calls import ModuleCalls
from samestep.step.pending_gradients import PendingGradients


class LoaderLoop:
    """Opens the body of each step."""

    def __init__(self, setup: RunSetup, prepared: Prepared, saver: Saver) -> None:
        """Raises:
        StepError: The run's lanes cannot run together.
        """
        _refuse_fused(setup)
        if isinstance(prepared.runner, MicroBatches):
            raise StepError(
                f"{prepared.runner.needs_function} needs the loss as a function: for step in run.steps(loader): "
                "step.train(lambda batch: ...)"
            )
        gradients = prepared.reduction.gradients
        gradients.lends = False  # a loop may keep what is in .grad while it computes others
        if prepared.reduction.sharding is not None:
            prepared.reduction.sharding.share_gradients()
        graphed = isinstance(prepared.runner, GraphedSteps)
        # Each backward pass of a body may reach other weights. On a GPU to find out costs a wait in each.
        if len(prepared.optimizers) > 1 or (setup.context.device.type == "cpu" and not graphed):
            gradients.usage_varies = True
        self._epochs = setup.config.epochs
        self._calls = ModuleCalls([*prepared.modules, prepared.reduction.model])
        is_gathered = setup.gathered.weights is not None  # for passes that all ranks run
        self._cost = None if graphed or is_gathered else LaneCost(setup)
        self._known: KnownBodies | None = None
        if isinstance(prepared.runner, GraphedSteps) and not gradients.usage_varies:
            self._known = KnownBodies(prepared.runner)
        saver.keep("gradients", PendingGradients(prepared.params, self._calls))

    def body(self, passes: LanePasses, by_epochs: bool, evaluates: bool) -> LoopBody:
        """Return the body of a step.

        Args:
            by_epochs: Whether its loop is one over an epoch, or it is the first step.
            evaluates: Whether a loop over validation data is running.

        Raises:
            StepError: The loop is no loop over the training data of an epoch.
        """
        epochs = self._epochs
        if not by_epochs and epochs is not None and epochs > 1:
            raise StepError(
                f"a loop over the loader has the steps of all {epochs} epochs if nobody asks for epochs: write "
                "for epoch in run.epochs(): for batch in loader"
            )
        if evaluates:
            raise StepError(
                "a step began inside of a loop over validation data: in zip(...) the first DataLoader of run.prepare "
                "comes first"
            )
        if self._cost is not None:
            self._cost.begin_step()
        return LoopBody(passes, self._calls, self._known, self._cost)

    def close(self) -> None:
        """Leave the modules as they were."""
        self._calls.close()


def _refuse_fused(setup: RunSetup) -> None:
    most = max(len(units) for units in setup.assignment.units)
    if setup.config.same != "bits" and most > 1:
        raise StepError(
            f"same: {setup.config.same} runs a rank's {most} lanes one after the other by "
            "DistributedDataParallel, and a loop's body runs them together: use same: bits, as many lanes as "
            "ranks, or step.train(function)"
        )
