"""What every part of a run is built from, put together once and handed on."""

from __future__ import annotations

from dataclasses import dataclass

from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.lanes.assignment import LaneAssignment
from samestep.lanes.plan import BatchPlan, deal_lanes
from samestep.lanes.rng import RngStreams
from samestep.optim.kernels import choose_kernels
from samestep.optim.precision import Precision, choose_precision


@dataclass(frozen=True)
class RunSetup:
    """A run's decisions on this process: what it trains with, where, and in which pieces."""

    config: Config
    context: RunContext
    batch: BatchPlan
    assignment: LaneAssignment
    rng: RngStreams
    precision: Precision

    @classmethod
    def create(
        cls, config: Config, context: RunContext, batch: BatchPlan | None = None
    ) -> RunSetup:
        """Decide it all; also chooses torch's kernels, until the context is closed.

        Args:
            config: The run's config.
            context: This process's place in the run.
            batch: How a global batch is cut, if not as configured.
        """
        batch = config.batch_plan(context.world) if batch is None else batch
        by_rank = deal_lanes(batch.lane_count, context.world, config.distributed.lane_weights)
        precision = choose_precision(config.precision, context.device)
        deterministic = config.deterministic if config.same == "bits" else False
        context.on_close(choose_kernels(precision, deterministic))
        return cls(
            config=config,
            context=context,
            batch=batch,
            assignment=LaneAssignment(tuple(by_rank), context.rank, fused=config.same == "samples"),
            rng=RngStreams(config.seed, context.device),
            precision=precision,
        )
