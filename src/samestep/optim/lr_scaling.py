"""Scales learning rates with the global batch, against the batch that they were chosen for."""

from __future__ import annotations

import math

from samestep.config import Config


def lr_factor(config: Config, global_batch: int) -> float:
    """Return what `lr_scaling` multiplies every learning rate by."""
    if config.lr_scaling == "none" or config.base_batch is None:
        return 1.0
    times = global_batch / config.base_batch
    return times if config.lr_scaling == "linear" else math.sqrt(times)


def describe_scaling(config: Config, global_batch: int) -> str | None:
    """One line on what was scaled, or could be; None if there is nothing to report."""
    base = config.base_batch
    if base is None or base == global_batch:
        return None
    batches = f"global batch {global_batch}, base_batch {base}"
    if config.lr_scaling != "none":
        factor = lr_factor(config, global_batch)
        return f"Learning rates are multiplied by {factor:.6g} (lr_scaling {config.lr_scaling}: {batches})"
    times = global_batch / base
    return (
        f"Learning rates are as they were set ({batches}): lr_scaling sqrt would multiply them by "
        f"{math.sqrt(times):.6g}, linear by {times:.6g}"
    )
