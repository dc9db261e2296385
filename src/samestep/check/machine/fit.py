"""Check from shapes alone that a model's training fits into a rank's memory, or which `distributed.shard` would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from samestep.bench.memory_meter import bytes_of
from samestep.check.machine.facts import Load, Machine
from samestep.check.machine.findings import Finding, failure, note, ok
from samestep.check.machine.memory_model import gradient_sets, predict_exchange, predict_gathered, predict_optimizers
from samestep.config import Config
from samestep.errors import PlanError
from samestep.lanes.plan import LaneAssignment, deal_lanes, deal_rounds
from samestep.optim.optimizers import build_optimizers
from samestep.reduce.owners import Owners
from samestep.reduce.weight_units import cut_units
from samestep.report.format import format_bytes
from samestep.train.task import load_task

Shard = Literal["none", "optimizer", "weights"]
_CHECK = "model memory"
_MORE_RANKS = (2, 4, 8, 16, 32, 64, 128, 256)
_META = torch.device("meta")


@dataclass(frozen=True)
class _Model:
    """A task's modules and optimizers, as shapes."""

    modules: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    device: torch.device

    def least(self, world: int, shard: Shard) -> float:
        """Return bytes of which a rank holds more: weights, and its part of the optimizer states."""
        weights = sum(p.nbytes for module in self.modules for p in module.parameters())
        states = self.states // (1 if shard == "none" else world)
        return states + (weights / world if shard == "weights" else weights)

    @cached_property
    def states(self) -> int:
        """Bytes of all optimizer states; 0 if they are not known."""
        return predict_optimizers(self.optimizers, self.device)[0] or 0

    def held(self, config: Config, world: int, shard: Shard) -> int | None:
        """Return the bytes that the rank with most holds besides activations; None if they are not known."""
        section = config.distributed.model_copy(update={"shard": shard})
        config = config.model_copy(update={"distributed": section})
        lanes = config.lane_count(world)
        by_rank = deal_rounds(lanes, world) if shard == "weights" else deal_lanes(lanes, world)
        named = [
            (f"{number}.{name}", param)
            for number, module in enumerate(self.modules)
            for name, param in module.named_parameters()
            if param.requires_grad
        ]
        params = [param for _, param in named]
        owners = Owners(params, 0, world)
        largest = max(range(world), key=owners.load.__getitem__)
        owners = Owners(params, largest, world)
        sharded = shard != "none" and world > 1
        owns = owners.is_mine if sharded else (lambda param: True)
        assignment = LaneAssignment(tuple(by_rank), largest, fused=config.same == "samples")
        units = cut_units(self.modules[0], named, section.shard_blocks) if sharded and shard == "weights" else ()
        states, update = predict_optimizers(self.optimizers, self.device, owns)
        if states is None:
            return None
        weights = [param for module in self.modules for param in module.parameters()]
        held = [param for param in weights if shard != "weights" or owns(param)]
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        gradients = gradient_sets(config, assignment) * sum(param.nbytes for param in params)
        exchange = predict_exchange(config, assignment, params, units)
        passing = max(gradients + predict_gathered(units, owns), update)
        return bytes_of(held) + bytes_of(buffers) + states + exchange + passing


def check_fit(config: Config, load: Load, machine: Machine) -> list[Finding]:
    """Check what a task's model, its gradients and optimizer states take, against the memory of a rank."""
    available, where = _available(load, machine)
    if config.task is None:
        return []
    advice = ""
    try:
        model = _built(config, torch.device(load.device))
        needed = model.held(config, load.world, config.distributed.shard)
        if needed is not None and needed > available:
            advice = _advice(model, config, load.world, available)
    except PlanError:
        return []  # which is a finding of its own
    except Exception as error:  # of the task's code, which may need numbers
        return [_not_known(f"{type(error).__name__}: {error}".splitlines()[0])]
    if needed is None:
        return [_not_known("its optimizer reads numbers, or calls a closure")]
    found = (
        f"weights, gradients and optimizer states take {format_bytes(needed)} per rank, of {format_bytes(available)} "
        f"{where} (distributed.shard: {config.distributed.shard}; activations come on top)"
    )
    if not advice:
        return [ok(_CHECK, found)]
    why = "training ends with an error for want of memory"
    return [failure(_CHECK, found, why, advice)]


def _advice(model: _Model, config: Config, world: int, available: int) -> str:
    """Return the first mode that fits, at this world size or at a larger one."""
    worlds = [world, *(more for more in _MORE_RANKS if more > world)]
    for ranks in worlds:
        if config.lane_count(ranks) < ranks:
            break
        for shard in get_args(Shard) if ranks > 1 and config.same == "bits" else ():
            if model.least(ranks, shard) > available:
                continue  # laying it all out takes seconds for each of many ranks
            held = model.held(config, ranks, shard)
            if held is not None and held <= available:
                on = "" if ranks == world else f" on {ranks} ranks"
                return f"set distributed.shard: {shard}{on}, which takes {format_bytes(held)} per rank"
    return "no distributed.shard makes it fit: use a smaller model, more lanes and ranks, or GPUs with more memory"


def _not_known(why: str) -> Finding:
    return note(
        _CHECK,
        f"not known from shapes alone: {why}",
        "whether the model fits is found when it trains",
        "samestep tune all CONFIG measures it",
    )


def _built(config: Config, device: torch.device) -> _Model:
    """Return what the task makes, in no memory."""
    with _META:
        task = load_task(config)
        modules = [task.model(), *task.extra_modules()]
        if config.optimizer is not None:
            return _Model(modules, build_optimizers(config.optimizer, modules, _META), device)
        made = task.optimizers(modules[0])
    return _Model(modules, [made] if isinstance(made, Optimizer) else list(made), device)


def _available(load: Load, machine: Machine) -> tuple[int, str]:
    """Return the bytes that a rank has, and where."""
    device = torch.device(load.device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, f"of {load.device}"
    shared = "" if load.ranks_here == 1 else f" that {load.ranks_here} ranks share"
    return machine.memory.total // load.ranks_here, f"of this machine's memory{shared}"
