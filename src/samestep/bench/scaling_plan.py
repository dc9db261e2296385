"""Workloads and sizes of `samestep bench scaling`, and how a batch grows with the ranks. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.config import Config
from samestep.errors import PlanError
from samestep.lanes.plan import BatchPlan

KIND = "scaling"
WORKLOADS = ("mlp", "conv", "transformer")
SIZES = ("small", "medium", "large")
WEAK, STRONG = "weak", "strong"
MODES = {WEAK: (WEAK,), STRONG: (STRONG,), "both": (WEAK, STRONG)}
SAMESTEP, DDP, ACCELERATE, LIGHTNING = "samestep", "ddp", "accelerate", "lightning"
VARIANTS = (SAMESTEP, DDP, ACCELERATE, LIGHTNING)
_STRONG_LANES = 8
"""Of a built-in workload, unless there are more ranks."""


@dataclass(frozen=True)
class Part:
    """A global batch, and the lanes that it is cut into."""

    mode: str
    world: int
    global_batch: int
    lanes: int


@dataclass(frozen=True)
class Batches:
    """The batch of one rank in weak scaling, and of all ranks in strong scaling."""

    weak: BatchPlan
    strong: BatchPlan

    def part(self, mode: str, world: int) -> Part:
        """Return what a number of ranks trains on.

        Raises:
            PlanError: if there are fewer lanes than ranks.
        """
        if mode == WEAK:
            return Part(mode, world, world * self.weak.global_batch, world * self.weak.lane_count)
        if self.strong.lane_count < world:
            raise PlanError(
                f"{world} ranks need {world} lanes or more, and in strong scaling there are "
                f"{self.strong.lane_count} for all ranks: give --lanes {world}, or --mode weak"
            )
        return Part(mode, world, self.strong.global_batch, self.strong.lane_count)


def batches_of_workload(lane_batch: int, lanes: int | None, most_ranks: int) -> Batches:
    """Return the batches of a built-in workload, whose lanes always have the same samples.

    Args:
        lanes: Of a rank in weak and of all ranks in strong scaling; None to choose.
    """
    each, together = lanes or 1, lanes or max(_STRONG_LANES, most_ranks)
    return Batches(BatchPlan(lane_batch * each, each), BatchPlan(lane_batch * together, together))


def batches_of_config(config: Config, lanes: int | None) -> Batches:
    """Return the batches of a config: its global batch is that of one rank in weak scaling, of all in strong."""
    own = config.batch_plan(1)
    plan = own if lanes is None else BatchPlan(own.global_batch, lanes)
    return Batches(plan, plan)
