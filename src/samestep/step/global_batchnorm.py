"""BatchNorm over the whole global batch.

The lanes of a rank pass each layer together, as one node of the graph. Ranks meet there: in the forward pass for
the statistics of all lanes, in the backward pass for the sums that their gradients need. What the lanes have is
gathered in their order and added in the tree's, in float64, so that every rank normalises by the same bits and its
running statistics move alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from samestep.distributed.collectives import Collectives, TorchCollectives
from samestep.errors import StepError, TaskError
from samestep.reduce.stats import sum_of_rows
from samestep.step.lane_scope import NO_LANE, LaneLeaves, Lanes, scope_of_body
from samestep.step.lane_tensor import LaneTensor, lane_tensor

_NAME = "BatchNorm over the global batch"


class GlobalBatchNorm:
    """Joins the BatchNorm layers of all lanes. Every rank runs the same layers in the same order."""

    def __init__(self, modules: Sequence[nn.Module], assignment: Sequence[range], collectives: Collectives) -> None:
        """Raises:
        TaskError: A layer has a forward pass of its own.
        """
        self._collectives, self._mine = collectives, assignment[collectives.rank]
        self._most = max(map(len, assignment))
        self._places = [rank * self._most + at for rank, lanes in enumerate(assignment) for at in range(len(lanes))]
        """Where among the gathered rows those of each lane are."""
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        """By size, what was last handed to a collective: else its thread might be the one to free it."""
        self._in_lane: Callable[[], bool] = lambda: False
        self.layers = list(_layers(modules))
        for layer in self.layers:
            layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalBatchNorm:
        # A copy of a model, such as a teacher, meets the same lanes.
        return self

    @property
    def buffers(self) -> list[Tensor]:
        """The layers' running statistics, which all ranks move alike."""
        return [buffer for layer in self.layers for buffer in layer.buffers(recurse=False)]

    @property
    def in_lane(self) -> bool:
        """Return whether one lane runs by itself; outside of lanes a layer normalises what it gets, alone."""
        return self._in_lane()

    def begin_step(self, in_lane: Callable[[], bool]) -> None:
        """A new step; `in_lane` returns whether one of its lanes runs by itself."""
        self._in_lane = in_lane

    def normalise(self, layer: _BatchNorm, x: LaneTensor) -> LaneTensor:
        """Run the layer's forward pass for all lanes of this rank; all ranks call this."""
        scope = scope_of_body.get()
        leaves = None if scope is None else scope.leaves
        if scope is None or leaves is None:
            raise StepError(
                f"{_NAME} was computed outside of the lines in which all lanes run together, such as again in a "
                "backward pass: checkpoint the activations of a BatchNorm by memory.checkpoint, not by torch.utils.checkpoint"
            )
        with scope.paused():
            return lane_tensor(x.lanes, self._normalised(layer, x, leaves))

    def _normalised(self, layer: _BatchNorm, x: LaneTensor, leaves: LaneLeaves) -> tuple[Tensor, ...]:
        for value in x.per_lane:
            layer._check_input_dim(value)
        with torch.no_grad():
            found = statistics_of(self.gather(own_statistics(x.per_lane), x.lanes))
            inverse = torch.rsqrt(found.squares / found.count + layer.eps)
            _track(layer, found)
        wide = _wide(x.per_lane[0])
        shared = [
            None if value is None else leaves.of(value, at)
            for value in (layer.weight, layer.bias)
            for at in range(len(x.lanes))
        ]
        made: tuple[Tensor, ...] = _Normalise.apply(
            self, x.lanes, found.mean.to(wide), inverse.to(wide), found.count, *x.per_lane, *shared
        )  # type: ignore[no-untyped-call]
        return made

    def gather(self, own: Tensor, lanes: Lanes) -> Tensor:
        """Return the rows of all lanes, in their order; zeros of lanes without samples."""
        if not isinstance(self._collectives, TorchCollectives):
            if len(lanes) == len(self._places):
                return own
            every = own.new_zeros(len(self._places), own.shape[1])
            every[list(lanes)] = own
            return every
        sent, every = self._memory(own)
        sent.zero_()
        for lane, row in zip(lanes, own, strict=True):
            if lane != NO_LANE:
                sent[lane - self._mine.start] = row
        work = self._collectives.all_gather(every.view(-1), sent.view(-1), _NAME)
        with self._collectives.activity.waiting(_NAME):
            work.wait()
        # Copied: the next layer of this size uses the same memory.
        return every[self._places].to(own.device)

    def _memory(self, own: Tensor) -> tuple[Tensor, Tensor]:
        size = own.shape[1]
        if size not in self._sent:
            wire = self._collectives.wire(own.device)
            with torch.inference_mode(False):  # others write to it, too
                sent = torch.empty(self._most, size, dtype=own.dtype, device=wire)
                self._sent[size] = sent, sent.new_empty(self._collectives.world * self._most, size)
        return self._sent[size]


@dataclass(frozen=True)
class Statistics:
    """The statistics of all lanes, in float64; the same bits on every rank."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    """The sum of the squared distances from the mean."""


def statistics_of(rows: Tensor) -> Statistics:
    """Return the statistics of all lanes together, from each one's own.

    Each lane's squares are about its own mean and moved to the common one: squares about zero would
    lose all digits where the mean is large.

    Args:
        rows: For each lane its count, its means, and its squares about them.
    """
    size = (rows.shape[1] - 1) // 2
    counts, means, squares = rows.split([1, size, size], dim=1)
    count, total = sum_of_rows(torch.cat([counts, counts * means], dim=1)).split([1, size])
    mean = total / count
    return Statistics(count, mean, sum_of_rows(squares + counts * (means - mean).square()))


def own_statistics(lanes: Sequence[Tensor]) -> Tensor:
    """Return the rows of this rank's lanes: each by itself, as on any number of ranks."""
    sizes = [value.numel() // value.shape[1] for value in lanes]
    device, wide = lanes[0].device, _wide(lanes[0])
    found = [
        torch.var_mean(value.to(wide), _all_but_channels(value), correction=0)
        if size
        else (value.new_zeros(value.shape[1], dtype=wide),) * 2
        for value, size in zip(lanes, sizes, strict=True)
    ]
    counts = torch.tensor(sizes, dtype=torch.float64).to(device, non_blocking=True)[:, None]
    variances, means = (torch.stack(column).double() for column in zip(*found, strict=True))
    return torch.cat([counts, means, variances * counts], dim=1)


def _forward(layer: _BatchNorm, ranks: GlobalBatchNorm, x: Tensor) -> Tensor:
    """Return a layer's forward pass; in evaluation, and outside of lanes, it is torch's."""
    if layer.training and type(x) is LaneTensor:
        return ranks.normalise(layer, x)
    if layer.training and ranks.in_lane:
        raise StepError(
            "a BatchNorm over the global batch was called for one lane alone, as in run.each_lane, an "
            "autograd.Function or torch.utils.checkpoint: call the model with what the loader yields, and checkpoint by "
            "memory.checkpoint"
        )
    return _BatchNorm.forward(layer, x)


def _track(layer: _BatchNorm, found: Statistics) -> None:
    """Move the running statistics, as torch does: the variance without bias."""
    if not layer.track_running_stats:
        return
    factor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    variance = found.squares / (found.count - 1)
    for running, new in ((layer.running_mean, found.mean), (layer.running_var, variance)):
        if running is not None:
            running.copy_((1 - factor) * running.double() + factor * new)


class _Normalise(torch.autograd.Function):
    """Normalises this rank's lanes by the statistics of all."""

    @staticmethod
    def forward(
        ctx: Any,
        ranks: GlobalBatchNorm,
        lanes: Lanes,
        mean: Tensor,
        inverse: Tensor,
        count: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.lanes = ranks, lanes
        tensors = tuple(_dense(tensor) for tensor in tensors)
        ctx.save_for_backward(mean, inverse, count, *tensors)
        return tuple(_scaled(x, mean, inverse, weight, bias) for x, weight, bias in _by_lane(tensors, len(lanes)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, inverse, count, *tensors = ctx.saved_tensors
        lanes = list(_by_lane(tensors, len(ctx.lanes)))
        dense = [_like(grad, x) for grad, (x, _, _) in zip(grads, lanes, strict=True)]
        sums = [_sums(grad, x, mean, inverse) for grad, (x, _, _) in zip(dense, lanes, strict=True)]
        # The gradients of weight and bias are each lane's: all lanes' are added up like any others'.
        own: list[Tensor | None] = [
            None if weight is None else found[kind].to(weight.dtype)
            for kind in (1, 0)
            for found, (_, weight, _) in zip(sums, lanes, strict=True)
        ]
        into: list[Tensor | None] = [None] * len(lanes)
        if any(ctx.needs_input_grad[5 : 5 + len(lanes)]):
            rows = torch.stack([torch.cat(found) for found in sums]).double()
            total = sum_of_rows(ctx.ranks.gather(rows, ctx.lanes)).to(mean)
            into = [
                _moved(grad, x, mean, inverse, weight, total, count)
                for grad, (x, weight, _) in zip(dense, lanes, strict=True)
            ]
        return (None, None, None, None, None, *into, *own)


def _by_lane(tensors: Sequence[Any], lanes: int) -> Iterator[tuple[Tensor, Any, Any]]:
    """Return what each lane normalises, its weight and its bias."""
    return zip(tensors[:lanes], tensors[lanes : 2 * lanes], tensors[2 * lanes :], strict=True)


# -- one lane: on a GPU by the kernels of torch's SyncBatchNorm, elsewhere by these formulas ---------------


def _scaled(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return a normalised lane, by weight and bias."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, 0.0)  # eps is in the inverse
    scale = inverse if weight is None else inverse * weight.to(inverse)
    made = (x.to(mean.dtype) - _shaped(mean, x)) * _shaped(scale, x)
    return (made if bias is None else made + _shaped(bias.to(made), x)).to(x.dtype)


def _sums(grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of a lane's gradients, and of them times what was normalised."""
    if x.is_cuda:
        found = torch.batch_norm_backward_reduce(grad, x, mean, inverse, None, True, False, False)
        return found[0], found[1] * inverse
    dims, normal = _all_but_channels(x), _normal(x, mean, inverse)
    wide = grad.to(mean)
    return wide.sum(dims), (wide * normal).sum(dims)


def _moved(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, sums: Tensor, count: Tensor
) -> Tensor:
    """Return the gradients of what was normalised, by the sums of all lanes."""
    total, by_normal = sums.view(2, -1)
    if x.is_cuda:
        parts = total.contiguous(), by_normal / inverse
        return torch.batch_norm_backward_elemt(grad, x, mean, inverse, weight, *parts, count.to(torch.int32))
    scale = inverse if weight is None else inverse * weight.to(inverse)
    shift, slope = (total / count).to(mean), (by_normal / count).to(mean)
    moved = grad.to(mean) - _shaped(shift, x) - _normal(x, mean, inverse) * _shaped(slope, x)
    return (moved * _shaped(scale, x)).to(x.dtype)


def _normal(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _shaped(mean, x)) * _shaped(inverse, x)


def _dense(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor in a memory layout that the kernels take."""
    if tensor is None or not tensor.is_cuda or tensor.is_contiguous():
        return tensor
    format_ = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = format_ is not None and tensor.is_contiguous(memory_format=format_)
    return tensor if is_last else tensor.contiguous()


def _like(grad: Tensor, x: Tensor) -> Tensor:
    """Return a gradient in the memory layout of what was normalised."""
    if not x.is_cuda or grad.stride() == x.stride():
        return grad
    return torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(values: Tensor, x: Tensor) -> Tensor:
    """Return a value for each channel, beside a batch of this shape."""
    return values.view(-1, *(1 for _ in range(x.dim() - 2)))


def _layers(modules: Sequence[nn.Module]) -> Iterator[_BatchNorm]:
    seen: set[int] = set()
    for module in modules:
        for name, part in module.named_modules():
            if not isinstance(part, _BatchNorm) or id(part) in seen:
                continue
            seen.add(id(part))
            own = vars(part).get("forward")
            earlier = getattr(own, "func", None) is _forward  # of a run that is over
            if type(part).forward is not _BatchNorm.forward or not (own is None or earlier):
                kind = type(part).__name__
                raise TaskError(
                    f"{name or kind} is a {kind} with a forward pass of its own, which batchnorm: global "
                    "would have to replace: use torch's BatchNorm there, or batchnorm: lane"
                )
            yield part
