"""The passes of one step over this rank's lanes, as the engine runs them.

What users call is `Step`; this is what it, the lane runners and the run are written on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch, Moment, StepData
from samestep.distributed.health.activity import UPDATE
from samestep.errors import StepError
from samestep.lanes.random_streams import BETWEEN, MODEL
from samestep.optim.update import Updated
from samestep.reduce.stats import EMPTY, LaneStats, LocalStats, mean_loss
from samestep.step.engine import LossFunction, StepEngine
from samestep.step.lane_scope import LaneLeaves
from samestep.step.loss_terms import LossValue, Term, TermSums, check_loss
from samestep.step.run_objects import refuse_frozen_gradients
from samestep.step.step_batches import StepBatches


class LanePasses:
    """One step on this rank: reads its batches, runs its lanes, and updates the weights."""

    def __init__(self, engine: StepEngine, data: StepData) -> None:
        self.data = data
        self.updated = False
        self.changes_weights = False
        """Whether the update has begun: before it, a rank can return to where the last step ended."""
        self.engine = engine
        self._open: int | None = None
        self.moment = Moment(data.index, data.epoch, data.total, engine.setup.batch.lane_count)
        self.batches = StepBatches(engine, data, self.moment)
        self._lane_stats: dict[int, LaneStats] = {}
        self._stats: LocalStats | None = None
        self._begun = self.is_reduced = False
        self._samples = 0
        """Samples of the open lane."""
        self._updated: Updated | None = None
        """What the last update measured."""
        engine.guard.begin(data.index)
        engine.forward_check.begin(data.index)
        if engine.batchnorm is not None:
            engine.batchnorm.begin_step(lambda: self.in_lane)

    def train(self, loss: LossFunction) -> None:
        """Run the whole step."""
        self.engine.runner.run_step(self, loss)

    # -- lane by lane ----------------------------------------------------------------------

    @property
    def in_lane(self) -> bool:
        """Return whether a lane is open: what all ranks call together must not be called there."""
        return self._open is not None

    def enter_lanes(self, first: int = 0) -> Iterator[LaneBatch]:
        """This rank's batches as they were read, each with its lane open, from its `first` on."""
        for position in range(first, len(self.data.units)):
            yield self.enter_lane(position)
        self.leave_lanes()

    def lanes(self) -> Iterator[LaneBatch]:
        """This rank's batches on the device, each inside its lane's forward scope."""
        for batch in self.enter_lanes():
            with self.forward():
                yield self.batches.on_device(batch)

    def _begin(self, adds: bool = False, in_body: bool = False) -> None:
        if not self._begun:
            self._begun, gradients = True, self.engine.reduction.gradients
            gradients.in_body = in_body
            if self.data.samples is not None:
                gradients.filled = sum(map(bool, self.data.samples))
            gradients.begin(bool(self.data.ragged))
            self.engine.begin_lanes(adds)

    def enter_lane(self, position: int) -> LaneBatch:
        """Begin one of this rank's lanes; returns its batch as it was read."""
        self._begin()
        unit = self.data.units[position]
        batch = self.batches.read(position)
        self._samples = len(batch)
        self.engine.reduction.buffers.enter_lane()
        self.engine.forward_check.enter_lane()
        self._open = unit
        if self.engine.watch is not None:
            self.engine.watch.enter_lane(self.data.index, unit)
        return batch

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the open lane's forward pass: its random numbers, its precision, and whether its gradients leave."""
        assert self._open is not None, "a lane draws only while it is open"
        engine = self.engine
        engine.setup.rng.enter(MODEL, self._open, at=(self.data.index,))
        is_last = self._open == self.data.units[-1]
        with engine.reduction.gradients.forward_scope(is_last), engine.setup.precision.forward():
            yield

    def again(self) -> None:
        """Let the open lane begin once more: what it has computed counts for nothing."""
        self.forget_lane()
        self.engine.reduction.buffers.enter_lane()

    def forget_lane(self) -> None:
        """Forget the open lane: what it has computed so far was a trial."""
        if self.engine.watch is not None:
            self.engine.watch.forget_lane()

    def reopen(self, lane: int | None) -> None:
        """Go back to a lane that has begun, or with None leave it again."""
        self._open = lane

    def leave_lanes(self) -> None:
        """The last lane is through: ranks are at one place again."""
        self._open = None
        if self.engine.watch is not None:
            self.engine.watch.leave_lanes()
        if self.engine.draws_between:
            # Else what is drawn there would depend on which lane was this rank's last.
            self.engine.setup.rng.enter(BETWEEN, at=(self.data.index,))

    # -- backward --------------------------------------------------------------------------

    def backward(self, value: LossValue) -> None:
        """Backpropagate the open lane's summed loss."""
        loss_sum, count = self._combined(value, self._samples)
        self._backward(loss_sum, LaneStats(loss_sum.detach(), count))

    def backward_in_pieces(self, pieces: Sequence[LaneBatch], loss: LossFunction) -> None:
        """Backpropagate the open lane micro-batch by micro-batch."""
        total, counted = EMPTY.loss, EMPTY.count
        for piece in pieces[:-1]:
            with self.piece_scope():
                value, count = self._combined(loss(piece), len(piece))
            self.backward_piece(value)
            total, counted = total + value.detach(), counted + count
        value, count = self._combined(loss(pieces[-1]), len(pieces[-1]))
        self._backward(value, LaneStats(total + value.detach(), counted + count))

    def try_backward(self, batch: LaneBatch, loss: LossFunction) -> None:
        """A forward and backward pass that counts for nothing; the caller clears the gradients."""
        with self.piece_scope():
            value, _ = self._combined(loss(batch), len(batch))
        self.backward_piece(value)
        self.forget_lane()

    def piece_scope(self) -> AbstractContextManager[None]:
        """Around a piece's forward pass: what leaves for other ranks leaves with a lane's last."""
        return self.engine.reduction.gradients.forward_scope(last=False)

    def backward_piece(self, loss: Tensor) -> None:
        """Backpropagate a piece that is not its lane's last."""
        with self.engine.setup.precision.backward():
            loss.backward(self.engine.reduction.gradients.scaling.start)

    def _combined(self, value: LossValue, samples: int) -> Term:
        loss, count = self.engine.terms.combine(value, samples)
        check_loss(loss, count)
        return loss, count

    def _backward(self, loss: Tensor, stats: LaneStats) -> None:
        self.end_forward()
        self.backward_lane(loss, stats)

    def end_forward(self) -> None:
        """The open lane's forward pass is over: take what it made of the buffers."""
        lane = self._require_open_lane()
        self.engine.forward_check.leave_lane(lane)
        self.engine.reduction.buffers.leave_lane(lane)

    def begin_backward(self, adds: bool, is_empty: bool = False) -> None:
        """Begin a backward pass of a loop's body, which ends with `reduce`.

        Args:
            adds: Whether the gradients are added to others that no update has read.
            is_empty: Whether no lane of any rank has a loss.
        """
        self._lane_stats, self._stats, self._open = {}, None, None
        self._begun = self.is_reduced = False
        self._begin(adds, in_body=True)
        if is_empty:
            self.engine.reduction.gradients.filled = 0

    def combined(self, lane: int, value: LossValue | None) -> Term | None:
        """Take a lane's buffers in the body of a loop; returns what its loss is summed to, and its count."""
        with self.engine.reduction.buffers.taken(lane):
            if value is None:
                return None
            self.engine.terms.begin_step()
            return self._combined(value, self.batches.sizes()[lane])

    def backward_term(self, lane: int, term: Term, *, retain: bool) -> None:
        """Backpropagate one lane in the body of a loop; `retain` keeps its graph."""
        loss, count = term
        self._open = lane
        if self.engine.watch is not None:
            self.engine.watch.enter_lane(self.data.index, lane)
        self.backward_lane(loss, LaneStats(loss.detach(), count), retain)
        self._open = None

    def backward_together(
        self, losses: Sequence[Tensor], stats: Sequence[LaneStats], leaves: LaneLeaves, retain: bool = False
    ) -> None:
        """Backpropagate all lanes at once, whose graphs meet.

        Args:
            losses: What is backpropagated: one per lane, or what a rank without samples has computed.
            stats: What the lanes measured.
            leaves: What they computed with in place of the parameters.
            retain: Whether the graph is kept.
        """
        gradients, watch = self.engine.reduction.gradients, self.engine.watch
        self._lane_stats = dict(zip(self.data.units, stats, strict=True))
        self._share()
        with self.engine.setup.precision.backward():
            if self.data.units:
                leaves.backward(losses, gradients.scaling.start, retain)
            else:
                leaves.backward_for_nothing(losses, retain)
        self._refuse_no_leaves()
        for at, (lane, measured) in enumerate(self._lane_stats.items()):
            if watch is not None:
                watch.enter_lane(self.data.index, lane)
                watch.leave_lane(measured.loss, measured.count)
            leaves.put(at)
            gradients.take(lane)

    def _refuse_no_leaves(self) -> None:
        if any(param.grad is not None for param in self.engine.params):
            raise StepError(
                "with batchnorm: global a parameter was used where lanes run by themselves (in run.each_lane, or in "
                "an autograd.Function): give it to the function as an argument"
            )

    def backward_lane(self, loss: Tensor, stats: LaneStats, retain: bool = False) -> None:
        """Backpropagate the open lane, whose forward pass is over."""
        lane = self._require_open_lane()
        last = lane == self.data.units[-1]
        self._lane_stats[lane] = stats
        if self.engine.watch is not None:
            self.engine.watch.leave_lane(stats.loss, stats.count)
        if last and self.engine.reduction.gradients.shares_early:
            self._share()
        with self.engine.setup.precision.backward():
            self.engine.reduction.gradients.backward(loss, stats.count, lane, last, retain)

    # -- the end of the step ---------------------------------------------------------------

    def reduce(self) -> None:
        """Leave the mean over all lanes of all ranks in `.grad`."""
        if self.updated or self.is_reduced:
            raise StepError(f"step {self.data.index} is reduced already")
        self.is_reduced = True
        engine, reduction = self.engine, self.engine.reduction
        self._begin()
        self.batches.read_all()  # also what the loop did not: the next step gets its own batches
        self._open = None
        if reduction.gradients.shares_early:
            self._share()
        reduction.gradients.exchange()
        stats = self._share()
        reduction.buffers.wait()
        reduction.gradients.finish(stats)
        reduction.buffers.finish()
        refuse_frozen_gradients(engine.frozen)
        if engine.watch is not None:
            engine.watch.summed(self.data.index)

    def reduced_by(self, stats: LocalStats) -> None:
        """A CUDA graph has left the mean over all lanes of all ranks in `.grad`."""
        self._stats, self.is_reduced, self._open = stats, True, None

    def update(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Sum over all lanes of all ranks, divide by the count, clip, step and schedule."""
        if self.updated:
            raise StepError(f"step {self.data.index} was already updated: call step.train once")
        if not self.is_reduced:
            self.reduce()
        self.change_weights(optimizers)
        self.end(self._share())

    def end(self, stats: LocalStats | None) -> None:
        """The weights have changed, as often as a loop wanted: the step is over.

        Args:
            stats: What the log gets; None if nothing was measured.
        """
        if stats is None:
            self.updated = True
            return
        updated = self._updated
        if updated is None:
            groups = (group for opt in self.engine.optimizers for group in opt.param_groups)
            updated = Updated(tuple(float(group["lr"]) for group in groups))
        self.close(stats, updated, self.engine.terms.totals())

    def change_weights(self, optimizers: Sequence[Optimizer]) -> None:
        """Clip, step and schedule, by what is in `.grad`, inside of the step."""
        self.changes_weights = True
        activity = self.engine.setup.context.activity
        before = activity.enter(UPDATE)
        self._updated = self.engine.update.apply(self.data.index, self._share(), optimizers)
        activity.enter(before)

    def mean_loss(self) -> Tensor:
        """Return the step's loss over all lanes of all ranks, as the log shows it; on the device."""
        if not self.updated and not self.is_reduced:
            raise StepError("step.loss is known after step.train: the ranks have not met yet")
        return mean_loss(self._share().values(), self.engine.setup.context.device)

    def close(self, stats: LocalStats, updated: Updated, totals: TermSums | None) -> None:
        """The weights have changed: the step is over, but for what the run does at its end."""
        engine, self.updated = self.engine, True
        self._stats = self._stats or stats
        if engine.draws_between and not self.data.draws:
            # What the loop draws from here on must not depend on who has drawn in the update.
            engine.setup.rng.enter(BETWEEN, at=(self.data.index, 2))
        engine.step_log.add(self.data.index, self.data.epoch, stats, updated, totals)

    @property
    def stats(self) -> LocalStats:
        """Return what all lanes of all ranks measured, and the flags of all ranks."""
        return self._share()

    def undo_lanes(self) -> None:
        """Before the update: leave the modules as the last step did."""
        if self._begun or self.engine.batchnorm is not None:
            self.engine.reduction.buffers.restore()

    def refuse_bad_weights(self) -> None:
        """Before this step is saved; waits for the device, as a save does."""
        is_sharded = self.engine.setup.gathered.weights is not None
        self.engine.guard.refuse_bad_weights(self.data.index, self.engine.params, is_sharded)

    def _share(self) -> LocalStats:
        """Start sending what this rank's lanes counted, and changed in buffers, to all ranks.

        Before the last backward pass, so that both travel behind it; every rank starts its
        collectives in this order.
        """
        if self._stats is None:
            engine = self.engine
            my_units = engine.setup.assignment.my_units
            rows = [self._lane_stats.get(unit, EMPTY) for unit in my_units]
            self._stats = engine.reduction.gradients.share(rows, engine.flags())
            engine.reduction.buffers.start()
        return self._stats

    def _require_open_lane(self) -> int:
        if self._open is None:
            raise StepError("a loss is backpropagated inside of its lane, once for each batch")
        if self._open in self._lane_stats:
            raise StepError(f"lane {self._open} was backpropagated twice: add the losses up")
        return self._open


class WholeLanes:
    """Runs every lane at once, eagerly."""

    needs_function = ""

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        for batch in passes.enter_lanes():
            with passes.forward():
                self.run_lane(passes, passes.batches.on_device(batch), loss)
        passes.update()

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        """Run the forward and backward pass of the open lane, whose batch is on the device."""
        passes.backward(loss(batch))
