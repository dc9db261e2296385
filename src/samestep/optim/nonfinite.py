"""NaN and infinite losses: found without waiting for the device, named by lane and sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.distributed.context import RunContext
from samestep.errors import NonFiniteLoss
from samestep.reduce.buffers import changing_buffers
from samestep.reduce.scaling import Scaling
from samestep.reduce.stats import LocalStats, read_numbers

_IN_A_ROW = 10
"""Skipped steps in a row after which the run stops: it no longer learns."""
_IDS_SHOWN = 16


class FiniteGuard:
    """Stops a run whose loss is NaN or infinite, or reports which steps were skipped; on all ranks.

    To stop, the losses are checked when they are read anyway, and before every save. To
    skip, the update decides on the device, and a skipped step leaves the buffers as they were.
    """

    def __init__(self, context: RunContext, modules: Sequence[nn.Module], remembered: int, scaling: Scaling) -> None:
        """Args:
        context: This process's place in the run.
        modules: Whose buffers a skipped step leaves as they were.
        remembered: For how many steps to remember which samples a lane had.
        scaling: Whether steps are skipped, and the lowest loss scale.
        """
        self.skips = scaling.checks
        self._lowest_scale = scaling.lowest_scale
        self._context = context
        self._remembered = remembered
        self._seen: dict[int, dict[int, tuple[Any, ...]]] = {}
        self._in_a_row = 0
        self._buffers = changing_buffers(modules) if self.skips else []
        self._before = [buffer.clone() for buffer in self._buffers]

    def begin(self, step: int) -> None:
        self._seen[step] = {}
        self._seen.pop(step - self._remembered, None)

    def keep_buffers(self) -> None:
        """Before the first lane: what a skipped step leaves the buffers at."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)

    def saw(self, step: int, lane: int, ids: tuple[Any, ...]) -> None:
        """Remember which samples a lane had."""
        self._seen[step][lane] = ids

    def restore_buffers(self, skipped: Tensor) -> None:
        """Leave the buffers as they were if the step is skipped; decided on the device."""
        keep = skipped == 0
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(keep, buffer, before))

    def passed(self) -> None:
        """The last step changed the weights."""
        self._in_a_row = 0

    def skipped(self, step: int, stats: LocalStats, scale: float | None) -> None:
        """Report it, or end the run if it no longer learns. Every rank calls this."""
        self._in_a_row += 1
        losses = read_numbers(stats.values())[::2]
        lanes = [lane for lane, loss in enumerate(losses) if not math.isfinite(loss)]
        what = self._describe(step, lanes)
        if scale is not None and self._lowest_scale is not None and scale <= self._lowest_scale:
            raise NonFiniteLoss(
                f"{what}, at the lowest loss scale of {scale:g} (loss_scale.min): smaller gradients "
                "do not help. Look at these samples and the learning rate, or use bf16"
            )
        if scale is None and self._in_a_row >= _IN_A_ROW:
            raise NonFiniteLoss(f"{what}; {_IN_A_ROW} steps in a row were skipped")
        at = "" if scale is None else f" at loss scale {scale:g}"
        self._context.log.main(f"{what}{at}: the step is skipped")

    def state_dict(self) -> dict[str, Any]:
        return {"skipped in a row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = state["skipped in a row"]

    def refuse_bad_weights(self, step: int, params: Sequence[Parameter], is_sharded: bool = False) -> None:
        """Before a save: a finite loss can leave weights that are not."""
        is_finite = _all_finite([param.detach() for param in params])
        if not (all(self._context.gather(is_finite)) if is_sharded else is_finite):
            raise NonFiniteLoss(
                f"weights are NaN or infinite after step {step}, though its loss was not. The "
                "checkpoints before it are intact: look at the gradients, or set clip.norm"
            )

    def stop(self, step: int, lanes: Sequence[int]) -> None:
        """End the run on every rank: these lanes' losses were not finite."""
        raise NonFiniteLoss(
            f"{self._describe(step, lanes)}. The checkpoints before it are intact. Look at these samples "
            "and at the learning rate; on_nonfinite: skip lets such steps change nothing"
        )

    def _describe(self, step: int, lanes: Sequence[int]) -> str:
        if not lanes:
            return f"a gradient of step {step} is NaN or infinite"
        known: dict[int, tuple[Any, ...]] = {}
        for ids in self._context.gather(self._seen.get(step, {})):
            known |= ids
        return f"the loss of step {step} is NaN or infinite in {_named(lanes, known)}"


def _named(lanes: Sequence[int], ids: Mapping[int, tuple[Any, ...]]) -> str:
    return ", ".join(f"lane {lane} ({_samples(ids.get(lane, ()))})" for lane in lanes)


def _samples(ids: tuple[Any, ...]) -> str:
    if all(sample == "" for sample in ids):
        return f"{len(ids)} sample{'' if len(ids) == 1 else 's'} of a stream"
    more = ", ..." if len(ids) > _IDS_SHOWN else ""
    return f"samples {', '.join(map(str, ids[:_IDS_SHOWN]))}{more}"


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    # A sum is finite only if all its terms are, but for an overflow, which is as bad.
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    sums = [tensor.sum(dtype=torch.float64) for tensor in real]
    return not sums or bool(torch.stack(sums).isfinite().all())
