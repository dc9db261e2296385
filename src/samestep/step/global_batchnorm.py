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
from samestep.lanes.tree import merge_order
from samestep.step.lane_leaves import LaneLeaves
from samestep.step.lane_scope import NO_LANE, Lanes, scope_of_body
from samestep.step.lane_tensor import LaneTensor, lane_tensor

_NAME = "BatchNorm over the global batch"


class GlobalBatchNorm:
    """Where the BatchNorm layers of all lanes meet. Every rank runs the same layers in the same order."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        assignment: Sequence[range],
        collectives: Collectives,
    ) -> None:
        """Args:
        modules: All of the run's; their BatchNorm layers get another forward pass.
        assignment: The lanes of each rank.
        collectives: How this rank talks to the others.

        Raises:
            TaskError: A layer has a forward pass of its own.
        """
        self._collectives, self._mine = collectives, assignment[collectives.rank]
        self._most = max(map(len, assignment))
        self._places = [
            rank * self._most + at
            for rank, lanes in enumerate(assignment)
            for at in range(len(lanes))
        ]
        """Where among the gathered rows those of each lane are."""
        self._additions = merge_order([(lane, 1) for lane in range(len(self._places))])
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
        """Whether one lane runs by itself; outside of lanes a layer normalises what it gets, alone."""
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
                "backward pass: do not checkpoint the activations of a BatchNorm with batchnorm: global"
            )
        with scope.paused():
            return lane_tensor(x.lanes, self._normalised(layer, x, leaves))

    def _normalised(
        self, layer: _BatchNorm, x: LaneTensor, leaves: LaneLeaves
    ) -> tuple[Tensor, ...]:
        for value in x.per_lane:
            layer._check_input_dim(value)
        with torch.no_grad():
            rows = torch.stack([_own_statistics(value) for value in x.per_lane])
            found = statistics_of(self.gather(rows, x.lanes), self.add)
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
        """Return the rows of all lanes, in their order; zeros of lanes without samples.

        Args:
            own: The rows of this rank's lanes.
            lanes: Which they are.
        """
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

    def add(self, rows: Tensor) -> Tensor:
        """Return the sum of all lanes' rows, in the tree's order; overwrites them."""
        for left, right in self._additions:
            rows[left] += rows[right]
        return rows[0]

    def _memory(self, own: Tensor) -> tuple[Tensor, Tensor]:
        size = own.shape[1]
        if size not in self._sent:
            wire = self._collectives.wire(own.device)
            sent = own.new_empty(self._most, size, device=wire)
            self._sent[size] = sent, sent.new_empty(self._collectives.world * self._most, size)
        return self._sent[size]


@dataclass(frozen=True)
class Statistics:
    """Of all lanes, in float64; the same bits on every rank."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    """The sum of the squared distances from the mean."""


def statistics_of(rows: Tensor, add: Callable[[Tensor], Tensor]) -> Statistics:
    """Return the statistics of all lanes together, from each one's own.

    Each lane's squares are about its own mean and moved to the common one: squares about zero would
    lose all digits where the mean is large.

    Args:
        rows: For each lane its count, its means, and its squares about them.
        add: Sums the rows of all lanes.
    """
    size = (rows.shape[1] - 1) // 2
    counts, means, squares = rows.split([1, size, size], dim=1)
    count = add(counts.clone())
    mean = add(counts * means) / count
    return Statistics(count, mean, add(squares + counts * (means - mean).square()))


def _own_statistics(x: Tensor) -> Tensor:
    """The row of one lane."""
    size = x.shape[1]
    count = x.numel() // size
    row = torch.zeros(1 + 2 * size, dtype=torch.float64, device=x.device)
    if count:
        variance, mean = torch.var_mean(x.to(_wide(x)), _all_but_channels(x), correction=0)
        row[0] = count
        row[1 : 1 + size] = mean
        row[1 + size :] = variance.double() * count
    return row


def _forward(layer: _BatchNorm, ranks: GlobalBatchNorm, x: Tensor) -> Tensor:
    """A layer's forward pass; in evaluation, and outside of lanes, it is torch's."""
    if layer.training and type(x) is LaneTensor:
        return ranks.normalise(layer, x)
    if layer.training and ranks.in_lane:
        raise StepError(
            "a BatchNorm over the global batch was called for one lane alone, as in run.each_lane or in an "
            "autograd.Function: call the model with what the loader yields"
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
        ctx.save_for_backward(mean, inverse, count, *tensors)
        return tuple(
            _scaled(_normal(x, mean, inverse), weight, bias).to(x.dtype)
            for x, weight, bias in _by_lane(tensors, len(lanes))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mean, inverse, count, *tensors = ctx.saved_tensors
        lanes = list(_by_lane(tensors, len(ctx.lanes)))
        grads = tuple(grad.to(mean) for grad in grads)
        normals = [_normal(x, mean, inverse) for x, _, _ in lanes]
        sums = torch.stack(
            [
                torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
                for grad, normal in zip(grads, normals, strict=True)
                for dims in [_all_but_channels(grad)]
            ]
        )
        # The gradients of weight and bias are each lane's: all lanes' are added up like any others'.
        own: list[Tensor | None] = [
            None if weight is None else sums[at, kind].to(weight.dtype)
            for kind in (1, 0)
            for at, (_, weight, _) in enumerate(lanes)
        ]
        into: list[Tensor | None] = [None] * len(lanes)
        if any(ctx.needs_input_grad[5 : 5 + len(lanes)]):
            rows = ctx.ranks.gather(sums.double().flatten(1), ctx.lanes)
            shift, slope = (ctx.ranks.add(rows) / count).to(mean).view_as(sums[0])
            for at, ((x, weight, _), grad, normal) in enumerate(
                zip(lanes, grads, normals, strict=True)
            ):
                scale = inverse if weight is None else inverse * weight.to(inverse)
                moved = grad - _shaped(shift, x) - normal * _shaped(slope, x)
                into[at] = (moved * _shaped(scale, x)).to(x.dtype)
        return (None, None, None, None, None, *into, *own)


def _by_lane(tensors: Sequence[Any], lanes: int) -> Iterator[tuple[Tensor, Any, Any]]:
    """What each lane normalises, its weight and its bias."""
    return zip(tensors[:lanes], tensors[lanes : 2 * lanes], tensors[2 * lanes :], strict=True)


def _normal(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _shaped(mean, x)) * _shaped(inverse, x)


def _scaled(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normal = normal * _shaped(weight.to(normal), normal)
    return normal if bias is None else normal + _shaped(bias.to(normal), normal)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _shaped(values: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, beside a batch of this shape."""
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
