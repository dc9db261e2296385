"""Builds what all steps of a run share, as configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.state import Stateful
from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.errors import TaskError
from samestep.optim.clipping import Clipping
from samestep.optim.device_lr import DeviceRates
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.reduce.build import LaneReduction, build_reduction
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import NO_FLAGS, RankFlags
from samestep.run_setup import RunSetup
from samestep.step.activation_checkpointing import checkpoint_activations
from samestep.step.captures import GraphParts
from samestep.step.graphs import GraphedLanes, why_no_graph
from samestep.step.lane_passes import LaneRunner, LaneWatch, StepEngine
from samestep.step.micro_batches import MicroBatches
from samestep.step.step_log import StepLog
from samestep.step.whole_lanes import WholeLanes

Restore = Callable[[Sequence[nn.Module], Sequence[Optimizer], Sequence[LRScheduler]], None]
"""Puts a checkpoint's state into a run's objects."""


@dataclass(frozen=True)
class Prepared:
    """What `Run.prepare` made of the run's objects."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRScheduler]
    params: Sequence[Parameter]
    frozen: Sequence[tuple[str, Parameter]]
    reduction: LaneReduction
    guard: FiniteGuard
    clipping: Clipping
    scaling: Scaling
    rates: DeviceRates
    runner: LaneRunner

    def states(self) -> dict[str, Stateful]:
        """By name, what else of this belongs into a checkpoint."""
        found: dict[str, Stateful] = {}
        if self.guard.skips:
            found["skipped steps"] = self.guard
        if self.scaling.state_dict():
            found["loss scale"] = self.scaling
        if self.clipping.remembers:
            found["clipping"] = self.clipping
        if isinstance(self.runner, MicroBatches) and self.runner.is_searched:
            found["lane split"] = self.runner
        return found


def prepare(setup: RunSetup, objects: Sequence[Any], restore: Restore) -> Prepared:
    """Take modules, optimizers and schedules into a run.

    Args:
        setup: The run's setup.
        objects: In any order; the first module is the model.
        restore: Puts a checkpoint's state into them, if there is one.
    """
    config, context = setup.config, setup.context
    modules, optimizers, schedules = _sorted_by_kind(objects)
    for module in modules:
        module.to(context.device)
    named, frozen = trainable(optimizers, modules)
    if not named:
        raise TaskError("no parameter of the optimizers requires a gradient")
    if config.memory.checkpoint:
        checkpoint_activations(modules[0], config.memory.checkpoint)
    restore(modules, optimizers, schedules)
    if config.speed.compile:
        _compile(modules[0])
    graphed = _uses_graphs(setup, optimizers)
    scaling = _scaling(setup)
    units = setup.assignment.units
    reduction = build_reduction(
        config, context.collectives, context.device, modules, named, units, scaling, graphed
    )
    rates = DeviceRates(optimizers, context.device)
    params = [param for _, param in named]
    runner: LaneRunner = WholeLanes(setup.precision)
    if graphed:
        parts = GraphParts(reduction.gradients, setup.precision, params, modules, optimizers, rates)
        runner = GraphedLanes(context, parts, strict=config.speed.graph is True)
    elif config.memory.lane_split != 1:
        runner = MicroBatches(setup, modules, params)
    return Prepared(
        modules=modules,
        optimizers=optimizers,
        schedules=schedules,
        params=params,
        frozen=frozen,
        reduction=reduction,
        guard=FiniteGuard(context, modules, 2 * config.log_every + 1, scaling),
        clipping=Clipping(config.clip, _groups(optimizers), context.device),
        scaling=scaling,
        rates=rates,
        runner=runner,
    )


def build_engine(
    setup: RunSetup,
    prepared: Prepared,
    step_log: StepLog,
    *,
    flags: Callable[[], RankFlags] = lambda: NO_FLAGS,
    on_batch: Callable[[int, LaneBatch], None] = lambda step, batch: None,
    after_update: Callable[[], None] = lambda: None,
    draws_between: bool = True,
    watch: LaneWatch | None = None,
) -> StepEngine:
    """The step engine of a run.

    Args:
        setup: The run's setup.
        prepared: The run's objects.
        step_log: Takes what every step measured.
        flags: What this rank sends to all others with every step.
        on_batch: Called with the step and every batch, when it is read.
        after_update: Called after every update that changed the weights.
        draws_between: Whether random numbers drawn between lanes and steps are the same on all
            ranks; a loop that draws none there saves two seedings a step.
        watch: Looks into the steps.
    """
    update = Update(
        prepared.optimizers,
        prepared.schedules,
        prepared.clipping,
        prepared.scaling,
        prepared.guard,
        prepared.rates,
        setup.context.device,
        prepared.runner.run_update,
        after_update,
    )
    return StepEngine(
        setup=setup,
        reduction=prepared.reduction,
        guard=prepared.guard,
        update=update,
        runner=prepared.runner,
        step_log=step_log,
        params=prepared.params,
        frozen=prepared.frozen,
        copies=DeviceCopies(setup.context.device),
        flags=flags,
        on_batch=on_batch,
        draws_between=draws_between,
        watch=watch,
    )


def _uses_graphs(setup: RunSetup, optimizers: Sequence[Optimizer]) -> bool:
    requested = setup.config.speed.graph
    if not requested:
        return False
    why = why_no_graph(setup.config, setup.context.device, optimizers)
    if why and requested != "auto":
        raise TaskError(f"speed.graph: true, but {why}. speed.graph: auto then trains without")
    if why:
        setup.context.log.main(f"speed.graph: auto: no CUDA graphs, since {why}")
    return not why


def _scaling(setup: RunSetup) -> Scaling:
    device = setup.context.device
    if setup.precision.kind == "fp16":
        return LossScale(setup.config.loss_scale, device, setup.batch.global_batch)
    return CheckedScaling(device) if setup.config.on_nonfinite == "skip" else Scaling()


def _groups(optimizers: Sequence[Optimizer]) -> list[list[Parameter]]:
    """The parameters of every group that train; no empty groups."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    trains = [[param for param in group if param.requires_grad] for group in groups]
    return [group for group in trains if group]


_COMPILED_SHAPES = 64


def _compile(model: nn.Module) -> None:
    """Compile each shape by itself: kernels follow from a lane's shape, not from earlier ones.

    Past the limit torch would fall back to eager, on ranks that have seen many shapes and not on
    others.
    """
    import torch._dynamo.config as dynamo

    # Names that torch 2.6 knows too; later versions have them as aliases.
    dynamo.cache_size_limit, dynamo.fail_on_cache_limit_hit = _COMPILED_SHAPES, True
    forward = model.forward

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # By a function of ours: torch skips its own classes' forward, such as nn.Sequential's.
    model.forward = torch.compile(compiled, dynamic=False)


def _sorted_by_kind(
    objects: Sequence[Any],
) -> tuple[list[nn.Module], list[Optimizer], list[LRScheduler]]:
    modules = [item for item in objects if isinstance(item, nn.Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    schedules = [item for item in objects if isinstance(item, LRScheduler)]
    if len(modules) + len(optimizers) + len(schedules) != len(objects):
        raise TaskError("run.prepare takes modules, optimizers and learning-rate schedulers")
    if not modules or not optimizers:
        raise TaskError("run.prepare needs a model and an optimizer")
    return modules, optimizers, schedules


def trainable(
    optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]
) -> tuple[list[tuple[str, Parameter]], list[tuple[str, Parameter]]]:
    """The optimizers' parameters by name: those that train, and those that are frozen."""
    names = {id(p): name for module in modules for name, p in module.named_parameters()}
    seen: dict[int, tuple[str, Parameter]] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                name = names.get(id(param), f"optimizer {number} parameter {index}")
                seen.setdefault(id(param), (name, param))
    every = list(seen.values())
    return [p for p in every if p[1].requires_grad], [p for p in every if not p[1].requires_grad]
