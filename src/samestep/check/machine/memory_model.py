"""Predicts a training's memory from the shapes of its tensors; nothing here allocates any."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.bench.memory_meter import TensorMeter
from samestep.config import Config
from samestep.distributed.collectives import SoloCollectives, TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.lanes.plan import LaneAssignment
from samestep.lanes.tree import LaneTree
from samestep.reduce.owned_sum import OwnedSum
from samestep.reduce.owners import Owners
from samestep.reduce.round_sum import RoundSum
from samestep.reduce.scaling import Scaling
from samestep.reduce.sharded_weights import ShardedWeights
from samestep.reduce.tree_sum import SumSetup, TreeSum
from samestep.reduce.weight_units import Unit


def predict_gathered(units: Sequence[Unit], owns: Callable[[Tensor], bool]) -> int:
    """Return the bytes of other owners' weights in no block and in two blocks in a row."""
    if not units:
        return 0
    *blocks, rest = [sum(p.nbytes for _, p in unit.params if not owns(p)) for unit in units]
    return rest + max(map(sum, zip([0, *blocks], [*blocks, 0], strict=True)))


def gradient_sets(config: Config, assignment: LaneAssignment) -> int:
    """Return how many gradients of each parameter a rank holds at most, besides those that are exchanged."""
    alone, mine = len(assignment.units) == 1, assignment.my_units
    if not alone and config.same != "bits":
        # DistributedDataParallel adds lanes in one set; of a single one that may be its buckets.
        return 0 if len(mine) == 1 and config.distributed.gradient_as_bucket_view else 1
    if len(mine) == 1 or (config.distributed.shard == "weights" and not alone):
        return 1 if alone else 0  # moved into the exchanged buffers, bucket by bucket
    return max(_sets_before(mine)) + 1


def _sets_before(lanes: range) -> list[int]:
    """Return how many partial sums a rank holds when each of its lanes begins."""
    tree: LaneTree[int] = LaneTree(lambda left, right: left)
    found = []
    for lane in lanes:
        found.append(len(tree.nodes))
        tree.push(lane, 1, lane)
    return found


class _Shapes(SoloCollectives):
    """A rank that sends nothing: what is exchanged is only laid out."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(Activity())
        self.rank, self.world = rank, world


@dataclass(frozen=True)
class _ShapesOfWeights:
    """The units and owners that a sum by rounds reads."""

    units: Sequence[Unit]
    owners: Owners


def predict_exchange(
    config: Config, assignment: LaneAssignment, params: Sequence[Tensor], units: Sequence[Unit] = ()
) -> int:
    """Return what ranks hold to exchange gradients.

    Args:
        units: What is gathered together, with `distributed.shard: weights`.
    """
    if len(assignment.units) == 1:
        return 0
    if config.same != "bits":
        return sum(param.nbytes for param in params)
    shapes = [("", nn.Parameter(torch.empty_like(param, device="meta"))) for param in params]
    # It is asked for its rank only, as long as nothing is sent.
    ranks = cast(TorchCollectives, _Shapes(assignment.rank, len(assignment.units)))
    meter = TensorMeter()
    with meter:
        setup = SumSetup(assignment.units, ranks, False, Scaling())
        owners = Owners([param for _, param in shapes], ranks.rank, ranks.world)
        laid_out: TreeSum
        if config.distributed.shard == "none":
            laid_out = TreeSum(shapes, setup)
        elif config.distributed.shard == "optimizer":
            laid_out = OwnedSum(shapes, setup, owners)
        else:
            of = {id(param): shape for param, (_, shape) in zip(params, shapes, strict=True)}
            same = [replace(u, params=[(n, of[id(p)]) for n, p in u.params]) for u in units]
            weights = cast(ShardedWeights, _ShapesOfWeights(same, owners))
            laid_out = RoundSum(shapes, setup, weights)
        held = meter.held()
        if isinstance(laid_out, RoundSum):
            held += _partial_sums(assignment) * laid_out.added_bytes
        del laid_out
    return held


def _partial_sums(assignment: LaneAssignment) -> int:
    """Return how many partial sums an owner holds between rounds, besides the one that becomes the whole sum."""
    world, lanes = len(assignment.units), sum(map(len, assignment.units))
    tree: LaneTree[int] = LaneTree(lambda left, right: left)
    most = 1
    for lane in range(lanes):
        tree.push(lane, 1, lane)
        if (lane + 1) % world == 0 and lane + 1 < lanes:
            most = max(most, len(tree.nodes))
    return most - 1


def predict_optimizers(
    optimizers: Sequence[Optimizer], device: torch.device, owns: Callable[[Tensor], bool] = lambda param: True
) -> tuple[int | None, int]:
    """Return what optimizers keep of their parameters, and hold besides while they step.

    Args:
        owns: Returns whether this rank steps a parameter.

    Returns:
        None and 0 if one of them cannot step without numbers.
    """
    kept = most = 0
    for optimizer in optimizers:
        twin = _on_meta(optimizer, device, owns)
        meter = TensorMeter()
        with meter:
            try:
                with torch.no_grad():
                    type(twin).step(twin)
            except (RuntimeError, NotImplementedError, TypeError):
                return None, 0  # one that reads numbers, or calls a closure
            kept += meter.held()
            if not any(group.get("fused") for group in optimizer.param_groups):
                most = max(most, meter.peak() - meter.held())
    return kept, most


def _on_meta(optimizer: Optimizer, device: torch.device, owns: Callable[[Tensor], bool]) -> Optimizer:
    """Return the same optimizer of parameters that are only shapes, before its first step."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [_meta_group(group, device, owns) for group in optimizer.param_groups]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _meta_group(group: dict[str, Any], device: torch.device, owns: Callable[[Tensor], bool]) -> dict[str, Any]:
    params = []
    for param in group["params"]:
        shape = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        if param.requires_grad and owns(param):
            shape.grad = torch.empty_like(shape)
        params.append(shape)
    found = {**group, "params": params}
    if isinstance(group.get("lr"), Tensor):
        found["lr"] = float(group["lr"])
    # There are no fused kernels for shapes; they keep the same, and hold nothing besides.
    for name in ("fused", "capturable"):
        if name in group:
            found[name] = False
    if "foreach" in group and group["foreach"] is None:
        found["foreach"] = device.type == "cuda" and not group.get("fused")
    return found
