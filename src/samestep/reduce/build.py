"""Builds the sum of a run's lanes, for its level of sameness and its number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from samestep.config import Config
from samestep.distributed.collectives import Collectives, TorchCollectives
from samestep.errors import LaunchError
from samestep.reduce import ddp
from samestep.reduce.buffers import LaneBuffers
from samestep.reduce.gradients import GradientSum, LaneSum, OneLaneSum
from samestep.reduce.owned_sum import OwnedSum
from samestep.reduce.owned_update import OwnedUpdate
from samestep.reduce.owners import Owners
from samestep.reduce.round_sum import RoundSum
from samestep.reduce.scaling import Scaling
from samestep.reduce.sharded_weights import ShardedWeights
from samestep.reduce.tree_sum import SumSetup, TreeSum
from samestep.reduce.weight_units import cut_units, refuse_checkpoints_around

NamedParameters = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class LaneReduction:
    """The parts by which a run adds its lanes up."""

    model: nn.Module
    """The user's model, wrapped where the level of sameness needs it."""
    gradients: GradientSum
    buffers: LaneBuffers
    owned_update: OwnedUpdate | None = None
    """Updates by owners, with `distributed.shard`."""


def build_reduction(
    config: Config,
    collectives: Collectives,
    device: torch.device,
    modules: Sequence[nn.Module],
    params: NamedParameters,
    assignment: Sequence[range],
    scaling: Scaling,
    warn: Callable[[str], None] = lambda line: None,
    alike: Sequence[Tensor] = (),
) -> LaneReduction:
    """Return what adds up the lanes of these modules, whose weights are the same on every rank.

    Args:
        assignment: The units of every rank.
        warn: Called about buffers of which no module declares how lanes are joined.
        alike: Buffers that all ranks change alike.
    """
    model: nn.Module = modules[0]
    gradients: GradientSum
    owned_update: OwnedUpdate | None = None
    if not isinstance(collectives, TorchCollectives):
        gradients = _single_process_sum(config, params, assignment[0], scaling)
    elif config.same == "bits":
        gradients, owned_update = _tree_sum(config, collectives, device, modules, params, assignment, scaling)
    else:
        wrapped = _wrapped(config, device, model)
        shared = config.same == "samples" and config.distributed.broadcast_buffers
        sent = list(wrapped.buffers()) if shared else []
        model = wrapped
        gradients = ddp.DDPSum(wrapped, params, sent, assignment, collectives, scaling)
    # `samples` fuses a rank's lanes: its buffers are DistributedDataParallel's business.
    joined = [] if config.same == "samples" else modules
    if config.same == "samples" and config.loss_weights:
        joined = modules[-1:]  # the sums of the named losses
    buffers = LaneBuffers(joined, assignment, collectives, warn, alike)
    return LaneReduction(model, gradients, buffers, owned_update)


def _tree_sum(
    config: Config,
    collectives: TorchCollectives,
    device: torch.device,
    modules: Sequence[nn.Module],
    params: NamedParameters,
    assignment: Sequence[range],
    scaling: Scaling,
) -> tuple[GradientSum, OwnedUpdate | None]:
    rules = config.distributed
    setup = SumSetup(assignment, collectives, rules.find_unused_parameters, scaling)
    if rules.shard == "none":
        return TreeSum(params, setup), None
    owners = Owners([param for _, param in params], collectives.rank, collectives.world)
    if rules.shard == "optimizer":
        sums = OwnedSum(params, setup, owners)
        return sums, OwnedUpdate(sums, collectives)
    units = cut_units(modules[0], params, rules.shard_blocks)
    refuse_checkpoints_around(units, config.memory.checkpoint)
    weights = ShardedWeights(units, owners, collectives, device)
    for module in modules:
        module.to(device)  # what nobody owns: buffers, and frozen parameters
        weights.guard(module)
    sums = RoundSum(params, setup, weights)
    return sums, OwnedUpdate(sums, collectives, weights)


def _single_process_sum(config: Config, params: NamedParameters, my_units: range, scaling: Scaling) -> GradientSum:
    # In micro-batches, the lane's count is known only with the last of them.
    if len(my_units) == 1 and config.memory.lane_split == 1:
        return OneLaneSum(params, scaling)
    find_unused = config.distributed.find_unused_parameters
    return LaneSum(params, my_units, find_unused, scaling)


def _wrapped(config: Config, device: torch.device, model: nn.Module) -> DistributedDataParallel:
    if config.distributed.sync_batchnorm:
        model = _sync_batchnorm(model, device)
    return ddp.wrap(model, config.distributed, device)


def _sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise LaunchError(
            "distributed.sync_batchnorm is true but this rank runs on the CPU, where torch "
            "has no SyncBatchNorm: set it to false, or run on GPUs"
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
