"""The trainings of each rank of the demo: the starter project by samestep, and the same one by plain DDP."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from samestep.config import Config, load_config
from samestep.data.batch import LaneBatch
from samestep.distributed.context import RunContext, create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.distributed.logging import LOGGER
from samestep.reduce.ddp import wrap_plain
from samestep.run.run import Run
from samestep.step.step import Step
from samestep.tracking.listeners import RunListener
from samestep.train.loop import Training
from samestep.train.record import Recorder, hash_state
from samestep.train.task import Task, load_task


class _Follower(RunListener):
    """Prints each step's loss for the process that shows the demo, and may end its rank in the middle."""

    draws = False

    def __init__(self, run: Run, killed_at: int | None) -> None:
        self._is_main = run.context.is_main
        self._killed_at = killed_at if run.context.rank == run.context.world - 1 else None

    def on_step(self, step: Step) -> None:
        if step.index == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_record(self, record: Any) -> None:
        if self._is_main:
            _print_step(record.step, record.loss)


def train_with_samestep(config: Path, overrides: Sequence[str], record: Path, killed_at: int | None) -> None:
    """Train as `samestep launch` does."""
    LOGGER.setLevel(logging.ERROR)
    loaded = load_config(config, overrides)
    with create_run_context(loaded, detect_hardware()) as context, Run(loaded, context) as run:
        Recorder(run, record)
        run.add_listener(_Follower(run, killed_at))
        Training(run, load_task(loaded)).train()


def train_with_ddp(config: Path, overrides: Sequence[str]) -> tuple[list[float], str]:
    """Train as people write it with DistributedDataParallel; returns the losses and the hash of the weights."""
    LOGGER.setLevel(logging.ERROR)
    loaded = load_config(config, overrides)
    with create_run_context(loaded, detect_hardware()) as context:
        losses, state = _ddp_loop(load_task(loaded), loaded, context)
        by_rank = context.gather(losses)
    return [fmean(of_step) for of_step in zip(*by_rank, strict=True)], state


def _ddp_loop(task: Task, config: Config, context: RunContext) -> tuple[list[float], str]:
    assert config.global_batch is not None
    assert config.clip is not None
    torch.manual_seed(config.seed)
    model = task.model()
    parallel = wrap_plain(model) if context.world > 1 else model
    optimizer = cast(torch.optim.Optimizer, task.optimizers(model))
    data: Any = task.train_data()
    sampler: DistributedSampler[Any] = DistributedSampler(data, context.world, context.rank, seed=config.seed)
    loader = DataLoader(data, batch_size=config.global_batch // context.world, sampler=sampler)
    losses: list[float] = []
    for epoch in range(config.epochs or 1):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            batch = LaneBatch(0, (inputs, targets), tuple(range(len(targets))))
            total, count = cast(tuple[Tensor, int], task.loss(parallel, batch))
            loss = total / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(config.clip.norm or math.inf))
            optimizer.step()
            losses.append(loss.item())
            if context.is_main:
                _print_step(len(losses) - 1, losses[-1])
    return losses, hash_state(model.state_dict())


def _print_step(step: int, loss: float) -> None:
    print(json.dumps({"step": step, "loss": loss}), flush=True)
