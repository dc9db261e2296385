"""Weights that other ranks own (`distributed.shard: weights`), for the forward passes of a loop's body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from samestep.errors import StepError
from samestep.reduce.sharded_weights import ShardedWeights


class BodyWeights:
    """Gathers weights for each lane of each call, together with the ranks that run one at the same time.

    A call runs all lanes of a rank, one after the other. A rank with fewer lanes than others follows them.
    """

    def __init__(
        self, weights: ShardedWeights, units: Sequence[range], samples: Sequence[int] | None
    ) -> None:
        """Args:
        weights: The run's.
        units: The lanes of each rank.
        samples: Those of each lane of all ranks in this step.

        Raises:
            StepError: They are not known.
        """
        if samples is None:
            raise StepError(
                "distributed.shard: weights needs to know which lanes have samples before they are read, which "
                "iterable data does not tell: take a map-style dataset, or set shard: optimizer"
            )
        self._weights = weights
        # A rank without samples runs the body, too, for nothing.
        counts = [max(1, sum(samples[lane] > 0 for lane in lanes)) for lanes in units]
        self._busy = [
            [rank for rank, count in enumerate(counts) if count > at] for at in range(max(counts))
        ]
        self._calls = self._lanes = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that runs all lanes of this rank."""
        self._calls += 1
        self._lanes = 0
        yield
        for busy in self._busy[self._lanes :]:
            self._weights.follow(self._kind, busy)

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Around one of its lanes."""
        self._weights.begin_pass(self._kind, self._busy[self._lanes])
        self._lanes += 1
        yield
        self._weights.end_pass()

    def refuse_grad(self) -> None:
        """Refuse a backward pass that is not the run's."""
        raise StepError(
            "torch.autograd.grad with distributed.shard: weights, which gathers weights for loss.backward() only: "
            "set shard: optimizer"
        )

    @property
    def _kind(self) -> str:
        return f"call {self._calls}"
