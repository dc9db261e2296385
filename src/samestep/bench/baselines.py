"""The loops that are measured beside each other, all on one task: samestep's, and plain DDP."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from samestep.config import Config
from samestep.config.measuring_run import endless_run
from samestep.data.batch import LaneBatch
from samestep.data.device import DeviceCopies
from samestep.distributed.context import RunContext
from samestep.environment.hardware import Hardware
from samestep.optim.optimizers import build_optimizers
from samestep.optim.precision import choose_precision
from samestep.reduce.ddp import wrap
from samestep.run.run import Run
from samestep.step.compilation import compile_model
from samestep.step.loss_terms import LossValue
from samestep.train.loop import Training
from samestep.train.quiet_run import quiet_context
from samestep.train.task import Task

Advance = Callable[[int], None]
"""Runs this number of training steps."""


def in_turns(steps: Generator[Any, None, None], stack: ExitStack) -> Advance:
    """Advance a loop that is a generator, one step for each `next()`; the stack closes it."""
    stack.callback(steps.close)

    def advance(number: int) -> None:
        for _ in range(number):
            next(steps)

    return advance


class Unsupported(Exception):
    """Raised if a loop cannot be measured here; holds the reason."""


@dataclass(frozen=True)
class LoopContext:
    """The context in which every variant is opened."""

    task: Task
    config: Config
    """With the global batch and the lanes of this world."""
    context: RunContext
    """Context of the process, whose group all of them use."""
    hardware: Hardware
    folder: Path
    stack: ExitStack
    """Closes what they open."""


def mean_of(value: LossValue, config: Config) -> Tensor:
    """Return what a task's loss returned, as one mean."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, tuple):
        return value[0] / value[1]
    weights = config.loss_weights or {}
    found = [weights.get(name, 0.0) * (term[0] / term[1]) for name, term in value.items()]
    return torch.stack(found).sum()


def refuse_task(task: Task, config: Config) -> None:
    """Leave out loops without samestep for a task that they do not train."""
    if task.has_batch_loss:
        raise Unsupported("the task's loss is over the whole global batch")
    if task.extra_modules():
        raise Unsupported("the task has modules besides its model")
    data = task.train_data()
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise Unsupported("the task's data has no length")
    if config.precision == "fp16":
        raise Unsupported("fp16 needs a loss scale, which every library chooses by itself")


def open_samestep(loop: LoopContext) -> tuple[Advance, Run]:
    """samestep's loop, as `samestep train` runs it but for saves, evaluations and trackers."""
    config = endless_run(loop.config, str(loop.folder), drop_last=True)
    context, _ = loop.stack.enter_context(quiet_context(config, loop.hardware))
    run = loop.stack.enter_context(Run(config, context))
    return in_turns(Training(run, loop.task).steps(), loop.stack), run


def open_ddp(loop: LoopContext) -> Advance:
    """Return the loop that people write with DistributedDataParallel; on one rank without it."""
    refuse_task(loop.task, loop.config)
    device = loop.context.device
    model = loop.task.model().to(device)
    if loop.config.speed.compile == "blocks":
        compile_model(model, loop.config)
    section = loop.config.optimizer
    made = loop.task.optimizers(model) if section is None else build_optimizers(section, [model], device)
    optimizers = [made] if isinstance(made, Optimizer) else list(made)
    clip = clipper(loop.config, model)
    wrapped: nn.Module = model
    if loop.context.world > 1:
        wrapped = wrap(model, loop.config.distributed, device)
    if loop.config.speed.compile is True:
        wrapped.compile()
    return in_turns(_ddp_steps(loop, wrapped.train(), optimizers, clip), loop.stack)


def _ddp_steps(
    loop: LoopContext, model: nn.Module, optimizers: Sequence[Optimizer], clip: Callable[[], object]
) -> Generator[None, None, None]:
    config, context = loop.config, loop.context
    copies, precision = DeviceCopies(context.device), choose_precision(config.precision, context.device)
    losses = 0.0
    for step, data in enumerate(_endless(_loader(loop)), start=1):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        with precision.forward():
            loss = mean_of(loop.task.loss(model, LaneBatch(0, copies.to_device(data), ())), config)
        loss.backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()
        if step % config.log_every == 0:
            losses += loss.item()
        yield


def _loader(loop: LoopContext) -> DataLoader[Any]:
    """Return the training data as people read it without samestep."""
    data, section, world = loop.task.train_data(), loop.config.loader, loop.context.world
    return DataLoader(
        data,
        batch_size=loop.config.batch_plan(world).global_batch // world,
        sampler=DistributedSampler(data, world, loop.context.rank, drop_last=True),
        collate_fn=loop.task.collate,
        num_workers=section.workers,
        prefetch_factor=section.prefetch if section.workers else None,
        persistent_workers=section.workers > 0,
        pin_memory=loop.context.device.type == "cuda",
        drop_last=True,
    )


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    for epoch in count():
        assert isinstance(loader.sampler, DistributedSampler)
        loader.sampler.set_epoch(epoch)
        yield from loader


def clipper(config: Config, model: nn.Module) -> Callable[[], object]:
    """Return what clips gradients as the config has it, by torch's own functions."""
    section = config.clip
    if section is None or not section.is_on:
        return lambda: None
    params = list(model.parameters())
    if section.norm is not None and not section.per_group:
        return partial(nn.utils.clip_grad_norm_, params, section.norm)
    if section.value is not None:
        return partial(nn.utils.clip_grad_value_, params, section.value)
    raise Unsupported("torch has no function that clips as the config does")
