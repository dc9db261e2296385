"""The body of a loop over the loader: one step, whose lanes run side by side in the person's own lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.optim import Optimizer

from samestep.errors import StepError
from samestep.pytree import tensors
from samestep.reduce.gradients import Grads
from samestep.reduce.stats import LaneStats, mean_loss
from samestep.step.body_draws import BodyDraws
from samestep.step.body_mode import BodyMode
from samestep.step.body_trace import Run
from samestep.step.body_weights import BodyWeights
from samestep.step.deferred_body import DeferredBody, KnownBodies
from samestep.step.graph_nodes import refuse_kept
from samestep.step.lane_cost import LaneCost
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_scope import NO_LANE, LaneLeaves, Lanes, no_lanes, scope_of_body
from samestep.step.lane_tensor import LaneTensor, join, lanes_of, pick, run_per_lane
from samestep.step.loss_terms import LossValue, Term, refuse_other_lanes
from samestep.step.module_calls import ModuleCalls
from samestep.step.pending_gradients import add_kept, kept_gradients, scale_gradients

Reduction = Literal["mean", "sum"]


class LoopBody:
    """One step: what its lanes share while the body runs."""

    def __init__(
        self, passes: LanePasses, calls: ModuleCalls, known: KnownBodies | None = None, cost: LaneCost | None = None
    ) -> None:
        self._passes, self._calls, self._cost = passes, calls, cost
        self._engine = passes.engine
        self.lanes: Lanes = passes.data.units or (NO_LANE,)
        self.leaves = None if self._engine.batchnorm is None else LaneLeaves(len(self.lanes))
        self.uneven = False
        """Whether lengths differ among lanes."""
        self._deferred: DeferredBody | None = None
        if known is not None and passes.data.units and self._engine.watch is None:
            device = self._engine.setup.context.device
            self._deferred = DeferredBody(known, passes.batches.read_all(), device, self.apart)
        self._draws = BodyDraws(self._engine.setup.rng, passes.data.index)
        weights, units = self._engine.setup.gathered.weights, self._engine.setup.assignment.units
        self._weights = None if weights is None else BodyWeights(weights, units, passes.data.samples)
        self._mode = BodyMode(self, None if self._weights is None else self._weights.refuse_absent)
        self._entered = ExitStack()
        self._shares_graph = False
        self._made_in_lanes: list[range] = []
        """The numbers of autograd's nodes that modules have made in lanes."""
        self.backwards = 0
        """Number of backward passes that the body has made."""
        self.is_begun = False
        """Whether the body has changed gradients or weights."""
        self._forwards = 0
        """Calls of modules since buffers were joined."""

    # -- entering and leaving --------------------------------------------------------------

    def enter(self) -> Any:
        """Begin the body; returns the batches of this rank's lanes."""
        if self.leaves is not None:
            self._engine.begin_buffers()
        batch, data = self._batch(), self._passes.data
        self._engine.reduction.gradients.ragged = bool(data.ragged)
        self._draws.begin()
        self.resume()
        self._entered.callback(self.pause)
        return batch

    def _batch(self) -> Any:
        passes = self._passes
        spare = passes.batches.spare()
        if not passes.data.units:
            return join(self.lanes, [spare])
        if self._deferred is None:
            return self._read()
        return self._deferred.batch(self._read)

    def _read(self) -> Any:
        batches = self._passes.batches
        return join(self.lanes, [batches.on_device(batch).data for batch in batches.read_all()])

    def resume(self) -> None:
        """Let modules and draws be those of lanes."""
        scope_of_body.set(self)
        self._calls.per_lane = self._call_module
        self._mode.turn_on()

    def pause(self) -> None:
        """Let the lines that follow be those of an ordinary program: an evaluation, an update."""
        self._mode.turn_off()
        self._calls.per_lane = None
        scope_of_body.set(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what the run itself does in a body."""
        if self._calls.per_lane is None:
            yield
            return
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @property
    def samples(self) -> Any:
        """The number of samples in each lane."""
        sizes = self._passes.batches.sizes()
        return join(self.lanes, [sizes.get(lane, 1) for lane in self.lanes])

    def leave(self) -> None:
        """The body is over."""
        self._entered.close()

    # -- lanes -----------------------------------------------------------------------------

    def run_operation(self, func: Any, args: Any, kwargs: Any, lanes: Lanes, draws: bool) -> Any:
        """Run a torch function once per lane, now or with the backward pass."""
        if func is torch.autograd.grad and self._weights is not None:
            self._weights.refuse_grad()
        if func is torch.autograd.grad and self.leaves is not None:
            raise StepError(
                "torch.autograd.grad of one lane with batchnorm: global, where lanes have one graph: use batchnorm: "
                "lane, or a layer without the statistics of other samples"
            )
        return self._take(func, args, kwargs, lambda a, k: run_per_lane(func, a, k, lanes, self._operation(draws)))

    def _take(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        if self._deferred is None:
            return run(args, kwargs)
        return self._deferred.take(function, args, kwargs, run)

    @contextmanager
    def _operation(self, draws: bool) -> Iterator[Callable[[int], None]]:
        each = self._draws.per_lane() if draws else nullcontext(_same)
        with self._engine.setup.precision.forward(), each as enter:
            yield enter

    @contextmanager
    def whole_lanes(self) -> Iterator[Callable[[int], None]]:
        engine, step = self._engine, self._passes.data.index
        buffers, check, watch = engine.reduction.buffers, engine.forward_check, engine.watch
        self._forwards += 1
        opened = ExitStack()

        def enter(lane: int) -> None:
            opened.close()
            if self._weights is not None:
                opened.enter_context(self._weights.lane())
            if lane != NO_LANE and check.looks:
                check.enter_lane()
                opened.callback(check.leave_lane, lane)
            if lane != NO_LANE and watch is not None:
                watch.enter_lane(step, lane)
                opened.callback(watch.leave_lanes)
            if buffers.are_watched:
                opened.enter_context(buffers.of_lane(lane))
            self._passes.reopen(lane)
            draw(lane)

        first = _get_sequence_nr()
        call = nullcontext() if self._weights is None else self._weights.call()
        with self.paused(), call, engine.setup.precision.forward(), self._draws.whole_lanes() as draw:
            try:
                yield enter
            except BaseException:
                opened.pop_all()  # nothing more is known of that lane
                raise
            else:
                opened.close()
            finally:
                self._passes.reopen(None)
                self._made_in_lanes.append(range(first, _get_sequence_nr()))

    def make(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Draw by sizes: one tensor per lane; with a generator of the loop's own, one for all."""
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return self.run_operation(func, args, kwargs, self.lanes, draws=True)

    def _call_module(self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        if self.leaves is not None:
            return own(*args, **kwargs)  # layer by layer
        lanes = lanes_of((args, kwargs))[0].lanes
        if self._weights is not None:
            self._weights.refuse_lanes(lanes, self.lanes)
        gradients = self._engine.reduction.gradients
        if self._cost is not None:
            with self.paused():
                self._cost.measure(module, args, kwargs)

        def run(args: Any, kwargs: Any) -> Any:
            with gradients.forward_scope(last=True) if self._weights is None else nullcontext():
                return run_per_lane(own, args, kwargs, lanes, self.whole_lanes())

        if self._deferred is None or not self._deferred.is_put_off:
            return self._take(module, args, kwargs, run)
        result = self._take(module, args, kwargs, run)
        if self._deferred.is_put_off:
            self._draws.restart()  # as if it had run
        return result

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what was put off and runs later than the body called it: the body's own draws are kept."""
        with self.paused(), self._draws.apart():
            yield

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what lets lines of the body run a second time, in its backward pass."""
        second_draws = self._draws.again()

        @contextmanager
        def second() -> Iterator[None]:
            self.resume()  # in the thread of this backward pass
            try:
                with second_draws():
                    yield
            finally:
                self.pause()

        return second

    def meets_graph(self, shared: Tensor) -> None:
        """A lane's value was computed with something that all lanes share and that has a graph."""
        self._shares_graph = True
        refuse_kept(shared, self._made_in_lanes)

    def warn_of_one_draw(self, name: str) -> None:
        """An ordinary tensor was drawn, or changed by a draw, in the body."""
        self._engine.setup.context.log.once(
            "one draw",
            f"{name} in the loop's body has drawn once, the same numbers for all lanes: right for weights. Noise for a "
            "batch is drawn by size, torch.randn(x.size(0), ...), or like one, torch.randn_like(x)",
        )

    # -- backward and update ---------------------------------------------------------------

    def backward(
        self, loss: LossValue, *, retain_graph: bool | None = None, reduction: Reduction = "mean", **others: Any
    ) -> Callable[[], Tensor]:
        """Backpropagate the loss of every lane; add the mean over the global batch to `.grad`.

        Returns:
            What computes the loss of the global batch: many loops look at few of them.
        """
        if unknown := [name for name, value in others.items() if value is not None]:
            raise StepError(f"backward got {unknown[0]}, which a loss of lanes does not take")
        refuse_other_lanes([value.lanes for value in lanes_of(loss)], self.lanes)
        with self.paused():
            kept = kept_gradients(self._engine.all_params)
            if not self._replays(loss, bool(retain_graph), kept):
                self._backward_lanes(loss, self._begin_backward(kept, loss), bool(retain_graph))
                self._passes.reduce()
            if reduction == "sum":
                scale_gradients(self._engine.all_params, self._passes.stats.count())
            add_kept(self._engine.all_params, kept)
        self.backwards += 1
        self.is_begun = True
        stats, device = self._passes.stats, self._engine.setup.context.device

        def batch_mean() -> Tensor:
            with no_lanes():
                found = mean_loss(stats.values(), device)
                return found * stats.count() if reduction == "sum" else found

        if isinstance(loss, LaneTensor):
            loss.batch_mean = batch_mean
        return batch_mean

    def _replays(self, loss: LossValue, retain: bool, kept: Grads) -> bool:
        """Return whether all of the body so far was replayed as a CUDA graph, with its backward pass."""
        deferred, self._deferred = self._deferred, None  # what follows is run as it comes
        if deferred is None:
            return False
        if self._shares_graph or retain or self._adds(kept):
            deferred.run_now("how it calls backward", is_change=False)
            return False
        if not deferred.is_put_off:
            deferred.learn(loss)
            return False
        if not deferred.replays(self._passes, loss):
            return False
        self._calls.is_updated, self._forwards = False, 0
        self._engine.reduction.buffers.forget_lanes()
        return True

    def _adds(self, kept: Grads) -> bool:
        """Return whether gradients are added to others that no update has read."""
        return any(grad is not None for grad in kept) and not self._calls.is_updated

    def _begin_backward(self, kept: Grads, loss: LossValue | None = None) -> dict[int, Term]:
        """Begin a backward pass; returns what each lane's loss is summed to, and its count."""
        self._passes.begin_backward(self._adds(kept), loss is None)
        self._calls.is_updated = False
        self._forwards = 0
        terms = {
            lane: self._passes.combined(lane, None if loss is None else pick(loss, at))
            for at, lane in enumerate(self._passes.data.units)
        }
        self._engine.reduction.buffers.forget_lanes()
        return {lane: term for lane, term in terms.items() if term is not None}

    def _backward_lanes(self, loss: LossValue, terms: Mapping[int, Term], retain: bool) -> None:
        if self.leaves is not None:
            # A rank without samples comes to the layers' backward passes, too, and adds nothing there.
            losses = [term[0] for term in terms.values()] or tensors(pick(loss, 0))
            stats = [LaneStats(total.detach(), count) for total, count in terms.values()]
            self._passes.backward_together(losses, stats, self.leaves, retain)
            return
        for left, (lane, term) in zip(reversed(range(len(terms))), terms.items(), strict=True):
            shared = self._shares_graph and left > 0
            self._passes.backward_term(lane, term, retain=retain or shared)

    def step(self, optimizer: Optimizer) -> None:
        """Run a call of an optimizer's `step` in the body."""
        if not self._passes.is_reduced:
            raise StepError(
                f"{type(optimizer).__name__}.step() came before the first backward pass of step "
                f"{self._passes.data.index}: call run.backward(loss), or loss.backward(), before it"
            )
        self.is_begun = self._calls.is_updated = True
        self.run_now(f"{type(optimizer).__name__}.step")
        with self.paused():
            self._passes.change_weights([optimizer])
            self._draws.restart()

    @property
    def is_put_off(self) -> bool:
        """Return whether operations wait for the backward pass."""
        return self._deferred is not None and self._deferred.is_put_off

    def run_now(self, why: str) -> None:
        """Run what was put off: something changes that it reads."""
        if self._deferred is not None:
            self._deferred.run_now(why)

    def end(self) -> None:
        """The body is through: the step is over, but for what the run does at its end."""
        self.leave()
        self.run_now("a body without a backward pass")
        measured = self._passes.stats if self.backwards else None
        changed = self._forwards and self._engine.reduction.buffers.are_joined
        if changed or not self._passes.is_reduced:  # all ranks meet in every step
            kept = kept_gradients(self._engine.all_params)
            self._begin_backward(kept)
            self._passes.reduce()
            add_kept(self._engine.all_params, kept)
            self._draws.restart()
        # Not begun anew: a loop by `next` may have drawn since the update, and draws it again if it is resumed.
        self._passes.data.draws = self._draws.place
        self._passes.end(measured)


def _same(lane: int) -> None:
    return None
