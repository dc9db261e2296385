"""The sections on how weights change: loss scale, clipping, optimizers, schedules, averages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from samestep.config import bounds
from samestep.config.distributed import Auto
from samestep.errors import Mistake


class Section(BaseModel):
    """A part of the config: immutable, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LossScaleConfig(Section):
    """Dynamic loss scaling, with precision fp16. The scale applies to the mean loss."""

    init: bounds.Scale = Field(65536.0, description="the scale of the first step")
    growth: bounds.Factor = Field(2.0, description="factor when it grows")
    backoff: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="factor at an overflow")
    interval: bounds.Steps = Field(2000, description="steps without overflow before it grows")
    min: bounds.Scale = Field(1.0, description="an overflow at this scale ends the run")
    max: bounds.Scale = Field(2.0**24, description="it grows no further")
    hysteresis: bounds.Steps = Field(1, description="overflows in a row before it shrinks")

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        if self.min <= self.init <= self.max:
            return []
        message = f"{self.init:g} is not between min {self.min:g} and max {self.max:g}"
        return [Mistake("loss_scale.init", message)]


class ClipConfig(Section):
    """Limits on the gradient, after the sum over all lanes; at most one of the three."""

    norm: bounds.Positive | None = Field(None, description="largest norm")
    value: bounds.Positive | None = Field(None, description="largest absolute value")
    adaptive: bounds.Positive | None = Field(None, description="largest multiple of the running norm")
    memory: bounds.Fraction = Field(0.98, description="share of the running norm that is kept each step")
    per_group: bool = Field(False, description="each parameter group by its own norm")

    @property
    def is_on(self) -> bool:
        """Return whether any limit is set."""
        return (self.norm, self.value, self.adaptive) != (None, None, None)

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        given = [key for key in ("norm", "value", "adaptive") if getattr(self, key) is not None]
        if len(given) > 1:
            return [Mistake(f"clip.{given[1]}", f"clip.{given[0]} is set too: keep one of them")]
        if self.per_group and given in ([], ["value"]):
            return [Mistake("clip.per_group", "is about norms: set clip.norm or clip.adaptive")]
        return []


class GroupConfig(Section):
    """Parameters with their own settings; the first group that matches a name applies."""

    match: tuple[str, ...] = Field(
        min_length=1, max_length=bounds.MOST_ENTRIES, description="patterns of parameter names, such as head.*"
    )
    name: str | None = Field(None, description="another optimizer for this group")
    lr: bounds.NonNegative | None = Field(None, description="learning rate of this group")
    weight_decay: bounds.NonNegative | None = Field(None, description="weight decay of this group")
    args: dict[str, Any] = Field({}, max_length=bounds.MOST_ENTRIES, description="further arguments of the optimizer")


class OptimizerConfig(Section):
    """Optimizers by name, in place of the task's."""

    name: str = Field("adamw", description="a class of torch.optim, such as adamw or sgd")
    lr: bounds.NonNegative = Field(1e-3, description="learning rate")
    weight_decay: bounds.NonNegative | None = Field(None, description="torch's default if not set")
    no_decay: tuple[str, ...] = Field(
        ("bias", "norm"),
        max_length=bounds.MOST_ENTRIES,
        description="no weight decay for: bias, norm, or patterns of names",
    )
    args: dict[str, Any] = Field({}, max_length=bounds.MOST_ENTRIES, description="further arguments of the optimizer")
    groups: tuple[GroupConfig, ...] = Field(
        (), max_length=bounds.MOST_ENTRIES, description="parameters with their own settings"
    )
    implementation: Literal["auto", "fused", "foreach", "plain"] = Field(
        "auto", description="auto: fused where torch has it, else foreach on GPUs, else plain"
    )


class ScheduleConfig(Section):
    """The learning rate over the run, in place of the task's schedules."""

    name: str = Field(
        "constant",
        description="constant, linear, cosine, one_cycle, step, plateau, warm_restarts, or a "
        "class of torch.optim.lr_scheduler",
    )
    warmup: bounds.StepsFromZero | Annotated[float, Field(gt=0, lt=1)] = Field(
        0, description="steps, or a share of the run, in which the rate rises from near 0"
    )
    final: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the rate at the end (linear, cosine, warm_restarts), or at least (plateau)"
    )
    every: Literal["auto", "step", "epoch"] = Field(
        "auto",
        description="when it advances; auto: epoch for step and most of torch's, else step; plateau: every evaluation",
    )
    args: dict[str, Any] = Field({}, max_length=bounds.MOST_ENTRIES, description="further arguments of the scheduler")


class EmaConfig(Section):
    """An exponential moving average of the weights, validated and saved beside them."""

    decay: bounds.Fraction = Field(0.999, description="share of the average that is kept in each update")
    per: Literal["step", "epoch"] = Field("step", description="whether decay applies per step or per epoch")
    every: bounds.Steps = Field(1, description="steps between two updates of the average")
    warmup: bool = Field(True, description="average less at first: (1 + n) / (10 + n) at most")
    policy: Literal["per_rank", "rank0"] = Field("per_rank", description="every rank holds the average, or only rank 0")
    buffers: Literal["average", "copy"] = Field(
        "average",
        description="statistics of BatchNorm: averaged like the weights they were measured with, or the model's own",
    )


class SwaConfig(Section):
    """Stochastic weight averaging: the mean of weights over the last part of the run."""

    start: bounds.Fraction | bounds.Steps = Field(0.75, description="share of the run, or step, at which it starts")
    every: bounds.Steps | Literal["epoch"] = Field("epoch", description="steps between two samples")
    lr: bounds.NonNegative | None = Field(None, description="constant rate in this phase; the schedule's if not set")
    anneal: bounds.StepsFromZero = Field(0, description="steps from the schedule's rate to lr")

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        if self.lr is not None or self.anneal == 0:
            return []
        return [Mistake("swa.anneal", "leads to a rate that is not set: set swa.lr, or remove it")]


class MemoryConfig(Section):
    """Settings that fit a lane into the device's memory."""

    checkpoint: tuple[str, ...] = Field(
        (),
        max_length=bounds.MOST_ENTRIES,
        description="patterns of modules whose activations are recomputed in backward",
    )
    lane_split: bounds.Samples | Auto = Field(
        1, description="micro-batches per lane; auto: as few as fit (changes BatchNorm and draws)"
    )


class SpeedConfig(Section):
    """Faster steps."""

    compile: bool | Literal["blocks"] = Field(
        False,
        description="torch.compile the model; blocks: each block of it, as distributed.shard_blocks names or finds them",
    )
    graph: bool | Auto = Field("auto", description="replay steps as CUDA graphs; auto: on GPUs, where that is possible")
    parallel_lanes: bounds.Lanes | Auto = Field(
        "auto", description="lanes side by side in a graph; auto: as many as memory allows, up to 8"
    )
