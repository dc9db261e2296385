"""BatchNorm over the whole global batch, where each rank drives one lane.

Ranks then run their only lane in step with each other, so they can meet inside of it: in each such
layer's forward pass for the statistics of all lanes, and in its backward pass for the sums that their
gradients need. What the lanes have is gathered in their order and added in the tree's, in float64, so
that every rank normalises by the same bits and its running statistics move alike.
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

from samestep.distributed.collectives import TorchCollectives
from samestep.errors import PlanError, TaskError
from samestep.lanes.tree import merge_order


class GlobalBatchNorm:
    """Where the BatchNorm layers of all ranks meet. Every rank runs the same layers in the same order."""

    def __init__(self, modules: Sequence[nn.Module], collectives: TorchCollectives) -> None:
        """Args:
        modules: All of the run's; their BatchNorm layers get another forward pass.
        collectives: How this rank talks to the others, of which each drives one lane.

        Raises:
            TaskError: A layer has a forward pass of its own.
        """
        self._collectives = collectives
        self._additions = merge_order([(lane, 1) for lane in range(collectives.world)])
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}
        """By size, what was last handed to a collective: else its thread might be the one to free it."""
        self._in_lane: Callable[[], bool] = lambda: False
        self.layers = list(_layers(modules))
        for layer in self.layers:
            layer.forward = partial(_forward, layer, self)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalBatchNorm:
        # A copy of a model, such as a teacher, meets the same ranks.
        return self

    @property
    def buffers(self) -> list[Tensor]:
        """The layers' running statistics, which all ranks move alike."""
        return [buffer for layer in self.layers for buffer in layer.buffers(recurse=False)]

    @property
    def in_lane(self) -> bool:
        """Whether ranks are inside their lanes; elsewhere a layer normalises what it gets, alone."""
        return self._in_lane()

    def begin_step(self, in_lane: Callable[[], bool], ragged: bool) -> None:
        """A new step.

        Args:
            in_lane: Whether its lane is open.
            ragged: Whether some rank has no samples in it; the same on every rank.

        Raises:
            PlanError: Some rank has none.
        """
        if ragged and self.layers:
            raise PlanError(f"some rank has no samples in this step, and {NO_SAMPLES}")
        self._in_lane = in_lane

    def gather(self, own: Tensor) -> Tensor:
        """Every lane's vector, in the order of the lanes: a row for each."""
        sent, every = self._memory(own)
        sent.copy_(own)
        work = self._collectives.all_gather(every, sent, _NAME)
        with self._collectives.activity.waiting(_NAME):
            work.wait()
        # Copied: the next layer of this size uses the same memory.
        return every.view(self._collectives.world, -1).to(own.device, copy=True)

    def add(self, rows: Tensor) -> Tensor:
        """The sum of all lanes' rows, in the tree's order; overwrites them."""
        for left, right in self._additions:
            rows[left] += rows[right]
        return rows[0]

    def _memory(self, own: Tensor) -> tuple[Tensor, Tensor]:
        if own.numel() not in self._sent:
            wire = self._collectives.wire(own.device)
            sent = torch.empty_like(own, device=wire)
            self._sent[own.numel()] = sent, sent.new_empty(self._collectives.world * own.numel())
        return self._sent[own.numel()]


NO_SAMPLES = (
    "batchnorm: global lets all ranks meet in each BatchNorm layer: a rank without samples would not "
    "come there. Set drop_last: true, or a global_batch whose rest fills a part of each lane"
)

_NAME = "BatchNorm over the global batch"


@dataclass(frozen=True)
class Statistics:
    """Of all lanes, in float64; the same bits on every rank."""

    count: Tensor
    mean: Tensor
    squares: Tensor
    """The sum of the squared distances from the mean."""


def statistics_of(rows: Tensor, add: Callable[[Tensor], Tensor]) -> Statistics:
    """The statistics of all lanes together, from each one's own.

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
    """The row of this rank's lane."""
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
    if not layer.training or not ranks.in_lane:
        return _BatchNorm.forward(layer, x)
    layer._check_input_dim(x)
    with torch.no_grad():
        found = statistics_of(ranks.gather(_own_statistics(x)), ranks.add)
        inverse = torch.rsqrt(found.squares / found.count + layer.eps)
        _track(layer, found)
    wide = _wide(x)
    normalised: Tensor = _Normalise.apply(
        x, layer.weight, layer.bias, found.mean.to(wide), inverse.to(wide), found.count, ranks
    )  # type: ignore[no-untyped-call]
    return normalised


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
    """Normalises this rank's lane by the statistics of all."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: Tensor,
        ranks: GlobalBatchNorm,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.ranks = ranks
        made = _normal(x, mean, inverse)
        if weight is not None:
            made = made * _shaped(weight.to(made), x)
        if bias is not None:
            made = made + _shaped(bias.to(made), x)
        return made.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        grad, normal = grad.to(mean), _normal(x, mean, inverse)
        others = _all_but_channels(x)
        # The weight's and bias's gradients are this lane's: all lanes' are added up like any other's.
        sums = torch.stack([grad.sum(others), (grad * normal).sum(others)])
        own = [None if weight is None else total.to(weight.dtype) for total in sums]
        if not ctx.needs_input_grad[0]:
            return None, own[1], own[0], None, None, None, None
        means = ctx.ranks.add(ctx.ranks.gather(sums.double().flatten())) / count
        shift, slope = means.to(grad).view_as(sums)
        scale = inverse if weight is None else inverse * weight.to(inverse)
        into = (grad - _shaped(shift, x) - normal * _shaped(slope, x)) * _shaped(scale, x)
        return into.to(x.dtype), own[1], own[0], None, None, None, None


def _normal(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (x.to(mean.dtype) - _shaped(mean, x)) * _shaped(inverse, x)


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
