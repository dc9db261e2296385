"""Predicts a training's memory from the shapes of its tensors; nothing here allocates any."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from samestep.bench.memory_meter import TensorMeter
from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.distributed.collectives import SoloCollectives, TorchCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.lanes.plan import LaneAssignment
from samestep.lanes.tree import LaneTree
from samestep.pytree import tensors
from samestep.reduce.owned_sum import OwnedSum, bucket_bytes
from samestep.reduce.owners import Owners
from samestep.reduce.round_sum import RoundSum
from samestep.reduce.scaling import Scaling
from samestep.reduce.sharded_weights import ShardedWeights
from samestep.reduce.tree_sum import SumSetup, TreeSum, largest_bucket
from samestep.reduce.weight_units import Unit
from samestep.run.run import Run
from samestep.step.micro_batches import cut_batch
from samestep.train.task import Task

_FEWEST_SAMPLES = 4
"""Samples of a lane whose activations are predicted: BatchNorm needs parts with two samples and more."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the parts of a training; None: not known."""

    weights: int
    buffers: int
    optimizer: int | None
    gradients: int
    """Gradients of all sets that are held at once."""
    activations: int | None
    exchange: int
    batches: int
    """Batches of all lanes of a step."""
    passing: int
    """Gradients on their way to memory that they are added to; negative where less than `gradients` is held at once."""
    update: int
    """What the optimizers' step holds besides, while it runs."""
    gathered: int = 0
    """Weights of other owners, while blocks run (`distributed.shard: weights`)."""

    @property
    def total(self) -> int | None:
        """Return what is held at most: when the last lane's backward pass begins, or in the update."""
        if self.optimizer is None or self.activations is None:
            return None
        held = self.weights + self.buffers + self.optimizer + self.exchange + self.batches
        summed = min(self.gradients, self.weights)  # the update has one set of them left
        backward = self.gradients + self.activations + self.passing + self.gathered
        return held + max(backward, summed + self.update)


def bytes_of(found: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, each memory once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


def predict(run: Run, task: Task, batch: LaneBatch) -> StepMemory:
    """Return what a prepared run should hold."""
    state, assignment = run.state, run.setup.assignment
    modules, params = list(state.modules), _trained(state.optimizers)
    owners = run.owners
    owns = (lambda param: True) if owners is None else owners.is_mine
    optimizer, update = predict_optimizers(state.optimizers, run.device, owns)
    one_set = sum(param.nbytes for param in params)
    weights = run.setup.gathered.weights
    units = () if weights is None else weights.units
    exchange = predict_exchange(run.config, assignment, params, units)
    with nullcontext() if weights is None else weights.everywhere():
        activations = predict_activations(run, task, batch)
    return StepMemory(
        weights=bytes_of([param for module in modules for param in module.parameters()]),
        buffers=bytes_of([buffer for module in modules for buffer in module.buffers()]),
        optimizer=optimizer,
        gradients=gradient_sets(run.config, assignment) * one_set,
        activations=activations,
        exchange=exchange,
        batches=len(assignment.my_units) * sum(tensor.nbytes for tensor in tensors(batch.data)),
        passing=_passing(run.config, assignment, params),
        update=update,
        gathered=predict_gathered(units, owns),
    )


def predict_gathered(units: Sequence[Unit], owns: Callable[[Tensor], bool]) -> int:
    """Return the bytes of other owners' weights in no block and in two blocks in a row."""
    if not units:
        return 0
    *blocks, rest = [sum(p.nbytes for _, p in unit.params if not owns(p)) for unit in units]
    return rest + max(map(sum, zip([0, *blocks], [*blocks, 0], strict=True)))


def _passing(config: Config, assignment: LaneAssignment, params: Sequence[Tensor]) -> int:
    """Gradients on their way into the exchanged buffers, which are in memory of their own until then."""
    if len(assignment.units) == 1:
        return 0
    if config.same != "bits":
        return max(param.nbytes for param in params)
    owned = config.distributed.shard != "none"
    bucket = largest_bucket(params, bucket_bytes(params)) if owned else largest_bucket(params)
    if config.distributed.shard == "weights":
        return bucket  # of every lane
    # Of a rank's last lane there is never more than a bucket; of those before it, a whole set.
    *before, last = _sets_before(assignment.my_units)
    one_set = sum(param.nbytes for param in params)
    most = max([last * one_set + bucket, *((sets + 1) * one_set for sets in before)])
    return most - gradient_sets(config, assignment) * one_set


def _trained(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [param for group in groups for param in group["params"] if param.requires_grad]


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


def predict_activations(run: Run, task: Task, batch: LaneBatch) -> int | None:
    """Return what a lane's forward pass keeps for its backward pass, from those of parts of it.

    Returns:
        None if the batch cannot be cut, or is too small for it.
    """
    whole = len(batch)
    if whole < _FEWEST_SAMPLES:
        return None
    small, large = max(2, whole // 4), max(3, whole // 2)
    try:
        kept = [saved_bytes(run, task, cut_batch(batch, size)[0]) for size in (small, large)]
    except TaskError:
        return None
    return round(line_through((small, kept[0]), (large, kept[1]), whole))


def line_through(first: tuple[float, float], second: tuple[float, float], at: float) -> float:
    """Return where the line through two points is at another place."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return first[1] + slope * (at - first[0])


def saved_bytes(run: Run, task: Task, batch: LaneBatch) -> int:
    """Return what the forward pass of a batch keeps, besides the weights and the batch itself."""
    modules = run.state.modules
    known = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    before = {t.untyped_storage()._cdata for t in (*known, *tensors(batch.data))}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.device == run.device and storage._cdata not in before:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), run.setup.precision.forward():
        value = task.forward_pass(run.model, batch)
    del value  # with the graph, which keeps the addresses apart until here
    return sum(found.values())
