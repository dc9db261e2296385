"""Measures once in a loop what lanes cost a model: a message where fewer would be faster."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.distributed.timed_calls import synchronize
from samestep.pytree import leaves, map_leaves
from samestep.run_setup import RunSetup
from samestep.step.lane_tensor import LaneTensor, lanes_of, pick

_AT_STEP = 3
"""The step of this process in which it is measured: libraries set themselves up in the first ones."""
_REPEATS = 3
_BUDGET = 2.0
"""Seconds after which no further pass is timed: a slow model is not held up for a message."""
_LARGE = 50_000_000
"""Parameters above which a copy is not worth it."""
_HIGH = 1.1
"""What lanes may cost, as a ratio, before something is said."""


class LaneCost:
    """Times a model's passes on the batches of one step, as they are and with lanes put together."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        context = setup.context
        # With other ranks, a module that talks to them would wait for them here.
        alone = context.world == 1
        self._waits = 0 if alone and len(setup.assignment.my_units) > 1 else -1

    def begin_step(self) -> None:
        """A new step."""
        if self._waits >= 0:
            self._waits += 1

    def measure(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Measure a call of a module, if it is time for that, on a copy of it without hooks."""
        lanes = len(self._setup.assignment.my_units)
        if self._waits < _AT_STEP or len(lanes_of((args, kwargs))[0].lanes) < lanes:
            return
        self._waits = -1
        setup, name = self._setup, type(module).__name__
        if sum(param.numel() for param in module.parameters()) > _LARGE:
            return
        groups = [count for count in (1, 2, 4, 8, 16, 32) if lanes % count == 0 and count < lanes]
        try:
            with setup.rng.kept():
                took = self._times(_alone(module), (args, kwargs), lanes, (1, lanes, *groups[1:]))
        except Exception as error:
            setup.context.log.main(
                f"what lanes cost was not measured: a copy of {name} does not run on lanes put together "
                f"({type(error).__name__})"
            )
            return
        self._say(name, took, lanes)

    def _times(self, module: nn.Module, data: Any, lanes: int, counts: Sequence[int]) -> dict[int, float]:
        params = [param for param in module.parameters() if param.requires_grad]
        rows = {count: _grouped(data, lanes, count) for count in counts}
        took: dict[int, float] = {}
        began = time.perf_counter()
        for _ in range(_REPEATS):
            for count, row in rows.items():
                if took.keys() >= {1, lanes} and time.perf_counter() - began > _BUDGET:
                    return took
                seconds = self._once(module, row, params)
                took[count] = min(seconds, took.get(count, seconds))
        return took

    def _once(self, module: nn.Module, rows: Sequence[Any], params: Sequence[Parameter]) -> float:
        device = self._setup.context.device
        synchronize(device)
        began = time.perf_counter()
        for args, kwargs in rows:
            made = [leaf for leaf in leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]
            total = [leaf.sum() for leaf in made if leaf.requires_grad]
            if total and params:
                torch.autograd.grad(total, params, allow_unused=True)
        synchronize(device)
        return time.perf_counter() - began

    def _say(self, name: str, took: dict[int, float], lanes: int) -> None:
        ratio = took[lanes] / took[1]
        if ratio <= _HIGH:
            return
        every = self._setup.batch.lane_count
        fits = [count for count in took if took[count] <= _HIGH * took[1]]
        fewer = max(fits) * every // lanes
        self._setup.context.log.main(
            f"{every} lanes: a forward and backward pass of {name} takes {ratio:.1f} times as long as without lanes here. "
            f"lanes={fewer} would cost {took[max(fits)] / took[1]:.2f}; it is another run, on at most {fewer} "
            f"rank{'s' * (fewer > 1)}"
        )


def _alone(module: nn.Module) -> nn.Module:
    """Return a copy that nobody listens to: what it is called with and changes concerns nobody."""
    made = copy.deepcopy(module)
    for part in made.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    return made


def _grouped(data: Any, lanes: int, count: int) -> list[Any]:
    """Return the arguments with lanes put together into so many batches."""
    size = lanes // count
    starts = range(0, lanes, size)
    shapes = [{value.shape[1:] for value in leaf.per_lane} for leaf in lanes_of(data) if isinstance(leaf, LaneTensor)]
    # Padded to other lengths, they cannot be put together: the first stands for all.
    one = any(len(found) > 1 for found in shapes)
    return [_together(data, [pick(data, 0 if one else at) for at in range(start, start + size)]) for start in starts]


def _together(data: Any, group: Sequence[Any]) -> Any:
    rows = iter(zip(*(leaves(part) for part in group), strict=True))

    def one(leaf: Any) -> Any:
        row = next(rows)
        is_of_lanes = isinstance(leaf, LaneTensor)
        return torch.cat([part for part in row if isinstance(part, Tensor)]) if is_of_lanes else leaf

    return map_leaves(one, data)
