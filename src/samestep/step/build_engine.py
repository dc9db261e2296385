"""Builds what all steps of a run share, as configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from samestep.checkpoint.state import Stateful
from samestep.config.optim import ClipConfig
from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.errors import TaskError
from samestep.lanes.random_streams import UPDATE
from samestep.optim.clipping import Clipping
from samestep.optim.joint_updates import refuse_joint_updates
from samestep.optim.loop_calls import StepGuard
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.optim.wrapped_optimizers import wrapped_optimizers
from samestep.reduce.build import LaneReduction, build_reduction
from samestep.reduce.owned_states import OwnedStates
from samestep.reduce.owned_update import OwnedUpdate
from samestep.reduce.owners import Owners, is_held
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import NO_FLAGS, RankFlags
from samestep.run_setup import RunSetup
from samestep.step.activation_checkpointing import checkpoint_activations
from samestep.step.compilation import compile_model
from samestep.step.engine import LaneRunner, LaneWatch, StepEngine
from samestep.step.forward_check import ForwardCheck
from samestep.step.global_batchnorm import GlobalBatchNorm
from samestep.step.global_loss import GlobalSteps
from samestep.step.graphs import GraphedSteps, why_no_graph
from samestep.step.lane_passes import WholeLanes
from samestep.step.lanes_together import LanesTogether
from samestep.step.loss_terms import LossTerms, NamedLosses, OneLoss, ReductionCheckedTerms
from samestep.step.micro_batches import MicroBatches
from samestep.step.run_objects import give_memory, refuse_unsupported, sorted_by_kind, trainable
from samestep.step.step_log import StepLog

Owns = Callable[[Tensor], bool]
Restore = Callable[[Sequence[nn.Module], Sequence[Optimizer], Sequence[LRScheduler], Owns], None]
"""Puts a checkpoint's state into a run's objects; of optimizers, that of parameters which this rank owns."""


@dataclass(frozen=True)
class Prepared:
    """The objects that `Run.prepare` returned."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    schedules: Sequence[LRScheduler]
    params: Sequence[Parameter]
    frozen: Sequence[tuple[str, Parameter]]
    reduction: LaneReduction
    guard: FiniteGuard
    clipping: Clipping
    scaling: Scaling
    step_guard: StepGuard
    runner: LaneRunner
    terms: LossTerms
    batchnorm: GlobalBatchNorm | None = None
    owned_states: OwnedStates | None = None
    """The optimizers' states, where each rank holds some of them."""

    def states(self) -> dict[str, Stateful]:
        """Return, by name, what else belongs into a checkpoint."""
        found: dict[str, Stateful] = {}
        if self.guard.skips:
            found["skipped steps"] = self.guard
        if self.scaling.state_dict():
            found["loss scale"] = self.scaling
        if self.clipping.remembers:
            found["clipping"] = self.clipping
        if isinstance(self.runner, MicroBatches) and self.runner.is_searched:
            found["lane split"] = self.runner
        return found | wrapped_optimizers(self.optimizers)


def prepare(setup: RunSetup, objects: Sequence[Any], restore: Restore, is_resumed: bool = False) -> Prepared:
    """Take modules, optimizers and schedules into a run."""
    config, context = setup.config, setup.context
    modules, optimizers, schedules = sorted_by_kind(objects)
    named, frozen = trainable(optimizers, modules)
    params = [param for _, param in named]
    refuse_unsupported(modules, optimizers, config.same, context.device)
    owns = _owns(setup, params)
    was_on_meta = _give_memory(setup, modules, owns, is_resumed)
    if not named:
        raise TaskError("no parameter of the optimizers requires a gradient")
    # Before what wraps forward passes: their second ones are meetings, too.
    batchnorm = _global_batchnorm(setup, modules)
    if config.speed.compile:  # first: what runs again in the backward pass is a compiled block
        compile_model(modules[0], config)
    if config.memory.checkpoint:
        checkpoint_activations(modules[0], config.memory.checkpoint)
    restore(modules, optimizers, schedules, owns)
    scaling, terms = _scaling(setup), _loss_terms(setup)
    parts_of_run = [*modules, terms] if isinstance(terms, NamedLosses) else modules
    if not was_on_meta:  # else every rank has read them, those that it holds
        _take_from_rank_0(setup, parts_of_run)
    reduction = build_reduction(
        config,
        context.collectives,
        context.device,
        parts_of_run,
        named,
        setup.assignment.units,
        scaling,
        context.log.main,
        [] if batchnorm is None else batchnorm.buffers,
    )
    setup.gathered.weights = reduction.owned_update.weights if reduction.owned_update else None
    return Prepared(
        modules=modules,
        optimizers=optimizers,
        schedules=schedules,
        params=params,
        frozen=frozen,
        reduction=reduction,
        guard=FiniteGuard(context, modules, 2 * config.log_every + 1, scaling),
        clipping=_clipping(config.clip, optimizers, context.device, reduction.owned_update),
        scaling=scaling,
        step_guard=StepGuard(optimizers),
        runner=_runner(setup, parts_of_run, params, optimizers, batchnorm),
        terms=terms,
        batchnorm=batchnorm,
        owned_states=_owned_states(setup, reduction.owned_update, optimizers),
    )


def _give_memory(setup: RunSetup, modules: Sequence[nn.Module], owns: Owns, is_resumed: bool) -> bool:
    """Move modules to the rank's device; return whether the model was on the meta device."""
    context = setup.context
    is_spread = setup.config.distributed.shard == "weights" and context.world > 1
    for module in modules[1:]:
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            kind = type(module).__name__
            raise TaskError(f"{kind} is on the meta device, where only the model may be: build it on the CPU")
    was_on_meta = give_memory(modules[0], owns if is_spread else lambda param: True, is_resumed)
    if not is_spread:
        for module in modules:
            module.to(context.device)  # else block by block, when it is known who owns what
    return was_on_meta


def _take_from_rank_0(setup: RunSetup, modules: Sequence[nn.Module]) -> None:
    """Let weights and buffers be those of rank 0."""
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    setup.context.collectives.broadcast_tensors(found)


def _loss_terms(setup: RunSetup) -> LossTerms:
    weights, context = setup.config.loss_weights, setup.context
    return NamedLosses(weights, context.device, context.collectives) if weights else OneLoss()


def _owns(setup: RunSetup, params: Sequence[Parameter]) -> Owns:
    """Return what tells whether this rank holds the optimizer state of a parameter."""
    context, is_sharded = setup.context, setup.config.distributed.shard != "none"
    return Owners(params, context.rank, context.world).is_mine if is_sharded else lambda param: True


def _owned_states(setup: RunSetup, sharding: OwnedUpdate | None, optimizers: Sequence[Optimizer]) -> OwnedStates | None:
    if sharding is None:
        return None
    refuse_joint_updates(optimizers)
    collectives = setup.context.collectives
    return OwnedStates(sharding.owners, optimizers, collectives, sharding.weights)


def _global_batchnorm(setup: RunSetup, modules: Sequence[nn.Module]) -> GlobalBatchNorm | None:
    """Return where BatchNorm layers meet; None where they normalise each lane, or where there is one lane."""
    units = setup.assignment.units
    if setup.config.batchnorm == "lane" or sum(map(len, units)) == 1:
        return None
    found = GlobalBatchNorm(modules, units, setup.context.collectives)
    if found.layers:
        return found
    setup.context.log.main("batchnorm: global has no effect: no module of the run has a BatchNorm")
    return None


def _runner(
    setup: RunSetup,
    modules: Sequence[nn.Module],
    params: Sequence[Parameter],
    optimizers: Sequence[Optimizer],
    batchnorm: GlobalBatchNorm | None,
) -> LaneRunner:
    """Return how lanes run, as configured."""
    if _uses_graphs(setup, optimizers, batchnorm):
        return GraphedSteps(setup.context, modules, setup.config)
    if batchnorm is not None:
        return LanesTogether()
    if setup.config.memory.lane_split != 1:
        return MicroBatches(setup, modules, params)
    return WholeLanes()


def build_engine(
    setup: RunSetup,
    prepared: Prepared,
    step_log: StepLog,
    *,
    flags: Callable[[], RankFlags] = lambda: NO_FLAGS,
    on_batch: Callable[[int, LaneBatch], None] = lambda step, batch: None,
    after_update: Callable[[int], None] = lambda step: None,
    draws_between: bool = True,
    reads_gradients: bool = False,
    reads_weights: bool = False,
    watch: LaneWatch | None = None,
) -> StepEngine:
    """Return the step engine of a run.

    Args:
        setup: The run's setup.
        prepared: The run's objects.
        step_log: Takes what every step measured.
        flags: What this rank sends to all others with every step.
        on_batch: Called with the step and every batch, when it is read.
        after_update: Called with the step after every update that changed the weights.
        draws_between: Whether random numbers drawn between lanes and steps are the same on all
            ranks; a loop that draws none there saves two seedings a step.
        reads_gradients: Whether a listener reads `.grad`.
        reads_weights: Whether `after_update` reads weights.
        watch: Looks into the steps.
    """
    draws = draws_between or _may_draw(prepared)
    sharding = prepared.reduction.owned_update
    if sharding is not None and (reads_gradients or (watch and watch.reads_gradients)):
        sharding.share_gradients(is_trace=bool(watch and watch.reads_gradients))
    if sharding is not None and reads_weights:
        after_update = sharding.with_all_weights(after_update)
    update = _update(setup, prepared, draws, after_update)
    return StepEngine(
        setup=setup,
        reduction=prepared.reduction,
        guard=prepared.guard,
        update=update,
        runner=prepared.runner,
        terms=_checked(prepared.terms, setup),
        forward_check=ForwardCheck(prepared.modules, setup.config.check_ranks_every, setup.context.log.main),
        step_log=step_log,
        optimizers=prepared.optimizers,
        params=[param for param in prepared.params if is_held(param)],
        all_params=prepared.params,
        frozen=prepared.frozen,
        copies=DeviceCopies(setup.context.device),
        flags=flags,
        on_batch=on_batch,
        draws_between=draws_between,
        global_steps=GlobalSteps(setup, prepared.modules, prepared.params, prepared.runner),
        watch=watch,
        batchnorm=prepared.batchnorm,
    )


def _update(setup: RunSetup, prepared: Prepared, draws: bool, after_update: Callable[[int], None]) -> Update:
    sharding, ours = prepared.reduction.owned_update, prepared.step_guard.ours
    return Update(
        prepared.optimizers,
        prepared.schedules,
        prepared.clipping,
        prepared.scaling,
        prepared.guard,
        setup.context.device,
        (lambda stepped: ours()) if sharding is None else partial(sharding.stepping, ours),
        # Else what is drawn there would depend on which lane was this rank's last.
        (lambda step: setup.rng.enter(UPDATE, at=(step,))) if draws else lambda step: None,
        after_update,
    )


def _checked(terms: LossTerms, setup: RunSetup) -> LossTerms:
    """Check on one rank: all of them run the same code."""
    return ReductionCheckedTerms(terms, setup.context.log.warn) if setup.context.is_main else terms


def _may_draw(prepared: Prepared) -> bool:
    """Return whether optimizers' and schedulers' steps may draw random numbers: torch's own and ours do not."""
    every: list[Any] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    for item in (*prepared.optimizers, *prepared.schedules):
        if isinstance(item, Optimizer):
            every += [item._optimizer_step_pre_hooks, item._optimizer_step_post_hooks]
        elif isinstance(item, (LambdaLR, MultiplicativeLR)):
            return True  # it calls a function of the user's
        if not type(item).__module__.startswith(("torch.optim.", "samestep.")):
            return True
    return any(not prepared.step_guard.is_own(hook) for hooks in every for hook in hooks.values())


def _uses_graphs(setup: RunSetup, optimizers: Sequence[Optimizer], batchnorm: GlobalBatchNorm | None) -> bool:
    requested = setup.config.speed.graph
    if not requested:
        return False
    why = why_no_graph(setup.config, setup.context.device, optimizers)
    if batchnorm is not None:
        why = "batchnorm: global lets lanes meet inside of their passes, which is not captured"
    if why and requested != "auto":
        raise TaskError(f"speed.graph: true, but {why}. speed.graph: auto then trains without")
    if why and setup.context.device.type == "cuda":
        setup.context.log.main(f"speed.graph: auto: no CUDA graphs, since {why}")
    return not why


def _scaling(setup: RunSetup) -> Scaling:
    device = setup.context.device
    if setup.precision.kind == "fp16":
        return LossScale(setup.config.loss_scale, device, setup.batch.global_batch)
    return CheckedScaling(device) if setup.config.on_nonfinite == "skip" else Scaling()


def _clipping(
    rules: ClipConfig, optimizers: Sequence[Optimizer], device: torch.device, sharding: OwnedUpdate | None
) -> Clipping:
    """Return the config's clipping, and the `clip_norm` of groups that have one of their own."""
    common: list[list[Parameter]] = []
    own: list[tuple[list[Parameter], float | None]] = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        params = [param for param in group["params"] if param.requires_grad]
        limit = group.get(_CLIP_NORM, _AS_CONFIGURED)
        if limit is not None and limit is not _AS_CONFIGURED and not limit > 0:
            raise TaskError(f"a parameter group has clip_norm {limit}: give a number above 0, or None")
        if params and limit is _AS_CONFIGURED:
            common.append(params)
        elif params:
            own.append((params, limit))
    return Clipping(rules, common, device, own, None if sharding is None else sharding.norm)


_CLIP_NORM, _AS_CONFIGURED = "clip_norm", object()
