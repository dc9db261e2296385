"""The trackers that a config names, each guarded; also users' own."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.config.trackers import TrackerClassConfig, public_params
from samestep.errors import ConfigError, Mistake
from samestep.parsing.files import is_file
from samestep.parsing.python_file import import_file
from samestep.tracking.contract import TRACKER_IDS, TrackedRun, Tracker, TrackerIds
from samestep.tracking.csv_table import CsvTable
from samestep.tracking.guard import GuardedTracker
from samestep.tracking.mlflow_run import MlflowRun
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


def make_tracker(config: Config, number: int) -> Tracker:
    """Return the tracker that `trackers.classes` names at a place, made with its arguments.

    What the user's own code raises while it is imported or made is not wrapped.
    """
    entry = config.trackers.classes[number]
    path = f"trackers.classes.{number}"
    found = _find(config, entry, path)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise _mistake(path, f"{entry.name} is not a subclass of samestep.Tracker")
    try:
        inspect.signature(found).bind(**entry.args)
    except TypeError as error:
        raise _mistake(path, f"{entry.name} does not take its args: {error}") from None
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _mistake(path, f"{entry.name} must define {missing}")
    return found(**entry.args)


def _find(config: Config, entry: TrackerClassConfig, path: str) -> Any:
    home, _, name = entry.name.rpartition(":")
    if entry.is_file:
        file = (config.folder / home).resolve()
        if not is_file(file):
            raise _mistake(path, f"there is no file {file}: its path is relative to the config")
        module = import_file(file, path, again=False)
    else:
        if not _is_there(home):
            raise _mistake(path, f"there is no module {home}: install it, or write FILE.py:{name} for a file")
        module = importlib.import_module(home)
    if not hasattr(module, name):
        raise _mistake(path, f"{home} has no class {name}")
    return getattr(module, name)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of its package; of a name that is none
        return False


def _mistake(path: str, message: str) -> ConfigError:
    return ConfigError("the config", [Mistake(f"{path}.name", message)])
