"""What a config can say. A field is a type, a default and one sentence."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from samestep.config.distributed import Auto, DistributedConfig, FromZero, Positive
from samestep.config.launch import LaunchConfig
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
    clip_mistakes,
    loss_scale_mistakes,
    swa_mistakes,
)
from samestep.errors import Mistake, PlanError
from samestep.lanes.plan import BatchPlan


class LoaderConfig(Section):
    """How batches are read. Nothing here changes the run, only its speed."""

    workers: FromZero = Field(0, description="loader processes per rank")
    prefetch: Positive = Field(2, description="lane batches each worker reads ahead")
    pin_memory: bool | Auto = Field("auto", description="page-locked batches; auto: on GPUs")


class EvaluationConfig(Section):
    """When and how the validation set is measured."""

    mode: Literal["sharded", "rank0"] = Field(
        "sharded", description="lanes over all ranks, or all lanes on rank 0; same result"
    )
    every_epochs: Positive | None = Field(1, description="evaluate after every n epochs")
    every_steps: Positive | None = Field(None, description="evaluate after every n steps")
    batch: Positive | None = Field(None, description="samples per lane batch; as in training")


class BestConfig(Section):
    """Which evaluation is the best so far."""

    metric: str = Field("val_loss", description="a value the evaluation reports")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher is better")
    min_delta: Annotated[float, Field(ge=0)] = Field(0.0, description="least improvement")


class EarlyStoppingConfig(Section):
    """Stop when evaluations stop improving; uses the rule of `best`."""

    patience: Positive = Field(3, description="evaluations without improvement before stopping")


class CheckpointConfig(Section):
    """When the run is saved. It is also saved at its end, at a new best, and when asked to stop."""

    enabled: bool = Field(True, description="false saves nothing, and a stopped run is lost")
    every_steps: Positive | None = Field(None, description="save after every n steps")
    every_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        15.0, description="save when this long has passed since the last save"
    )
    every_epochs: Positive | None = Field(1, description="save after every n epochs")
    keep_last: Positive = Field(2, description="newest checkpoints that are kept, besides the best")
    keep_best: Positive = Field(1, description="best checkpoints that are kept, by best.metric")
    asynchronous: bool = Field(True, description="write behind the training; false waits for it")


SHAPING_KEYS = (
    "task", "params", "seed", "epochs", "steps", "steps_per_epoch", "same", "drop_last",
    "precision", "loss_scale", "clip", "on_nonfinite", "optimizer", "lr_scaling", "base_batch",
    "schedule", "ema", "swa",
)  # fmt: skip
"""Keys that shape a run's result and are compared when it goes on."""
PLANNED_KEYS = ("global_batch", "lanes", "samples", "lane_split")
"""The same, compared by the numbers that the run was planned with."""
ALLOWED_KEYS = (*SHAPING_KEYS, *PLANNED_KEYS, "early_stopping")


class ResumeConfig(Section):
    """Where the run goes on from."""

    checkpoint: str = Field(
        "auto", description="auto: the run directory's newest whole one; never; or a path"
    )
    allow: tuple[str, ...] = Field(
        (), description="keys that may differ from the checkpoint's, though the run changes"
    )


class PreemptionConfig(Section):
    """What happens when a signal stops the run."""

    requeue: bool = Field(True, description="inside a Slurm job: scontrol requeue after SIGUSR1")


class TrackersConfig(Section):
    """Where measurements go besides metrics.jsonl."""

    tensorboard: bool = Field(False, description="also write TensorBoard events")


class Config(Section):
    """One training run."""

    task: str | None = Field(
        None, description="FILE.py:Class, the path relative to this config; own loops need none"
    )
    params: dict[str, Any] = Field({}, description="keyword arguments for the task's class")
    name: Annotated[str, Field(pattern=r"^[^/\\]+$")] = Field(
        "run", description="the run's name; the config's folder if not set"
    )
    run_dir: str | None = Field(None, description="where the run lives; runs/<name> if not set")
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = Field(
        0, description="root of every draw"
    )
    epochs: Positive | None = Field(None, description="passes over the data; or set steps")
    steps: Positive | None = Field(None, description="optimizer steps; or set epochs")
    steps_per_epoch: Positive | None = Field(
        None, description="length of an epoch of iterable data; spares a collective per step"
    )
    global_batch: Positive | None = Field(None, description="samples in one step of the whole run")
    batch_per_rank: Positive | None = Field(
        None, description="samples per rank: the run then depends on the number of ranks"
    )
    accumulation: Positive = Field(
        1, description="micro-batches per rank and step, with batch_per_rank only"
    )
    lanes: Positive | None = Field(None, description="equal parts of the global batch; 8")
    same: Literal["bits", "rounding", "samples"] = Field(
        "bits", description="what stays the same at another number of ranks"
    )
    drop_last: bool = Field(False, description="leave out an epoch's incomplete last batch")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="bf16 and fp16 by autocast; auto: by device, and says why"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="a NaN or infinite loss ends the run, or its step changes nothing"
    )
    check_ranks_every: Positive | None = Field(
        None, description="compare weights and states over the ranks every n steps"
    )
    log_every: Positive = Field(10, description="steps between two readings of the losses")
    loss_scale: LossScaleConfig = LossScaleConfig()
    clip: ClipConfig = ClipConfig()
    optimizer: OptimizerConfig | None = None
    lr_scaling: Literal["none", "sqrt", "linear"] = Field(
        "none", description="how learning rates follow global_batch, against base_batch"
    )
    base_batch: Positive | None = Field(
        None, description="the global batch that the learning rates were chosen for"
    )
    schedule: ScheduleConfig | None = None
    ema: EmaConfig | None = None
    swa: SwaConfig | None = None
    memory: MemoryConfig = MemoryConfig()
    speed: SpeedConfig = SpeedConfig()
    loader: LoaderConfig = LoaderConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    best: BestConfig = BestConfig()
    early_stopping: EarlyStoppingConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    trackers: TrackersConfig = TrackersConfig()
    distributed: DistributedConfig = DistributedConfig()
    launch: LaunchConfig = LaunchConfig()

    _folder: Path = PrivateAttr(default=Path())

    @property
    def folder(self) -> Path:
        """The folder that the config's paths are relative to."""
        return self._folder

    @property
    def run_path(self) -> Path:
        return Path(self.run_dir if self.run_dir is not None else f"runs/{self.name}")

    def batch_plan(self, world: int) -> BatchPlan:
        """The batch and lanes of this config on `world` ranks."""
        if self.batch_per_rank is not None:
            lanes = world * self.accumulation
            return BatchPlan(self.batch_per_rank * lanes, lanes)
        assert self.global_batch is not None, "checked when the config was loaded"
        return BatchPlan(self.global_batch, DEFAULT_LANES if self.lanes is None else self.lanes)


DEFAULT_LANES = 8


def contradictions(config: Config, wrong: Set[str] = frozenset()) -> list[Mistake]:
    """What is wrong between fields; `wrong` are fields whose value is not the user's."""
    checks: list[tuple[Set[str], Callable[[Config], list[Mistake]]]] = [
        ({"global_batch", "batch_per_rank", "lanes", "accumulation"}, _batch_mistakes),
        ({"epochs", "steps"}, _length_mistakes),
        ({"task"}, _task_mistakes),
        ({"same"}, _same_mistakes),
        ({"early_stopping", "evaluation.every_epochs"}, _evaluation_mistakes),
        ({"resume.allow"}, _resume_mistakes),
        ({"loss_scale"}, lambda config: loss_scale_mistakes(config.loss_scale)),
        ({"clip"}, lambda config: clip_mistakes(config.clip)),
        ({"swa"}, lambda config: swa_mistakes(config.swa)),
        ({"lr_scaling", "base_batch"}, _lr_scaling_mistakes),
        (set(), lambda config: config.distributed.mistakes()),
        ({"launch.environment", "launch.ssh"}, lambda config: config.launch.mistakes()),
    ]
    return [m for keys, check in checks if not keys & wrong for m in check(config)]


def _length_mistakes(config: Config) -> list[Mistake]:
    if config.epochs is None and config.steps is None:
        message = "neither epochs nor steps is set: say how long to train with one of them"
        return [Mistake("epochs", message)]
    if config.epochs is not None and config.steps is not None:
        message = f"you set epochs {config.epochs} and steps {config.steps}: keep one of them"
        return [Mistake("steps", message)]
    return []


def _task_mistakes(config: Config) -> list[Mistake]:
    if config.task is None:
        message = "is for a task, and none is named: an own loop makes its own. Remove it"
        return [Mistake(k, message) for k in ("optimizer", "schedule") if getattr(config, k)]
    if ":" in config.task:
        return []
    return [Mistake("task", f"{config.task!r} names no class: write FILE.py:Class")]


def _evaluation_mistakes(config: Config) -> list[Mistake]:
    never = config.evaluation.every_epochs is None and config.evaluation.every_steps is None
    if not never or config.early_stopping is None:
        return []
    message = "there is no evaluation to stop on: set evaluation.every_epochs"
    return [Mistake("early_stopping", message)]


def _lr_scaling_mistakes(config: Config) -> list[Mistake]:
    if config.lr_scaling == "none" or config.base_batch is not None:
        return []
    message = f"you set {config.lr_scaling}, but not against which batch: set base_batch"
    return [Mistake("lr_scaling", message)]


def _resume_mistakes(config: Config) -> list[Mistake]:
    unknown = [key for key in config.resume.allow if key not in ALLOWED_KEYS]
    if not unknown:
        return []
    message = (
        f"{', '.join(unknown)} cannot be allowed to differ: it takes {', '.join(ALLOWED_KEYS)}"
    )
    return [Mistake("resume.allow", message)]


def _batch_mistakes(config: Config) -> list[Mistake]:
    if config.global_batch is None and config.batch_per_rank is None:
        return [
            Mistake(
                "global_batch",
                "set global_batch, or batch_per_rank for a run that depends on the number of ranks",
            )
        ]
    if config.global_batch is not None and config.batch_per_rank is not None:
        return [
            Mistake(
                "batch_per_rank",
                f"you set global_batch {config.global_batch} and "
                f"batch_per_rank {config.batch_per_rank}: keep exactly one",
            )
        ]
    if config.batch_per_rank is not None:
        if config.lanes is not None:
            return [
                Mistake(
                    "lanes",
                    "with batch_per_rank the lanes follow from the ranks: remove "
                    "lanes, or use global_batch",
                )
            ]
        return []
    found = []
    if config.accumulation != 1:
        found.append(
            Mistake(
                "accumulation",
                f"you set {config.accumulation} beside global_batch: "
                "there a rank accumulates over its lanes; set lanes instead",
            )
        )
    try:
        config.batch_plan(world=1)
    except PlanError as error:
        found.append(Mistake("global_batch", str(error)))
    return found


def _same_mistakes(config: Config) -> list[Mistake]:
    found = []
    section, level = config.distributed, config.same
    if level == "samples" and config.memory.lane_split != 1:
        found.append(
            Mistake(
                "memory.lane_split",
                "same: samples runs a rank's lanes as one batch: set same: rounding, which runs "
                "them one after the other, or 1",
            )
        )
    if section.sync_batchnorm and level != "samples":
        found.append(
            Mistake(
                "distributed.sync_batchnorm",
                f"same: {level} normalises each lane "
                "over its own samples: set same: samples, or false",
            )
        )
    if not section.broadcast_buffers and level != "samples":
        found.append(
            Mistake(
                "distributed.broadcast_buffers",
                f"same: {level} averages buffers "
                "over the lanes: false is possible only with same: samples",
            )
        )
    if level == "bits":
        for option, default in (("static_graph", False), ("gradient_as_bucket_view", True)):
            if getattr(section, option) is not default:
                found.append(
                    Mistake(
                        f"distributed.{option}",
                        "is an option of "
                        "DistributedDataParallel, which same: bits does not use: "
                        "remove it, or set same: rounding",
                    )
                )
    return found
