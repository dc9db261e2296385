"""A study of many runs in W&B and MLflow: one run for all of it, under which they show the others.

Only for those that the config names, and only they are imported. What the runs need to know comes
as overrides, so that a run which is resumed by itself stays where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from samestep.config.trackers import MlflowConfig, TrackersConfig, WandbConfig, public_params
from samestep.environment.variables import withdraw
from samestep.errors import TextError
from samestep.parsing.json_text import parse_json
from samestep.sweep.run_spec import override
from samestep.tracking.contract import TRACKER_IDS, TrackedRun, Tracker, TrackerIds
from samestep.tracking.mlflow_run import MlflowRun
from samestep.tracking.wandb_run import WandbRun

_WRITTEN = "written"
"""Beside the trackers' ids: which rows they have."""

Report = Callable[[str], None]


class TrackedStudy:
    """The trackers' runs of one study.

    A tracker that fails is one line of the report, and gets nothing more.
    """

    def __init__(
        self, name: str, kind: Literal["sweep", "cv"], trackers: TrackersConfig, folder: Path, report: Report
    ) -> None:
        self._name, self._tags, self._folder, self._report = name, trackers.tags, folder, report
        self._ids = TrackerIds(folder / TRACKER_IDS)
        self._wandb, self._mlflow = trackers.wandb, trackers.mlflow
        self._trackers: dict[str, Tracker] = {}
        if self._wandb is not None:
            self._trackers["wandb"] = WandbRun(_grouped(self._wandb, name, kind))
        if self._mlflow is not None:
            self._trackers["mlflow"] = MlflowRun(_in_one_experiment(self._mlflow, name))

    @contextmanager
    def started(self, params: Mapping[str, Any]) -> Iterator[None]:
        """Begin the study's run, or continue it; the next process continues it again."""
        shown = public_params(params)

        def start(key: str, tracker: Tracker) -> None:
            known, keep = self._ids.get(key), partial(self._ids.keep, key)
            tracker.start(TrackedRun(self._name, self._folder, shown, self._tags, 0, known, keep))

        self._each(start)
        # By which the runs would use the server of this process, and lose it when this is killed.
        withdraw(["WANDB_SERVICE"] if self._wandb is not None else [])
        try:
            yield
        finally:
            self._each(lambda key, tracker: tracker.close())

    def overrides(self, kind: Literal["trial", "fold"], name: str | None = None) -> tuple[str, ...]:
        """Return what a run of the study is started with, so that the trackers show it there."""
        found = []
        if self._wandb is not None:
            chosen = _grouped(self._wandb, self._name, kind)
            found += [
                override(f"trackers.wandb.{key}", getattr(chosen, key)) for key in ("project", "group", "job_type")
            ]
        if self._mlflow is not None:
            experiment = _in_one_experiment(self._mlflow, self._name).experiment
            found.append(override("trackers.mlflow.experiment", experiment))
            if (parent := self._ids.get("mlflow")) is not None:
                found.append(override("trackers.mlflow.parent", parent))
        if found and name is not None:
            found.append(override("name", name))
        return tuple(found)

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Write the result of a trial or a fold; once, also after a resume."""
        if not self._trackers or number in (written := self._written()):
            return
        self._each(lambda key, tracker: _write(tracker, {"step": number, **row}))
        self._ids.keep(_WRITTEN, json.dumps([*written, number]))

    def _written(self) -> list[Any]:
        try:
            found = parse_json(self._ids.get(_WRITTEN) or "[]")
        except TextError:
            return []
        return found if isinstance(found, list) else []

    def _each(self, call: Callable[[str, Tracker], None]) -> None:
        for key, tracker in list(self._trackers.items()):
            try:
                call(key, tracker)
            except Exception as error:  # whatever a library or a network makes of it
                del self._trackers[key]
                first = (str(error).strip() or "no message").splitlines()[0]
                self._report(
                    f"trackers.{key} failed and gets nothing more of this study: "
                    f"{type(error).__name__}: {first}. Its runs continue"
                )


def _write(tracker: Tracker, row: dict[str, Any]) -> None:
    tracker.write(row)
    tracker.flush()


def _grouped(config: WandbConfig, name: str, kind: str) -> WandbConfig:
    """W&B has no runs in runs: it shows those of a group together."""
    given = {"project": config.project or name, "group": config.group or name, "job_type": kind}
    return config.model_copy(update=given)


def _in_one_experiment(config: MlflowConfig, name: str) -> MlflowConfig:
    """Name one experiment for all runs; by its own name each would be in another."""
    return config.model_copy(update={"experiment": config.experiment or name})
