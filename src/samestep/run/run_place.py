"""The place of a run: its ranks, device, config and directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samestep.config import Config
from samestep.data.batch import Source
from samestep.distributed.context import RunContext
from samestep.lanes.plan import BatchPlan
from samestep.lanes.random_streams import INIT
from samestep.optim.schedules import describe_scaling, lr_factor
from samestep.run_setup import RunSetup


class RunPlace:
    """This process's place in a run."""

    setup: RunSetup

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.setup.config

    @property
    def context(self) -> RunContext:
        """This process's place in the run: its rank, its device, the other ranks."""
        return self.setup.context

    @property
    def batch(self) -> BatchPlan:
        """Return how a global batch is cut into lanes."""
        return self.setup.batch

    @property
    def device(self) -> torch.device:
        """Return where this rank computes."""
        return self.context.device

    @property
    def rank(self) -> int:
        """This process's number among the ranks, from 0."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Return how many ranks there are."""
        return self.context.world

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which writes files and talks to people."""
        return self.context.is_main

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """`print`, once for the run: on rank 0.

        Example:
            run.print(f"epoch {epoch}: loss {loss:.4f}")
        """
        if self.is_main:
            print(*values, sep=sep, end=end, flush=True)

    def once_per_node(self, prepare: Callable[[], None]) -> None:
        """Call a function on one rank of each node before the others continue.

        Args:
            prepare: Downloads or unpacks data, for example; what it draws at random changes nothing.

        Example:
            run.once_per_node(lambda: download("data/"))
        """
        with self.context.rank0_first() as first:
            if first:
                prepare()
        self.setup.rng.enter(INIT)

    def on_all_ranks(self, prepare: Callable[[RunContext], None]) -> None:
        """Call a function on every rank, which may use collectives; what it draws changes nothing.

        Args:
            prepare: Computes statistics of shares of the data, for example.

        Example:
            run.on_all_ranks(lambda context: tokenizer.fit(texts[context.rank :: context.world]))
        """
        prepare(self.context)
        self.setup.rng.enter(INIT)

    def scaled_lr(self, lr: float) -> float:
        """Return a learning rate for this run's global batch, by `lr_scaling` against `base_batch`.

        Example:
            optimizer = torch.optim.AdamW(model.parameters(), lr=run.scaled_lr(1e-3))
        """
        scaled = describe_scaling(self.config, self.batch.global_batch)
        if scaled is not None:
            self.context.log.main(scaled)
        return lr * lr_factor(self.config, self.batch.global_batch)

    def total_steps(self, source: Source) -> int | None:
        """Return how many steps the run has; None if it is known only at the data's end."""
        if self.config.steps is not None:
            return self.config.steps
        assert self.config.epochs is not None, "checked when the config was loaded"
        return source.steps_per_epoch and source.steps_per_epoch * self.config.epochs
