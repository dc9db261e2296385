"""The keywords of `samestep.start`, for editors and type checkers. Written by scripts/config_reference.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class ConfigKeywords(TypedDict, total=False):
    """The keys of a config, each of which `samestep.start` takes; docs/config.md describes them."""

    task: str | None
    """FILE.py:Class, the path relative to this config; a custom loop needs none."""
    params: Mapping[str, Any]
    """Keyword arguments for the task's class."""
    name: str
    """The run's name; the config's folder if not set."""
    run_dir: str | None
    """The run's directory; runs/<name> if not set."""
    seed: int
    """Root of every draw."""
    epochs: int | None
    """Passes over the data; or set steps."""
    steps: int | None
    """Optimizer steps; or set epochs."""
    steps_per_epoch: int | None
    """Length of an epoch of iterable data; spares a collective per step."""
    global_batch: int | None
    """Samples in one step of the whole run; a custom loop can leave it to its DataLoader."""
    batch_per_rank: int | None
    """Samples per rank: the run then depends on the number of ranks."""
    accumulation: int
    """Micro-batches per rank and step, with batch_per_rank only."""
    lanes: int | None
    """Equal parts of the global batch; 8 if not set."""
    batchnorm: Literal["lane", "global"]
    """What BatchNorm normalises over: each lane, or the global batch."""
    same: Literal["bits", "rounding", "samples"]
    """What stays the same at another number of ranks."""
    drop_last: bool
    """Leave out an epoch's incomplete last batch."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"]
    """Bf16 and fp16 by autocast; auto: by device, and reports why."""
    deterministic: bool | Literal["warn"]
    """For same: bits on a GPU: an operation without a deterministic form is an error, a warning, or (false) not looked for."""
    on_nonfinite: Literal["stop", "skip"]
    """A NaN or infinite loss ends the run, or its step changes nothing."""
    check_ranks_every: int | None
    """Compare weights and states over the ranks every n steps."""
    loss_weights: Mapping[str, Any] | None
    """Weights of losses with names, if the task returns several."""
    log_every: int
    """Steps between two readings of the losses."""
    loss_scale: Mapping[str, Any]
    clip: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None
    lr_scaling: Literal["none", "sqrt", "linear"]
    """How learning rates follow global_batch, against base_batch."""
    base_batch: int | None
    """The global batch that the learning rates were chosen for."""
    schedule: Mapping[str, Any] | None
    ema: Mapping[str, Any] | None
    swa: Mapping[str, Any] | None
    memory: Mapping[str, Any]
    contrastive: Mapping[str, Any]
    speed: Mapping[str, Any]
    loader: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    fold: Mapping[str, Any] | None
    refit: bool
    """The final training: on the validation set too, and nothing is evaluated."""
    best: Mapping[str, Any]
    early_stopping: Mapping[str, Any] | None
    checkpoint: Mapping[str, Any]
    resume: Mapping[str, Any]
    preemption: Mapping[str, Any]
    trackers: Mapping[str, Any]
    distributed: Mapping[str, Any]
    launch: Mapping[str, Any]
