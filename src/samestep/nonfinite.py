"""NaN and infinite losses: found without waiting for the device, named by lane and sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.data import LaneBatch
from samestep.errors import NonFiniteLoss
from samestep.runtime.buffers import changing_buffers
from samestep.runtime.context import RunContext
from samestep.runtime.lanestats import LocalStats, read_numbers

_IN_A_ROW = 10
"""Skipped steps in a row after which the run stops: it no longer learns."""
_IDS_SHOWN = 16


class FiniteGuard:
    """Stops a run whose loss is not a number, or skips such steps; the same on all ranks.

    To stop, the losses are looked at when they are read anyway, and before every save. To
    skip, every step waits for the device: whether to update must be known before the update.
    """

    def __init__(
        self, policy: str, context: RunContext, modules: Sequence[nn.Module], remembered: int
    ) -> None:
        self.skips = policy == "skip"
        self._context = context
        self._remembered = remembered
        self._ids: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._skipped = 0
        self._buffers = changing_buffers(modules) if self.skips else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin(self, step: int) -> None:
        self._ids[step] = {}
        self._ids.pop(step - self._remembered, None)
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    def saw(self, step: int, batch: LaneBatch) -> None:
        self._ids[step][batch.lane] = batch.ids

    def allows_update(self, step: int, stats: LocalStats, params: Sequence[Parameter]) -> bool:
        """Whether a step may change the weights; if not, the buffers are what they were."""
        if not self.skips:
            return True
        losses = read_numbers(stats.values())[::2]
        lanes = [lane for lane, loss in enumerate(losses) if not math.isfinite(loss)]
        if not lanes and _all_finite([p.grad for p in params if p.grad is not None]):
            self._skipped = 0
            return True
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._before)
        self._skipped += 1
        if self._skipped >= _IN_A_ROW:
            raise NonFiniteLoss(
                f"{self._told(step, lanes)}; {_IN_A_ROW} steps in a row were skipped"
            )
        self._context.log.main(f"{self._told(step, lanes)}: the step is skipped")
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"skipped in a row": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state["skipped in a row"]

    def refuse_bad_weights(self, step: int, params: Sequence[Parameter]) -> None:
        """Before a save: a finite loss can leave weights that are not."""
        if not _all_finite([param.detach() for param in params]):
            raise NonFiniteLoss(
                f"weights are NaN or infinite after step {step}, though its loss was not. The "
                "checkpoints before it are whole: look at the gradients, or set clip.norm"
            )

    def stop(self, step: int, lanes: Sequence[int]) -> None:
        """End the run on every rank: these lanes' losses were not finite."""
        raise NonFiniteLoss(
            f"{self._told(step, lanes)}. The checkpoints before it are whole. Look at these samples "
            "and at the learning rate; on_nonfinite: skip passes over such steps"
        )

    def _told(self, step: int, lanes: Sequence[int]) -> str:
        if not lanes:
            return f"a gradient of step {step} is NaN or infinite"
        known: dict[int, tuple[Any, ...]] = {}
        for ids in self._context.gather(self._ids.get(step, {})):
            known |= ids
        return f"the loss of step {step} is NaN or infinite in {_named(lanes, known)}"


def _named(lanes: Sequence[int], ids: Mapping[int, tuple[Any, ...]]) -> str:
    return ", ".join(f"lane {lane} ({_samples(ids.get(lane, ()))})" for lane in lanes)


def _samples(ids: tuple[Any, ...]) -> str:
    if all(sample == "" for sample in ids):
        return f"{len(ids)} sample{'' if len(ids) == 1 else 's'} of a stream"
    more = ", ..." if len(ids) > _IDS_SHOWN else ""
    return f"samples {', '.join(map(str, ids[:_IDS_SHOWN]))}{more}"


def _all_finite(grads: Sequence[Tensor]) -> bool:
    # A sum is finite only if all its terms are, but for an overflow, which is as bad.
    sums = [grad.sum(dtype=torch.float64) for grad in grads]
    return not sums or bool(torch.stack(sums).isfinite().all())
