"""AMPConfig: the part of a run's config that is about number formats, in one flat object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.config import Config, load_config
from samestep.errors import ConfigError, Mistake, PrecisionError
from samestep.optim.precision import best_precision, choose_precision

_STRATEGIES = ("norm", "value", "adaptive")
_SAME = ("bits", "rounding")
_KEYS = {
    "precision": "precision",
    "seed": "seed",
    "same": "same",
    "initial_scale": "loss_scale.init",
    "growth_factor": "loss_scale.growth",
    "backoff_factor": "loss_scale.backoff",
    "growth_interval": "loss_scale.interval",
    "min_scale": "loss_scale.min",
    "max_scale": "loss_scale.max",
    "hysteresis": "loss_scale.hysteresis",
    "find_unused_parameters": "distributed.find_unused_parameters",
}
"""Our fields, and the keys of a run's config that they stand for."""


@dataclass(frozen=True)
class AMPConfig:
    """Settings of an AMPTrainer: precision, loss scaling and clipping."""

    precision: str = "auto"
    """fp32, tf32, bf16, fp16, or auto: by device."""
    seed: int = 0
    """Root of every draw of the model."""
    initial_scale: float = 2.0**15
    """fp16: the loss scale of the first step; it applies to the mean loss."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps without overflow before the scale grows."""
    min_scale: float = 1.0
    """An overflow at this scale ends the training."""
    max_scale: float = 2.0**24
    hysteresis: int = 1
    """Overflows that are skipped before the scale shrinks."""
    gradient_clip_max_norm: float | None = None
    """The limit on gradients; what it limits is the strategy."""
    gradient_clip_strategy: str = "norm"
    """norm, value (the largest absolute value), or adaptive (a multiple of the running norm)."""
    find_unused_parameters: bool = False
    """Parameters may take part in some batches and not in others."""
    same: str = "bits"
    """bits, or rounding: the sums of DistributedDataParallel, whose last bits depend on the ranks."""

    def __post_init__(self) -> None:
        self.for_run(lanes=1)

    @classmethod
    def auto(cls, **values: Any) -> AMPConfig:
        """bf16 where the GPU computes in it, fp16 on older GPUs, fp32 on a CPU."""
        return cls(precision="auto", **values)

    @classmethod
    def force_bf16(cls, **values: Any) -> AMPConfig:
        """bf16; on a GPU that does not compute in it a RuntimeError. CPUs compute in it slowly."""
        supported, reason = detect_bf16_support()
        if torch.cuda.is_available() and not supported:
            raise PrecisionError(f"bf16 was forced, but {reason}: use AMPConfig.auto()")
        return cls(precision="bf16", **values)

    @classmethod
    def force_fp16(cls, **values: Any) -> AMPConfig:
        """fp16 with dynamic loss scaling; on a CPU too, slowly."""
        return cls(precision="fp16", **values)

    def for_run(self, lanes: int, distributed: Mapping[str, Any] | None = None) -> Config:
        """Return the config that the step engine takes; `ConfigError` names our fields, all wrong ones."""
        values: dict[str, Any] = {key: getattr(self, name) for name, key in _KEYS.items()}
        values |= {f"distributed.{name}": value for name, value in (distributed or {}).items()}
        # The batch size and the end are the caller's: one sample a lane and one step are placeholders.
        values |= {"global_batch": lanes, "lanes": lanes, "steps": 1, "on_nonfinite": "skip"}
        values["speed.graph"] = False  # its batches come one by one, without a loss to capture
        mistakes: list[Mistake] = []
        strategy = self.gradient_clip_strategy
        if strategy not in _STRATEGIES:
            message = f"{strategy!r} is none of {', '.join(_STRATEGIES)}"
            mistakes.append(Mistake("gradient_clip_strategy", message))
        elif self.gradient_clip_max_norm is not None:
            values[f"clip.{strategy}"] = self.gradient_clip_max_norm
        if self.same not in _SAME:
            mistakes.append(Mistake("same", f"{self.same!r} is none of {', '.join(_SAME)}"))
            values.pop("same")
        config = None
        try:
            config = load_config(values)
        except ConfigError as error:
            mistakes += [_in_our_words(mistake) for mistake in error.mistakes]
        if mistakes or config is None:
            raise ConfigError("AMPConfig", mistakes)
        return config


def _in_our_words(mistake: Mistake) -> Mistake:
    if mistake.path.startswith("clip."):
        return Mistake("gradient_clip_max_norm", mistake.message)
    names = {key: name for name, key in _KEYS.items()}
    return Mistake(names.get(mistake.path, mistake.path), mistake.message)


def detect_bf16_support() -> tuple[bool, str]:
    """Return whether this process's GPU computes in bf16, and why."""
    if not torch.cuda.is_available():
        return False, "there is no CUDA device"
    kind, reason = best_precision(torch.device("cuda"))
    return kind == "bf16", reason.removeprefix("auto: ")


def get_optimal_dtype() -> torch.dtype:
    """Return what `AMPConfig.auto()` computes in on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return choose_precision("auto", device).dtype
