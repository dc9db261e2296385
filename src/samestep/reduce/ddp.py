"""The gradient sum by DistributedDataParallel, for `same: rounding` and `same: samples`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from samestep.config import DistributedConfig
from samestep.distributed.collectives import TorchCollectives
from samestep.distributed.health.activity import COMPUTE
from samestep.reduce.gradients import GradientSum
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags, gather_stats, inverse


def wrap(model: nn.Module, options: DistributedConfig, device: torch.device) -> DistributedDataParallel:
    """Return the model in DistributedDataParallel, with the config's options."""
    with warnings.catch_warnings():
        # torch 2.13 announces another default for broadcast_buffers; ours is meant.
        warnings.simplefilter("ignore", FutureWarning)
        return _wrap(model, options, device)


def wrap_plain(model: nn.Module) -> DistributedDataParallel:
    """Return a model on a CPU as torch's DistributedDataParallel has it by default, to compare with."""
    return _freeing_group_last(DistributedDataParallel(model))


def _wrap(model: nn.Module, options: DistributedConfig, device: torch.device) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        # It would broadcast them in forward, which a rank without samples does not run, and
        # leave them different for an evaluation. DDPSum does it at the end of the step.
        broadcast_buffers=False,
        find_unused_parameters=options.find_unused_parameters,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    return _freeing_group_last(wrapped)


def _freeing_group_last(model: DistributedDataParallel) -> DistributedDataParallel:
    """Return the model, which frees its process group after its reducer.

    The group's own destructor releases the interpreter lock while it ends gloo's threads, which may need that lock to
    release a tensor. The reducer's would hold it, and hang.
    """
    model.process_group = model.__dict__.pop("process_group")  # attributes are freed in the order they were set
    return model


class DDPSum(GradientSum):
    """Lanes accumulate in `.grad`; DistributedDataParallel averages with the last one.

    What it does not reach is all-reduced here: parameters outside the wrapped model, and
    whole steps in which some rank has no samples, where it would wait for that rank's
    backward pass for ever.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        params: Sequence[tuple[str, Parameter]],
        shared_buffers: Sequence[Tensor],
        assignment: Sequence[range],
        collectives: TorchCollectives,
        scaling: Scaling,
    ) -> None:
        super().__init__(scaling)
        self._model = model
        self._assignment, self._collectives = assignment, collectives
        inside = {id(param) for param in model.parameters()}
        self._inside = [param for _, param in params if id(param) in inside]
        self._outside = [param for _, param in params if id(param) not in inside]
        self._shared_buffers = shared_buffers
        """Buffers that become rank 0's after every step."""

    def begin(self, ragged: bool) -> None:
        self.ragged = ragged
        for param in (*self._inside, *self._outside):
            param.grad = None

    def forward_scope(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last and not self.ragged else self._model.no_sync()

    def share(self, lanes: Sequence[LaneStats], flags: RankFlags) -> LocalStats:
        return gather_stats(self._collectives, lanes, flags, self._assignment)

    def backward(self, loss: Tensor, count: Tensor | float, lane: int, last: bool, retain: bool = False) -> None:
        with self._collectives.activity.waiting("gradients in backward", COMPUTE):
            loss.backward(self.scaling.start, retain_graph=retain)

    def finish(self, stats: LocalStats) -> None:
        inverse_count = inverse(stats.count(), self._inside[0].device)
        by_hand = [*self._outside, *(self._inside if self.ragged else ())]
        with self._collectives.activity.waiting("gradients"):
            _all_reduce(by_hand)
            _broadcast(self._shared_buffers)
        self.scaling.apply([param.grad for param in by_hand], inverse_count)
        if not self.ragged:
            # DistributedDataParallel has divided by the world; we need the sum.
            factor = inverse_count * self._collectives.world
            self.scaling.apply([param.grad for param in self._inside], factor)


def _all_reduce(params: Sequence[Parameter]) -> None:
    """Sum these gradients over the ranks; a parameter that no rank used keeps None."""
    by_dtype: dict[torch.dtype, list[Parameter]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for group in by_dtype.values():
        pieces = [torch.zeros_like(param).flatten() if param.grad is None else param.grad.flatten() for param in group]
        used = torch.tensor([param.grad is not None for param in group]).to(pieces[0])
        flat = torch.cat([*pieces, used])
        dist.all_reduce(flat)
        *sums, used = flat.split([*(piece.numel() for piece in pieces), len(group)])
        for param, total, count in zip(group, sums, used.tolist(), strict=True):
            param.grad = total.view(param.shape) if count > 0 else None


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Overwrite the tensors with rank 0's, those of one type in one message."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        dist.broadcast(flat, src=0)
        for tensor, values in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(values.view(tensor.shape))
