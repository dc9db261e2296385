"""The schema of a config. A field is a type, a default and one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from samestep.config import bounds
from samestep.config.distributed import Auto, DistributedConfig
from samestep.config.evaluation import EvaluationConfig
from samestep.config.launch import LaunchConfig, Line, Meaning
from samestep.config.optim import (
    ClipConfig,
    EmaConfig,
    LossScaleConfig,
    MemoryConfig,
    OptimizerConfig,
    ScheduleConfig,
    Section,
    SpeedConfig,
    SwaConfig,
)
from samestep.config.trackers import TrackersConfig
from samestep.errors import PlanError
from samestep.lanes.plan import BatchPlan

DEFAULT_LANES = 8

FolderName = Annotated[
    str,
    Field(pattern=r"^[^-~./\\\x00-\x1f\x7f-\x9f][^/\\\x00-\x1f\x7f-\x9f]{0,99}$"),
    Meaning("a plain folder name of at most 100 characters, without / and not starting with . - ~"),
]
"""It becomes a part of paths: it must not lead elsewhere, or be taken for an option."""

Same = Literal["bits", "rounding", "samples"]
"""How much of a run is the same at any size."""


class LoaderConfig(Section):
    """Settings of the loader. Nothing here changes the run, only its speed."""

    workers: bounds.Workers = Field(0, description="loader processes per rank")
    prefetch: bounds.Prefetch = Field(2, description="lane batches each worker reads ahead")
    pin_memory: bool | Auto = Field("auto", description="page-locked batches; auto: on GPUs, if they are large")
    persistent_workers: bool = Field(
        False, description="keep loader processes over epochs; then changes of the dataset do not reach them"
    )


class BestConfig(Section):
    """The rule by which an evaluation is the best so far."""

    metric: str = Field("val_loss", description="a value the evaluation reports")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher is better")
    min_delta: bounds.NonNegative = Field(0.0, description="least improvement")


class EarlyStoppingConfig(Section):
    """Stop when evaluations stop improving; uses the rule of `best`."""

    patience: bounds.Count = Field(3, description="evaluations without improvement before stopping")


class CheckpointConfig(Section):
    """Settings of saves. A run is also saved at its end, at a new best, and on a stop signal."""

    enabled: bool = Field(True, description="false saves nothing, and a stopped run is lost")
    every_steps: bounds.Steps | None = Field(None, description="save after every n steps")
    every_minutes: bounds.Minutes | None = Field(15.0, description="save when this long has passed since the last save")
    every_epochs: bounds.Epochs | Auto | None = Field(
        "auto",
        description="save after every n epochs; auto: after each, but where that has taken more than 5 % of the "
        "run's time, and several seconds, only after some",
    )
    keep_last: bounds.KeepCount = Field(2, description="newest checkpoints that are kept, besides the best")
    keep_best: bounds.KeepCount = Field(1, description="best checkpoints that are kept, by best.metric")
    asynchronous: bool = Field(True, description="write behind the training; false waits for it")


class ContrastiveConfig(Section):
    """Losses over the whole global batch."""

    recompute: bool | Auto = Field(
        "auto",
        description="embed a rank's lanes, but for its first, a second time for their backward pass; auto: "
        "only those whose activations do not fit into half of the free memory",
    )


class FoldConfig(Section):
    """Cross-validation: train on the folds of the training set but one, and validate on that one."""

    file: Line = Field(description="the folds, as samestep cv --only-split writes them; relative to this config")
    number: bounds.Fold = Field(description="the fold that validates, from 0")


SHAPING_KEYS = (
    "task", "params", "seed", "epochs", "steps", "steps_per_epoch", "same", "drop_last",
    "precision", "loss_scale", "loss_weights", "clip", "on_nonfinite", "optimizer", "lr_scaling", "base_batch",
    "schedule", "ema", "swa", "fold", "batchnorm", "refit",
)  # fmt: skip
"""Keys that shape a run's result and are compared when it resumes."""
PLANNED_KEYS = ("global_batch", "lanes", "samples", "lane_split")
"""The same, compared by the numbers that the run was planned with."""
ALLOWED_KEYS = (*SHAPING_KEYS, *PLANNED_KEYS, "early_stopping", "code")


class ResumeConfig(Section):
    """The checkpoint that the run resumes from."""

    checkpoint: str = Field(
        "auto", description="auto: the newest valid one in the run directory; best: its best; never; or a path"
    )
    allow: tuple[str, ...] = Field(
        (),
        max_length=bounds.MOST_ENTRIES,
        description="keys that may differ from the checkpoint's, though that changes the run",
    )


class PreemptionConfig(Section):
    """Conditions, besides signals, under which a run is saved and stopped before its end, and what follows."""

    requeue: bool = Field(True, description="inside a Slurm job: scontrol requeue after SIGUSR1")
    after_minutes: bounds.Minutes | None = Field(
        None, description="save and stop when a start has lasted this long; it can be resumed"
    )


class Config(Section):
    """One training run, immutable: what `load_config` returns. docs/config.md lists every key."""

    task: str | None = Field(
        None, description="FILE.py:Class, the path relative to this config; a custom loop needs none"
    )
    params: dict[str, Any] = Field(
        {}, max_length=bounds.MOST_ENTRIES, description="keyword arguments for the task's class"
    )
    name: FolderName = Field("run", description="the run's name; the config's folder if not set")
    run_dir: Line | None = Field(None, description="the run's directory; runs/<name> if not set")
    seed: bounds.Seed = Field(0, description="root of every draw")
    epochs: bounds.Epochs | None = Field(None, description="passes over the data; or set steps")
    steps: bounds.Steps | None = Field(None, description="optimizer steps; or set epochs")
    steps_per_epoch: bounds.Steps | None = Field(
        None, description="length of an epoch of iterable data; spares a collective per step"
    )
    global_batch: bounds.Samples | None = Field(
        None, description="samples in one step of the whole run; a custom loop can leave it to its DataLoader"
    )
    batch_per_rank: bounds.Samples | None = Field(
        None, description="samples per rank: the run then depends on the number of ranks"
    )
    accumulation: bounds.Lanes = Field(1, description="micro-batches per rank and step, with batch_per_rank only")
    lanes: bounds.Lanes | None = Field(None, description="equal parts of the global batch; 8 if not set")
    batchnorm: Literal["lane", "global"] = Field(
        "lane", description="what BatchNorm normalises over: each lane, or the global batch"
    )
    same: Same = Field("bits", description="what stays the same at another number of ranks")
    drop_last: bool = Field(False, description="leave out an epoch's incomplete last batch")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="bf16 and fp16 by autocast; auto: by device, and reports why"
    )
    deterministic: bool | Literal["warn"] = Field(
        True,
        description="for same: bits on a GPU: an operation without a deterministic form is an error, "
        "a warning, or (false) not looked for",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="a NaN or infinite loss ends the run, or its step changes nothing"
    )
    check_ranks_every: bounds.Steps | None = Field(
        None, description="compare weights and states over the ranks every n steps"
    )
    loss_weights: dict[str, bounds.Finite] | None = Field(
        None, max_length=bounds.MOST_ENTRIES, description="weights of losses with names, if the task returns several"
    )
    log_every: bounds.Steps = Field(10, description="steps between two readings of the losses")
    loss_scale: LossScaleConfig = LossScaleConfig()
    clip: ClipConfig = ClipConfig()
    optimizer: OptimizerConfig | None = None
    lr_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none", description="how learning rates follow global_batch, against base_batch"
    )
    base_batch: bounds.Samples | None = Field(
        None, description="the global batch that the learning rates were chosen for"
    )
    schedule: ScheduleConfig | None = None
    ema: EmaConfig | None = None
    swa: SwaConfig | None = None
    memory: MemoryConfig = MemoryConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    speed: SpeedConfig = SpeedConfig()
    loader: LoaderConfig = LoaderConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    fold: FoldConfig | None = None
    refit: bool = Field(False, description="the final training: on the validation set too, and nothing is evaluated")
    best: BestConfig = BestConfig()
    early_stopping: EarlyStoppingConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    trackers: TrackersConfig = TrackersConfig()
    distributed: DistributedConfig = DistributedConfig()
    launch: LaunchConfig = LaunchConfig()

    _folder: Path = PrivateAttr(default=Path())
    _platform_notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def platform_notes(self) -> tuple[str, ...]:
        """Return what the platform that this runs on has changed in the config, by which file, and why."""
        return self._platform_notes

    @property
    def folder(self) -> Path:
        """The folder that the paths in the config are relative to."""
        return self._folder

    @property
    def run_path(self) -> Path:
        """The run's directory: `run_dir`, or `runs/<name>`."""
        if self.run_dir is None:
            return Path(f"runs/{self.name}")
        return Path(os.path.expanduser(self.run_dir))  # noqa: PTH111 - no error where there is no home

    @property
    def leaves_batch_open(self) -> bool:
        """Return whether the global batch is left to the DataLoader of a custom loop."""
        return self.global_batch is None and self.batch_per_rank is None

    def lane_count(self, world: int) -> int:
        """Return how many lanes a global batch is split into on `world` ranks."""
        if self.batch_per_rank is not None:
            return world * self.accumulation
        return DEFAULT_LANES if self.lanes is None else self.lanes

    def batch_plan(self, world: int) -> BatchPlan:
        """Return how this config splits a global batch into lanes on `world` ranks."""
        lane_count = self.lane_count(world)
        if self.batch_per_rank is not None:
            return BatchPlan(self.batch_per_rank * lane_count, lane_count)
        if self.global_batch is None:
            raise PlanError(
                "global_batch is not set, and no DataLoader has been seen that it could be taken from: set global_batch"
            )
        return BatchPlan(self.global_batch, lane_count)
