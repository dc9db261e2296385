"""Ends a run: after an error of its code, or of what is still to be done when that has ended."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from samestep.errors import NonFiniteLoss, NotDeterministic, TaskError
from samestep.run_setup import RunSetup
from samestep.step.micro_batches import out_of_memory


def end_with(error: BaseException | None, *last: Callable[[], None]) -> BaseException | None:
    """Return the run's error; without one `last` is called, whose error is the run's then."""
    try:
        for call in last if error is None else ():
            call()
    except BaseException as late:
        return late
    return error


def shown_error() -> BaseException | None:
    """Return the error that the interpreter has shown last."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def close_at_exit(close: Callable[[Any, BaseException | None, Any], None], earlier: BaseException | None) -> None:
    """Close a run that is still open in a process that ends.

    An error that the interpreter has shown is the run's; one that closing raises makes the process fail.

    Args:
        close: The run's `__exit__`.
        earlier: What the interpreter had shown before the run.
    """
    error = shown_error()
    error = None if error is earlier else error
    try:
        close(None if error is None else type(error), error, None)
    except BaseException as late:
        sys.excepthook(type(late), late, late.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        # Too late for an exit code by raising.
        os._exit(getattr(late, "exit_code", 1))


def with_advice(error: BaseException, setup: RunSetup, step: int | None) -> BaseException:
    """Return the error, or one of ours that says what to do about it."""
    at = "before the first step" if step is None else f"in step {step}"
    if isinstance(error, torch.OutOfMemoryError) and setup.planned is not None:
        config, context = setup.config, setup.context
        more = {"none": "optimizer", "optimizer": "weights"}.get(config.distributed.shard, "")
        could_shard = more if config.same == "bits" and context.world > 1 else ""
        return out_of_memory(error, context.device, setup.batch.lane_batch, at, could_shard)
    if isinstance(error, RuntimeError) and "CUBLAS_WORKSPACE_CONFIG" in str(error):
        return NotDeterministic(
            f"{at} torch found that matrix products were computed on the GPU before the run was opened, "
            "with kernels that give other bits each time, and it does not choose again. Start the process "
            "with CUBLAS_WORKSPACE_CONFIG=:4096:8, or call samestep.start before anything computes on a GPU"
        )
    if isinstance(error, RuntimeError) and "deterministic" in str(error):
        return _not_deterministic(error, at) or error
    if setup.gathered.weights is not None:
        return _of_absent_weights(error, at) or error
    return error


def _of_absent_weights(error: BaseException, at: str) -> BaseException | None:
    """Return the hint for what may come of weights that other ranks hold, which are NaN and cannot be written."""
    if isinstance(error, RuntimeError) and "refers to a single memory location" in str(error):
        return TaskError(
            f"{at} a weight was changed that another rank owns (distributed.shard: weights). Only optimizers "
            "change weights there: set shard: optimizer"
        )
    if isinstance(error, NonFiniteLoss):
        return NonFiniteLoss(
            f"{error}. With distributed.shard: weights, weights that other ranks own read as NaN outside of the "
            "model's passes: where a loop reads them itself (a penalty over model.parameters(), an average that it "
            "keeps), set shard: optimizer"
        )
    return None


def _not_deterministic(error: RuntimeError, at: str) -> NotDeterministic | None:
    """Return the hint for what `torch.use_deterministic_algorithms` has refused."""
    found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None:
        return None
    return NotDeterministic(
        f"{found[1]} {at} gives other bits each time it runs, and torch has no deterministic form of "
        "it on this device; same: bits cannot hold with it. Use another operation; or set "
        "deterministic: warn, to train with it and be warned; or same: rounding"
    )
