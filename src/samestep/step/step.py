"""One optimizer step, as a person's own loop uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch
from samestep.errors import StepError
from samestep.reduce.stats import LaneStats
from samestep.step.across_lanes import GatheredRows
from samestep.step.global_loss import BatchLoss, Embed
from samestep.step.lane_passes import LanePasses, LossFunction
from samestep.step.loss_terms import LossValue, Term, check_loss


def loss_value(
    loss: Tensor | Mapping[str, Term],
    count: Tensor | float | None,
    mean_over: Tensor | float | None,
) -> LossValue:
    """What a loop's `backward` got, as the engine takes it; see `Step.backward`."""
    if isinstance(loss, Mapping) or (count is None and mean_over is None):
        return loss
    if count is not None and mean_over is not None:
        raise StepError("backward got count and mean_over: a loss is a sum or a mean")
    if count is not None:
        return loss, count
    assert mean_over is not None
    return loss * mean_over, mean_over


class Step:
    """One optimizer step: a global batch, of which this rank drives some lanes.

    Example:
        for batch in step.lanes:                       # this rank's lanes
            out = model(batch.x)
            step.backward(loss_sum(out, batch.y), count=len(batch))
        step.update()                                  # reduce, clip, step, schedule

    or, with the loss as a function, which CUDA graphs and micro-batches need:

        step.train(lambda batch: (loss_sum(model(batch.x), batch.y), len(batch)))

    `lanes` may be iterated more than once before a lane's `backward`: each pass gives the
    lane the same batch, the same random numbers and the same buffers. That is what a loss
    over the whole global batch needs: a first pass for all embeddings, a second for the
    gradients.
    """

    def __init__(self, passes: LanePasses, needs_function: str = "") -> None:
        """Made by `run.steps`.

        Args:
            passes: The step as the engine runs it.
            needs_function: The config's key that only `train` can fulfil, if there is one.
        """
        self._passes, self._needs_function = passes, needs_function

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
        """Whether this is the last step of its epoch."""
        return self._passes.data.ends_epoch

    @property
    def ends_run(self) -> bool:
        """Whether it is the last of the run's steps, as far as their number is known beforehand."""
        return self._passes.data.index + 1 == self._passes.data.total

    @property
    def lanes(self) -> Iterator[LaneBatch]:
        """This rank's batches, one per lane that has samples.

        Inside the loop, everything random draws from the lane's own stream, and forward runs
        in the config's precision.
        """
        if self._needs_function:
            raise StepError(
                f"{self._needs_function} needs the loss as a function: write "
                "step.train(lambda batch: (loss_sum, count)) in place of the loop over step.lanes"
            )
        return self._passes.lanes()

    def batches(self) -> Iterator[Any]:
        """What a DataLoader would yield, lane by lane, on the device: `batch.data` of `lanes`."""
        for batch in self.lanes:
            yield batch.data

    def backward(
        self,
        loss: Tensor | Mapping[str, Term],
        count: Tensor | float | None = None,
        *,
        mean_over: Tensor | float | None = None,
    ) -> None:
        """Backpropagate the loss of the lane that the loop is in. Call it once per lane.

        Args:
            loss: A mean over the lane's samples; or, with `count`, a sum (over samples, tokens,
                pixels); or several sums by name, each as (sum, count), whose weights are in the
                config's `loss_weights`.
            count: How many things the loss was summed over; the step's gradient is divided by the
                count of all lanes.
            mean_over: How many things the loss is a mean over, where these are not the lane's samples.
        """
        self._passes.backward(loss_value(loss, count, mean_over))

    def sum_over_lanes(self, values: Sequence[Tensor]) -> Tensor:
        """Sum a statistic over all lanes of all ranks, in the tree's order. Every rank calls this.

        For a loss that needs something of the whole global batch: measure it in a first pass over
        `lanes`, sum it, and use the sum in a second pass. It carries no gradient.

        Args:
            values: One tensor for each batch that `lanes` gave this rank, in that order.

        Returns:
            The sum, the same bits on every rank and at any number of ranks.

        Example:
            seen = [model(batch.x).detach().sum(0) for batch in step.lanes]
            mean = step.sum_over_lanes(seen) / run.batch.global_batch
        """
        return self._passes.engine.across_lanes.sum(self._passes.data, values)

    def gather(self, values: Sequence[Tensor], name: str = "the rows") -> GatheredRows:
        """Bring the rows of all lanes of all ranks together, in the order of the lanes.

        For a loss over the whole global batch that `train_global` does not fit. Every rank calls this,
        between two passes over `lanes`; `backward_rows` takes the loss's gradient in the second.

        Args:
            values: One tensor for each batch that `lanes` gave this rank, in that order, with a row, or
                as many rows, for each of its samples.
            name: What they are, if a loop gathers several things: rows of one name have one shape.

        Returns:
            All rows, and where this rank's lanes have theirs.

        Example:
            with torch.no_grad():
                seen = [model(batch.x) for batch in step.lanes]
            rows, mine = step.gather(seen)
            loss = contrast(rows.requires_grad_())  # a sum over all of them
            (gradient,) = torch.autograd.grad(loss, rows)
            for batch, own in zip(step.lanes, mine):
                share = loss.detach() * len(batch) / len(rows)
                step.backward_rows(model(batch.x), gradient[own], loss=share, count=len(batch))
            step.update()
        """
        return self._passes.engine.across_lanes.gather(self._passes.data, values, name)

    def backward_rows(
        self, rows: Tensor, gradient: Tensor, *, loss: Tensor | float, count: Tensor | float
    ) -> None:
        """Backpropagate a lane from the gradient of a loss that was computed elsewhere.

        In place of the lane's `backward`.

        Args:
            rows: What the lane's forward pass has computed.
            gradient: Of the loss with respect to them; the loss is a sum over all lanes.
            loss: The lane's share of that sum, for the log.
            count: The lane's share of what it was summed over; the step's gradient is divided by the count
                of all lanes.
        """
        if rows.shape != gradient.shape:
            raise StepError(
                f"step.backward_rows got rows of shape {tuple(rows.shape)} and a gradient of shape "
                f"{tuple(gradient.shape)}: give the gradient of these rows"
            )
        self._passes.end_forward()
        surrogate = (rows * gradient.detach()).sum()
        check_loss(surrogate, count)
        self._passes.backward_lane(surrogate, LaneStats(loss, count))

    @property
    def loss(self) -> Tensor:
        """The loss of the whole global batch, once the step is reduced or updated.

        A scalar on the device; `.item()` waits for it, and is the same number at any number of ranks.
        """
        return self._passes.mean_loss()

    def reduce(self) -> None:
        """Leave the mean over all lanes of all ranks in `.grad`, for clipping of one's own.

        Example:
            step.reduce()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.update()
        """
        self._passes.reduce()

    def update(self, *optimizers: Optimizer) -> None:
        """Sum over all lanes of all ranks, divide by the count, clip, step and schedule.

        Args:
            *optimizers: The optimizers to step; all of the run's unless given.
        """
        self._passes.update(optimizers)

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
