"""How the lanes of a run are added up, at its level of sameness and its number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import Parameter

from samestep.config import Config
from samestep.distributed.collectives import Collectives, TorchCollectives
from samestep.errors import LaunchError
from samestep.reduce import ddp
from samestep.reduce.buffers import LaneBuffers, changing_buffers
from samestep.reduce.gradients import GradientSum, LaneSum, OneLaneSum
from samestep.reduce.tree_sum import TreeSum

NamedParameters = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class LaneReduction:
    """What a run adds its lanes up with."""

    model: nn.Module
    """The user's model, wrapped where the level of sameness needs it."""
    gradients: GradientSum
    buffers: LaneBuffers


def build_reduction(
    config: Config,
    collectives: Collectives,
    device: torch.device,
    modules: Sequence[nn.Module],
    params: NamedParameters,
    assignment: Sequence[range],
) -> LaneReduction:
    """What adds up the lanes of these modules, whose weights become rank 0's."""
    collectives.broadcast_tensors(
        [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    )
    model, gradients = _gradient_sum(config, collectives, device, modules[0], params, assignment)
    # `samples` fuses a rank's lanes: its buffers are DistributedDataParallel's business.
    buffers = [] if config.same == "samples" else changing_buffers(modules)
    return LaneReduction(model, gradients, LaneBuffers(buffers, assignment, collectives))


def _gradient_sum(
    config: Config,
    collectives: Collectives,
    device: torch.device,
    model: nn.Module,
    params: NamedParameters,
    assignment: Sequence[range],
) -> tuple[nn.Module, GradientSum]:
    find_unused = config.distributed.find_unused_parameters
    if not isinstance(collectives, TorchCollectives):
        my_lanes = assignment[0]
        # In micro-batches, the lane's count is known only with the last of them.
        alone = len(my_lanes) == 1 and config.memory.lane_split == 1
        return model, OneLaneSum(params) if alone else LaneSum(params, my_lanes, find_unused)
    if config.same == "bits":
        return model, TreeSum(params, assignment, collectives, find_unused)
    return _by_ddp(config, collectives, device, model, params, assignment)


def _by_ddp(
    config: Config,
    collectives: TorchCollectives,
    device: torch.device,
    model: nn.Module,
    params: NamedParameters,
    assignment: Sequence[range],
) -> tuple[nn.Module, GradientSum]:
    options = config.distributed
    if options.sync_batchnorm:
        model = _sync_batchnorm(model, device)
    wrapped = ddp.wrap(model, options, device)
    shared = config.same == "samples" and options.broadcast_buffers
    buffers = list(wrapped.buffers()) if shared else []
    return wrapped, ddp.DDPSum(wrapped, params, buffers, assignment, collectives)


def _sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise LaunchError(
            "distributed.sync_batchnorm is true but this rank runs on the CPU, where torch "
            "has no SyncBatchNorm: set it to false, or run on GPUs"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
