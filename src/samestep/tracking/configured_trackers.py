"""The trackers that a config names, each guarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.config.trackers import public_params
from samestep.tracking.contract import TrackedRun, Tracker
from samestep.tracking.csv_table import CsvTable
from samestep.tracking.guard import GuardedTracker
from samestep.tracking.ids import TRACKER_IDS, TrackerIds
from samestep.tracking.mlflow_run import MlflowRun
from samestep.tracking.own_class import make_tracker
from samestep.tracking.tensorboard import TensorBoard
from samestep.tracking.wandb_run import WandbRun


def named_trackers(config: Config, folder: Path, metrics: Path, start: int) -> list[GuardedTracker]:
    """Return the trackers of a config; what is wrong with their names, or not installed, is an error."""
    chosen, found = config.trackers, dict[str, Tracker]()
    if chosen.tensorboard:
        found["tensorboard"] = TensorBoard(folder / "tensorboard")
    if chosen.csv:
        found["csv"] = CsvTable(folder / "metrics.csv", metrics)
    if chosen.wandb is not None:
        found["wandb"] = WandbRun(chosen.wandb)
    if chosen.mlflow is not None:
        found["mlflow"] = MlflowRun(chosen.mlflow)
    for number, entry in enumerate(chosen.classes):
        found[f"classes.{number} ({entry.name})"] = make_tracker(config, number)
    if not found:
        return []
    params = public_params(config.model_dump(mode="json"))
    ids = TrackerIds(folder / TRACKER_IDS)
    return [
        GuardedTracker(f"trackers.{key}", tracker, _run(config, folder, params, start, ids, key))
        for key, tracker in found.items()
    ]


def _run(config: Config, folder: Path, params: dict[str, Any], start: int, ids: TrackerIds, key: str) -> TrackedRun:
    return TrackedRun(
        name=config.name,
        folder=folder,
        params=params,
        tags=config.trackers.tags,
        start=start,
        id=ids.get(key),
        keep_id=lambda text: ids.keep(key, text),
    )
