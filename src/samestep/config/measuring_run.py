"""The config of a run that only measures something, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

from samestep.config.evaluation import EvaluationConfig
from samestep.config.schema import CheckpointConfig, Config, PreemptionConfig, ResumeConfig
from samestep.config.trackers import TrackersConfig

ENDLESS = 1_000_000
"""Steps that no measurement reaches."""


def endless_run(config: Config, run_dir: str, **changes: Any) -> Config:
    """Return a config without saves, evaluations and an end."""
    # Never due; a plateau's schedule requires that there are evaluations.
    evaluation = EvaluationConfig(every_epochs=None, every_steps=ENDLESS)
    values = {"run_dir": run_dir, "steps": ENDLESS, "evaluation": evaluation, **changes}
    return measuring_run(config, **values)


def measuring_run(config: Config, **changes: Any) -> Config:
    """Return a config without saves, trackers, schedules, averages at the end and early stops."""
    return config.model_copy(
        update={
            "epochs": None,
            "checkpoint": CheckpointConfig(enabled=False, every_minutes=None, every_epochs=None),
            "resume": ResumeConfig(checkpoint="never"),
            "preemption": PreemptionConfig(requeue=False),
            "trackers": TrackersConfig(),
            "early_stopping": None,
            "schedule": None,
            "swa": None,
            **changes,
        }
    )
