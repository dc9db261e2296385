"""A loss over the whole global batch, such as a contrast of each sample with all others.

No lane can compute it alone, and no rank holds the activations of all. So every lane is embedded
first; the embeddings of all lanes meet on every rank, in the order of the lanes, where the loss and
its gradient with respect to them are computed, the same everywhere; and each lane's gradient is
backpropagated from its own rows. As many of a rank's lanes as fit into its memory keep their activations
from the first pass; the others run forward again, with the same random numbers and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.data.batch import LaneBatch
from samestep.errors import StepError, TaskError
from samestep.lanes.random_streams import WHOLE_BATCH
from samestep.losses.contrastive import sharing
from samestep.pytree import leaves, map_leaves, tensors
from samestep.reduce.buffer_slots import BufferSlot, current, find_slots, keep_buffers
from samestep.reduce.lane_rows import LaneRows
from samestep.reduce.lane_sum import LaneBlocks
from samestep.reduce.stats import LaneStats
from samestep.run_setup import RunSetup
from samestep.step.engine import LaneRunner
from samestep.step.global_batch import GlobalBatch
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_tensor import pick
from samestep.step.lanes_together import LanesTogether
from samestep.step.loss_terms import LossValue, OneLoss, check_loss
from samestep.step.micro_batches import MicroBatches

Embed = Callable[[LaneBatch], Any]
"""Returns the embeddings of a lane's samples: a tensor, or several in containers."""


BatchLoss = Callable[[Any, GlobalBatch], LossValue]
"""Takes what `Embed` returned for all lanes and their samples; returns a mean over the samples, or a
sum and its count."""


class GlobalSteps:
    """Runs the steps of a run whose loss is over the whole global batch."""

    def __init__(
        self, setup: RunSetup, modules: Sequence[nn.Module], params: Sequence[Parameter], runner: LaneRunner
    ) -> None:
        context = setup.context
        self._setup, self._modules, self._params = setup, modules, params
        self._micro = runner if isinstance(runner, MicroBatches) else None
        self._rows = LaneRows(setup.assignment.units, context.collectives, context.device)
        self._shared = LaneBlocks(setup.assignment.units, context.collectives)
        self._loss_buffers = LossBuffers(modules)
        self._kept: int | None = None
        """Number of lanes that keep their activations; None before the first lane was seen."""

    def run(self, passes: LanePasses, embed: Embed, loss: BatchLoss) -> None:
        """Run the whole step."""
        if self._setup.gathered.weights is not None:
            raise TaskError(
                "a loss over the global batch runs each lane's model twice, in an order in which its blocks are not "
                "gathered (distributed.shard: weights): set shard: optimizer"
            )
        runner = passes.engine.runner
        if isinstance(runner, LanesTogether):
            self._run_together(passes, runner, embed, loss)
            return
        self._prepare(passes, embed)
        # What looks into lanes sees all of one before the next.
        kept = 0 if passes.engine.watch is not None else self._kept or 0
        embedded = self._embed_lanes(passes, embed, kept)
        whole = self._loss_of(passes, embedded, loss)
        for lane in passes.data.units[:kept]:
            passes.reopen(lane)
            whole.backward(passes, lane, embedded.pop(lane))
        embedded.clear()
        for batch in passes.enter_lanes(first=kept):
            self._backward_again(passes, batch, embed, whole)
        passes.reduce()
        self._loss_buffers.put()
        passes.update()

    def _run_together(self, passes: LanePasses, runner: LanesTogether, embed: Embed, loss: BatchLoss) -> None:
        """Run a step whose lanes pass each layer together: all of them keep their activations."""
        body, embedded = runner.forward(passes, embed)
        assert body.leaves is not None, "lanes that run together have one graph"
        units = passes.data.units
        rows = {lane: pick(embedded, at) for at, lane in enumerate(units)}
        whole = self._loss_of(passes, rows, loss)
        passes.begin_backward(adds=False)
        for lane in units:
            passes.combined(lane, None)
        losses = [
            whole.surrogate(lane, rows[lane], own=partial(body.leaves.of, at=at)) for at, lane in enumerate(units)
        ]
        stats = [whole.stats(lane) for lane in units]
        passes.backward_together(losses or tensors(pick(embedded, 0)), stats, body.leaves)
        passes.reduce()
        self._loss_buffers.put()
        passes.update()

    def _prepare(self, passes: LanePasses, embed: Embed) -> None:
        """Before the first lanes: how they are cut, and how many keep their activations."""
        if self._micro is None:
            _refuse_runner(passes)
        else:
            self._micro.find_pieces(passes, lambda piece: (_any_loss(embed(piece)), len(piece)))
        if self._kept is None:
            self._kept = self._lanes_to_keep()
        if self._kept is None:
            for batch in passes.enter_lanes():
                with measured_activations(self._params) as saved:
                    self._forward(passes, batch, embed)
                passes.again()
                fitting = int(self._free_memory() / 2 // max(1, saved.bytes))
                self._kept = max(1, min(fitting, len(self._setup.assignment.my_units)))
                return

    def _lanes_to_keep(self) -> int | None:
        """Return it as far as the config determines it.

        The first lane is always kept: nothing else has activations until its backward pass is over.
        """
        config, own = self._setup.config, len(self._setup.assignment.my_units)
        if own > 1 and config.same != "bits" and self._setup.context.world > 1:
            # DistributedDataParallel sends gradients in the first backward pass after a forward pass
            # of the last lane.
            return 0
        if self._micro is not None and self._micro.pieces != 1:
            return 0
        if config.contrastive.recompute == "auto":
            return None if own > 1 else 1
        return 1 if config.contrastive.recompute else own

    def _embed_lanes(self, passes: LanePasses, embed: Embed, kept: int) -> dict[int, Any]:
        """Return the first pass: each lane's embeddings, of which the first `kept` can be backpropagated."""
        embedded: dict[int, Any] = {}
        for batch in passes.enter_lanes():
            if len(embedded) < kept:
                with passes.engine.reduction.buffers.apart():
                    embedded[batch.lane] = self._forward(passes, batch, embed)
                passes.end_forward()
            else:
                with torch.no_grad(), self._buffers_as_they_were():
                    embedded[batch.lane] = self._forward(passes, batch, embed)
                passes.forget_lane()
        return embedded

    def _forward(self, passes: LanePasses, batch: LaneBatch, embed: Embed) -> Any:
        with passes.forward():
            return joined([embed(piece) for piece in self._cut(passes, batch)])

    def _backward_again(self, passes: LanePasses, batch: LaneBatch, embed: Embed, whole: _WholeLoss) -> None:
        """Embed a lane a second time, and backpropagate it."""
        pieces, begin = self._cut(passes, batch), 0
        with passes.forward():
            for piece in pieces[:-1]:
                with passes.piece_scope():
                    part = whole.part(batch.lane, embed(piece), begin, len(piece))
                passes.backward_piece(part)
                begin += len(piece)
            rows = embed(pieces[-1])
        passes.end_forward()
        whole.backward(passes, batch.lane, rows, begin)

    def _cut(self, passes: LanePasses, batch: LaneBatch) -> list[LaneBatch]:
        whole = passes.batches.on_device(batch)
        return [whole] if self._micro is None else self._micro.cut(whole)

    def _buffers_as_they_were(self) -> AbstractContextManager[None]:
        """Around a pass that is repeated: with `same: bits` the lane's next one starts over anyway."""
        bits = self._setup.config.same == "bits"
        return nullcontext() if bits else keep_buffers(self._modules)

    def _free_memory(self) -> float:
        """Bytes, of this rank's part of its machine."""
        context = self._setup.context
        if context.device.type == "cuda":
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return float(torch.cuda.mem_get_info()[0] + unused)
        import psutil  # here alone: it is not loaded by every run

        return float(psutil.virtual_memory().available) / context.world

    def _loss_of(self, passes: LanePasses, embedded: Mapping[int, Any], loss: BatchLoss) -> _WholeLoss:
        batches = [passes.batches.on_device(batch) for batch in passes.batches.read_all()]
        samples = passes.data.samples
        if samples is None:
            samples = self._rows.share_samples({batch.lane: len(batch) for batch in batches})
        rows = self._rows.gather("the embeddings", samples, embedded)
        seen = GlobalBatch(self._rows, samples, batches, passes.moment)
        # What it draws is the same on every rank, and so is all else.
        self._setup.rng.enter(WHOLE_BATCH, at=(passes.data.index,))
        with sharing(self._shared), self._loss_buffers.apart():
            return _WholeLoss(rows, samples, lambda whole: loss(whole, seen), self._params)


class _WholeLoss:
    """The loss of all lanes, and what each contributes to the step's gradients."""

    def __init__(
        self, rows: Any, samples: Sequence[int], loss: Callable[[Any], LossValue], params: Sequence[Parameter]
    ) -> None:
        self._samples, self._total = samples, sum(samples)
        self._first = next(lane for lane, count in enumerate(samples) if count)
        rows = map_leaves(_as_leaf, rows)
        embeddings = [leaf for leaf in leaves(rows) if leaf.requires_grad]
        value = loss(rows)
        if isinstance(value, Mapping):
            raise StepError("a loss over the whole batch is one loss: add those with names up")
        self._loss, self._count = OneLoss().combine(value, self._total)
        check_loss(self._loss, self._count)
        found = torch.autograd.grad(self._loss, [*embeddings, *params], allow_unused=True)
        self._loss = self._loss.detach()
        self._gradients = list(found[: len(embeddings)])
        own = zip(params, found[len(embeddings) :], strict=True)
        self._own = [(param, grad) for param, grad in own if grad is not None]
        """What the loss function itself trains: this gradient arises once, and not in every lane."""

    def part(self, lane: int, rows: Any, begin: int, count: int) -> Tensor:
        """Return what has the loss's gradient with respect to the rows of some of a lane's samples."""
        start = sum(self._samples[:lane]) + begin
        trained = [leaf for leaf in leaves(rows) if leaf.is_floating_point()]
        parts = []
        for leaf, gradient in zip(trained, self._gradients, strict=True):
            if gradient is not None:
                views = len(gradient) // self._total
                parts.append((leaf * gradient[start * views : (start + count) * views]).sum())
        if not any(part.requires_grad for part in parts):
            raise StepError("the loss does not depend on embeddings that require a gradient")
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def backward(self, passes: LanePasses, lane: int, rows: Any, begin: int = 0) -> None:
        """Backpropagate the gradients of a lane's rows, of its last piece from `begin` on; count it."""
        passes.backward_lane(self.surrogate(lane, rows, begin), self.stats(lane))

    def surrogate(
        self, lane: int, rows: Any, begin: int = 0, own: Callable[[Tensor], Tensor] = lambda param: param
    ) -> Tensor:
        """Return what has the gradients of a lane's rows, from `begin` on, and of the loss's own parameters."""
        surrogate = self.part(lane, rows, begin, self._samples[lane] - begin)
        for param, gradient in self._own:
            factor = gradient if lane == self._first else torch.zeros_like(gradient)
            surrogate = surrogate + (own(param) * factor).sum()
        return surrogate

    def stats(self, lane: int) -> LaneStats:
        """Return a lane's part of the loss and of its count."""
        share = self._samples[lane] / self._total
        return LaneStats(self._loss * share, self._count * share)


def _as_leaf(rows: Tensor) -> Tensor:
    """Rows that a gradient is wanted of, in single precision at least: sums over many are taken."""
    if not rows.is_floating_point():
        return rows
    return (rows if rows.dtype == torch.float64 else rows.float()).requires_grad_()


def joined(pieces: Sequence[Any]) -> Any:
    """Return the rows of a lane's micro-batches, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*map(leaves, pieces), strict=True)
    rows = iter([torch.cat(column) for column in columns])
    return map_leaves(lambda leaf: next(rows), pieces[0])


def _any_loss(rows: Any) -> Tensor:
    """Something to backpropagate: what a micro-batch needs of memory."""
    return torch.stack([leaf.float().sum() for leaf in leaves(rows) if leaf.requires_grad]).sum()


def _refuse_runner(passes: LanePasses) -> None:
    needs = passes.engine.runner.needs_function
    if needs:
        raise StepError(f"{needs} does not go with a loss over the whole batch: leave it out")


class _Saved:
    bytes = 0


@contextmanager
def measured_activations(params: Sequence[Parameter]) -> Iterator[_Saved]:
    """Measure what a forward pass keeps for its backward pass, but for the parameters."""
    saved = _Saved()
    known = {param.untyped_storage().data_ptr() for param in params}

    def see(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            known.add(memory.data_ptr())
            saved.bytes += memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        yield saved


class LossBuffers:
    """Keeps what a loss changes apart until the lanes are over."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Args:
        modules: The model, whose buffers are its lanes', and then those that a loss may change.
        """
        self._lanes = find_slots(modules[:1])
        self._own = [(s, s.tensor) for s in find_slots(modules[1:]) if s.tensor is not None]
        self._left: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around the loss and its gradient: it changes copies."""
        before = [(slot, slot.tensor, _version(slot.tensor)) for slot in self._lanes]
        copies = [tensor.clone() for _, tensor in self._own]
        versions = [copy._version for copy in copies]
        for (slot, _), copy in zip(self._own, copies, strict=True):
            slot.put(copy)
        try:
            yield
            rows = list(zip(self._own, copies, versions, strict=True))
            changed = {
                (id(slot.module), slot.name)
                for (slot, _), copy, version in rows
                if slot.tensor is not copy or copy._version != version
            }
            self._left = [
                (own, current(slot, copy).detach())
                for (slot, own), copy, _ in rows
                if any((id(slot.module), name) in changed for name in _written_with(slot))
            ]
        finally:
            for slot, own in self._own:
                slot.put(own)
        for slot, tensor, version in before:
            if slot.tensor is not tensor or _version(tensor) != version:
                raise StepError(
                    f"the loss over the whole batch changed buffer {slot.path} of the model, which its "
                    "lanes change: put what the loss changes into a module of its own (extra_modules)"
                )

    @torch.no_grad()
    def put(self) -> None:
        """After the lanes: what the loss has left is the step's."""
        for own, value in self._left:
            own.copy_(value)
        self._left = []


def _written_with(slot: BufferSlot) -> tuple[str, ...]:
    """Return the buffers of its module whose new version says that this one may have changed, too."""
    if isinstance(slot.module, _BatchNorm):
        # torch's kernel moves the statistics without giving them a new version.
        return slot.name, "num_batches_tracked"
    return (slot.name,)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version
