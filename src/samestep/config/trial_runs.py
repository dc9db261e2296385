"""The config of a run that only measures something, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

from samestep.config.schema import CheckpointConfig, Config, PreemptionConfig, ResumeConfig
from samestep.config.trackers import TrackersConfig


def trial_run(config: Config, **changes: Any) -> Config:
    """A config without saves, trackers, schedules, averages at the end and early stops.

    Args:
        config: Of the training that is measured.
        **changes: What else is other, such as its directory and its length in steps.
    """
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
