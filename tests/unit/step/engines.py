"""Step engines in one process, for tests that run steps by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from samestep.config import load_config
from samestep.data import orders
from samestep.data.batch import LaneBatch, Position
from samestep.data.factory import open_source
from samestep.distributed.context import SingleProcessContext
from samestep.run_setup import RunSetup
from samestep.step.build_engine import Prepared, build_engine, prepare
from samestep.step.engine import LaneRunner
from samestep.step.lane_passes import LanePasses
from samestep.step.step import Step
from samestep.step.step_log import StepLog, StepRecord

LR = 0.5


def inputs(samples: int) -> Tensor:
    """Samples of two numbers each, no two the same."""
    return torch.arange(2 * samples, dtype=torch.float32).view(samples, 2) / 8


def linear() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    return model


def setup_of(**values: Any) -> RunSetup:
    config = load_config({"global_batch": 4, "lanes": 4, "epochs": 2, "log_every": 1, **values})
    return RunSetup.create(config, SingleProcessContext())


class Steps:
    """A model's steps over a dataset in its own order, run by hand."""

    def __init__(
        self,
        model: nn.Module | None = None,
        samples: int = 8,
        objects: Sequence[Any] | None = None,
        runner: LaneRunner | None = None,
        engine: dict[str, Any] | None = None,
        **values: Any,
    ) -> None:
        self.setup = setup_of(**values)
        self.model = linear() if model is None else model
        if objects is None:
            objects = [self.model, SGD(self.model.parameters(), lr=LR)]
        self.prepared: Prepared = prepare(self.setup, objects, lambda *kinds: None)
        if runner is not None:
            self.prepared = replace(self.prepared, runner=runner)
        self.records: list[StepRecord] = []
        log = StepLog(1, self.records.extend, self.setup.context.activity)
        self.engine = build_engine(self.setup, self.prepared, log, **(engine or {}))
        self.source = open_source(self.setup, TensorDataset(inputs(samples)), orders.sequential(samples))

    def passes(self, stop: int | None = None) -> Iterator[LanePasses]:
        for data in self.source.steps(Position(), stop):
            yield LanePasses(self.engine, data)

    def __iter__(self) -> Iterator[Step]:
        for passes in self.passes():
            yield Step(passes)

    def first(self) -> Step:
        return next(iter(self))

    def first_passes(self) -> LanePasses:
        return next(self.passes())


def output_sum(model: nn.Module) -> Callable[[LaneBatch], tuple[Tensor, int]]:
    """A loss whose gradient is the mean of the inputs."""
    return lambda batch: (model(batch.x).sum(), len(batch))
