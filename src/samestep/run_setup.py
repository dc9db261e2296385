"""The setup that every part of a run is built from, put together once and handed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from samestep.config import Config
from samestep.distributed.context import RunContext
from samestep.errors import StepError
from samestep.lanes.plan import BatchPlan, LaneAssignment, deal_lanes, deal_rounds
from samestep.lanes.random_streams import RngStreams
from samestep.optim.kernels import choose_kernels
from samestep.optim.precision import Precision, choose_precision
from samestep.reduce.sharded_weights import EVALUATION, ShardedWeights


@dataclass
class GatheredModel:
    """The weights that ranks gather for a model's passes, once the run is prepared."""

    weights: ShardedWeights | None = None
    """None unless `distributed.shard` is weights."""


@dataclass(frozen=True)
class RunSetup:
    """A run's decisions on this process: what it trains with, where, and in which pieces."""

    config: Config
    context: RunContext
    planned: BatchPlan | None
    """How a global batch is cut; None until a custom loop's DataLoader says how large it is."""
    assignment: LaneAssignment
    rng: RngStreams
    precision: Precision
    gathered: GatheredModel = field(default_factory=GatheredModel)

    @classmethod
    def create(cls, config: Config, context: RunContext, batch: BatchPlan | None = None) -> RunSetup:
        """Decide it all; also chooses torch's kernels, until the context is closed.

        Args:
            batch: How a global batch is cut, if not as configured.
        """
        if batch is None and not config.leaves_batch_open:
            batch = config.batch_plan(context.world)
        lane_count = config.lane_count(context.world) if batch is None else batch.lane_count
        if config.distributed.shard == "weights":
            by_rank = deal_rounds(lane_count, context.world)
        else:
            by_rank = deal_lanes(lane_count, context.world, config.distributed.lane_weights)
        precision = choose_precision(config.precision, context.device)
        deterministic = config.deterministic if config.same == "bits" else False
        context.on_close(choose_kernels(precision, deterministic))
        return cls(
            config=config,
            context=context,
            planned=batch,
            assignment=LaneAssignment(tuple(by_rank), context.rank, fused=config.same == "samples"),
            rng=RngStreams(config.seed, context.device),
            precision=precision,
        )

    @property
    def batch(self) -> BatchPlan:
        """Return how a global batch is cut into lanes.

        Raises:
            StepError: It is left to a DataLoader that the run has not seen yet.
        """
        if self.planned is None:
            raise StepError(
                "the global batch is not known yet: it is the batch_size of the first DataLoader that "
                "run.prepare gets. Call run.prepare first, or set global_batch"
            )
        return self.planned

    def passes(self, mine: Sequence[int], samples: Sequence[int] | None) -> Iterator[int]:
        """Return this rank's units one after the other, for a forward pass of each outside of training steps.

        Where weights are sharded, a rank with fewer units than others sends them its weights meanwhile.
        """
        weights = self.gathered.weights
        if weights is None or samples is None:
            yield from mine
            return
        counts = [sum(samples[unit] > 0 for unit in units) for units in self.assignment.units]
        for at in range(max(counts)):
            busy = [rank for rank, count in enumerate(counts) if count > at]
            if at >= len(mine):
                weights.follow(EVALUATION, busy)
                continue
            weights.begin_pass(EVALUATION, busy)
            try:
                yield mine[at]
            except GeneratorExit:
                weights.abandon_pass()
                raise
            weights.end_pass()

    def with_batch(self, global_batch: int) -> RunSetup:
        """This setup, its config completed by the global batch.

        Raises:
            PlanError: The batch cannot be cut into the run's lanes.
        """
        config = self.config.model_copy(update={"global_batch": global_batch})
        return replace(self, config=config, planned=config.batch_plan(self.context.world))
