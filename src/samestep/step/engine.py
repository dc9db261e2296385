"""Puts together what all steps of a run share, as the config says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.state import Stateful
from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.distributed.context import RunContext
from samestep.errors import TaskError
from samestep.lanes.plan import BatchPlan
from samestep.lanes.rng import Streams
from samestep.optim.clipping import Clipping
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.precision import Precision
from samestep.optim.update import Update
from samestep.reduce.build import LaneReduction, build_reduction
from samestep.reduce.gradients import Scaling
from samestep.reduce.stats import RankFlags
from samestep.step.graphs import GraphedSteps, why_no_graph
from samestep.step.micro_batches import LaneSplit, checkpoint_activations
from samestep.step.step import StepEngine, run_at_once, trainable
from samestep.step.step_log import StepLog


@dataclass(frozen=True)
class Prepared:
    """What `Run.prepare` made of the run's objects."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRScheduler]
    reduction: LaneReduction
    guard: FiniteGuard
    clipping: Clipping
    check: CheckedScaling | None
    split: LaneSplit | None

    def states(self) -> dict[str, Stateful]:
        """By name, what else of this belongs into a checkpoint."""
        found: dict[str, Stateful] = {}
        if self.guard.skips:
            found["skipped steps"] = self.guard
        if isinstance(self.check, LossScale):
            found["loss scale"] = self.check
        if self.clipping.remembers:
            found["clipping"] = self.clipping
        if self.split is not None and self.split.was_searched:
            found["lane split"] = self.split
        return found


def prepare(
    config: Config,
    context: RunContext,
    precision: Precision,
    objects: Sequence[Any],
    units: Sequence[range],
    batch: BatchPlan,
    restore: Callable[[Sequence[nn.Module], Sequence[Optimizer], Sequence[LRScheduler]], None],
) -> Prepared:
    """Take modules, optimizers and schedules; `restore` puts a checkpoint's state into them."""
    modules, optimizers, schedules = _sorted_by_kind(objects)
    for module in modules:
        module.to(context.device)
    params, _ = trainable(optimizers, modules)
    if not params:
        raise TaskError("no parameter of the optimizers requires a gradient")
    if config.memory.checkpoint:
        checkpoint_activations(modules[0], config.memory.checkpoint)
    restore(modules, optimizers, schedules)
    if config.speed.compile:
        _compile(modules[0])
    reduction = build_reduction(config, context.collectives, context.device, modules, params, units)
    check = _check(config, context.device, precision, batch.global_batch)
    reduction.gradients.scaling = Scaling() if check is None else check
    groups = [group["params"] for opt in optimizers for group in opt.param_groups]
    trains = [[param for param in group if param.requires_grad] for group in groups]
    split = config.memory.lane_split
    return Prepared(
        modules,
        optimizers,
        schedules,
        reduction,
        FiniteGuard(
            context,
            modules,
            remembered=2 * config.log_every + 1,
            skips=check is not None,
            least_scale=config.loss_scale.min if isinstance(check, LossScale) else None,
        ),
        Clipping(config.clip, [group for group in trains if group], context.device),
        check,
        None
        if split == 1
        else LaneSplit(split, batch.lane_batch, context, modules, [param for _, param in params]),
    )


_COMPILED_SHAPES = 64


def _compile(model: nn.Module) -> None:
    """Compile each shape by itself: kernels follow from a lane's shape, not from what came before.

    Past the limit torch would go on eagerly, on ranks that have seen many shapes and not on others.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = _COMPILED_SHAPES, True
    forward = model.forward

    def compiled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # By a function of ours: torch passes over a forward of its own, such as nn.Sequential's.
    model.forward = torch.compile(compiled, dynamic=False)


def _check(
    config: Config, device: torch.device, precision: Precision, global_batch: int
) -> CheckedScaling | None:
    if precision.kind == "fp16":
        return LossScale(config.loss_scale, device, expected_count=global_batch)
    return CheckedScaling(device) if config.on_nonfinite == "skip" else None


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


def build_engine(
    config: Config,
    context: RunContext,
    precision: Precision,
    streams: Streams,
    step_log: StepLog,
    prepared: Prepared,
    followers: Sequence[Callable[[], None]],
    note: Callable[[], RankFlags],
    lanes: range,
    on_batch: Callable[[int, LaneBatch], None] | None,
) -> StepEngine:
    """The step engine of a run."""
    params, frozen = trainable(prepared.optimizers, prepared.modules)
    update = Update(
        prepared.optimizers,
        prepared.schedules,
        followers,
        prepared.clipping,
        prepared.check,
        prepared.guard,
        context.device,
    )
    engine = StepEngine(
        context=context,
        reduction=prepared.reduction,
        streams=streams,
        precision=precision,
        step_log=step_log,
        guard=prepared.guard,
        note=note,
        lanes=lanes,
        params=[param for _, param in params],
        frozen=frozen,
        update=update,
        copies=DeviceCopies(context.device),
        run_lane=run_at_once,
        on_batch=on_batch,
    )
    if prepared.split is not None:
        engine.needs_function = "memory.lane_split"
        engine.run_lane, engine.try_first = prepared.split.run_lane, prepared.split.before_lanes
    _use_graphs(config, engine, prepared)
    return engine


def _use_graphs(config: Config, engine: StepEngine, prepared: Prepared) -> None:
    asked = config.speed.graph
    if not asked:
        return
    why = why_no_graph(config, engine.context.device, prepared.optimizers)
    if why and asked != "auto":
        raise TaskError(f"speed.graph: true, but {why}. speed.graph: auto then goes on without")
    if why:
        engine.context.log.main(f"speed.graph: auto: no CUDA graphs, since {why}")
        return
    graphs = GraphedSteps(engine, prepared.modules, prepared.optimizers, strict=asked is True)
    engine.run_lane, engine.update.replay = graphs.run_lane, graphs.run_update
    if asked is True:
        engine.needs_function = "speed.graph: true"
