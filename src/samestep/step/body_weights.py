"""Weights that other ranks own (`distributed.shard: weights`), for the forward passes of a loop's body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from samestep.errors import StepError
from samestep.pytree import tensors
from samestep.reduce.owners import is_held
from samestep.reduce.sharded_weights import ShardedWeights
from samestep.step.lane_scope import Lanes
from samestep.step.lane_tensor import LaneTensor

_NO_NUMBERS = frozenset(
    (
        "__get__", "__hash__", "__len__", "size", "numel", "nelement", "dim", "ndimension", "stride", "element_size",
        "is_floating_point", "is_complex", "is_contiguous", "get_device", "data_ptr", "requires_grad_",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "detach", "storage_offset", "is_pinned",
        "is_shared", "untyped_storage", "is_inference", "is_same_size", "is_set_to", "result_type",
        "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
        "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
    )
)  # fmt: skip
"""Functions that neither read nor change a tensor's numbers; what they return is seen when it is used."""
_LIKE = frozenset(("to", "type_as"))
"""Functions that read only the type and device of their second tensor."""
_SETTERS: Any = [vars(torch._C.TensorBase)[name].__set__ for name in ("grad", "requires_grad")]


class BodyWeights:
    """Gathers weights for each lane of each call, together with the ranks that run one at the same time.

    A call runs all lanes of a rank, one after the other. A rank with fewer lanes than others follows them.
    """

    def __init__(self, weights: ShardedWeights, units: Sequence[range], samples: Sequence[int] | None) -> None:
        """Raises:
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
        self._busy = [[rank for rank, count in enumerate(counts) if count > at] for at in range(max(counts))]
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

    def refuse_absent(self, func: Any, name: str, data: Any) -> None:
        """Refuse a function that reads or changes a weight outside of a forward pass: another rank has it."""
        if name in _NO_NUMBERS or func in _SETTERS:
            return
        if name in _LIKE:
            data = data[0][:1]
        if not all(is_held(found) for found in tensors(data) if not isinstance(found, LaneTensor)):
            raise StepError(
                f"{name} of a weight in the loop's body with distributed.shard: weights, where a rank has its own only: "
                "read and change weights in a listener's after_update, or set shard: optimizer"
            )

    def refuse_lanes(self, found: Lanes, lanes: Lanes) -> None:
        """Refuse a call of a module with lanes of another step than the body's: ranks gather weights per lane."""
        if found != lanes:
            raise StepError(
                "a module was called with what the loader yielded in another step, with distributed.shard: weights: "
                "call it in that step, or set shard: optimizer"
            )

    def refuse_grad(self) -> None:
        """Refuse a backward pass that is not the run's."""
        raise StepError(
            "torch.autograd.grad with distributed.shard: weights, which gathers weights for loss.backward() only: "
            "set shard: optimizer"
        )

    @property
    def _kind(self) -> str:
        return f"call {self._calls}"
