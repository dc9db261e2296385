"""How a run ends: by an error of its code, or of what is still to be done when that has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch

from samestep.run_setup import RunSetup
from samestep.step.micro_batches import out_of_memory


def end_with(error: BaseException | None, *last: Callable[[], None]) -> BaseException | None:
    """The run's error; without one `last` is called, whose error is the run's then."""
    try:
        for call in last if error is None else ():
            call()
    except BaseException as late:
        return late
    return error


def with_advice(
    error: BaseException | None, setup: RunSetup, step: int | None
) -> BaseException | None:
    """The error, or what to do about it; `step` is the one that it came in."""
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    at = "before the first step" if step is None else f"in step {step}"
    return out_of_memory(error, setup.context.device, setup.batch.lane_batch, at)
