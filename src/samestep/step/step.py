"""One optimizer step, as a person's own loop uses it."""

from __future__ import annotations

from torch import Tensor

from samestep.step.engine import LossFunction
from samestep.step.global_loss import BatchLoss, Embed
from samestep.step.lane_passes import LanePasses


class Step:
    """One optimizer step whose loss is a function: a global batch, of which this rank drives some lanes.

    Example:
        for step in run.steps(loader):
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
    """

    def __init__(self, passes: LanePasses) -> None:
        """Made by `run.steps`.

        Args:
            passes: The step as the engine runs it.
        """
        self._passes = passes

    @property
    def index(self) -> int:
        """The step's number in the run, from 0."""
        return self._passes.data.index

    @property
    def epoch(self) -> int:
        """The epoch's number in the run, from 0."""
        return self._passes.data.epoch

    @property
    def epoch_step(self) -> int:
        """The step's number in its epoch, from 0."""
        return self._passes.data.epoch_step

    @property
    def ends_epoch(self) -> bool:
        """Return whether this is the last step of its epoch."""
        return self._passes.data.ends_epoch

    @property
    def ends_run(self) -> bool:
        """Return whether it is the last of the run's steps, as far as their number is known beforehand."""
        return self._passes.data.index + 1 == self._passes.data.total

    @property
    def loss(self) -> Tensor:
        """The loss of the whole global batch, once the step has run.

        A scalar on the device; `.item()` waits for it, and is the same number at any number of ranks.
        """
        return self._passes.mean_loss()

    def train(self, loss: LossFunction) -> Tensor:
        """Run the whole step: every lane's loss and backward pass, then the update.

        Args:
            loss: Returns the mean loss of a batch, or its sum and what it was summed over.

        Returns:
            The loss of the whole global batch, on the device.
        """
        self.run(loss)
        return self.loss

    def train_global(self, embed: Embed, loss: BatchLoss) -> Tensor:
        """Run the whole step with a loss over all samples of the global batch, such as a contrast.

        Args:
            embed: Returns the embeddings of a lane's batch, a row or several for each sample.
            loss: Gets the embeddings of all lanes, in the order of the lanes, and a batch with the
                samples of all; returns the mean over them, or a sum and its count. It is called
                on every rank, with the same numbers.

        Returns:
            The loss, on the device.

        Example:
            step.train_global(
                lambda batch: model(batch.x), lambda z, batch: samestep.losses.supcon(z, batch.y)
            )
        """
        self.run_global(embed, loss)
        return self.loss

    def run_global(self, embed: Embed, loss: BatchLoss) -> None:
        """`train_global`, for loops that do not look at the loss."""
        self._passes.engine.global_steps.run(self._passes, embed, loss)

    def run(self, loss: LossFunction) -> None:
        """`train`, for loops that do not look at the loss: it costs a few kernels."""
        self._passes.train(loss)
