"""A study in the real W&B and MLflow: one run for all of it, one for each of its runs, also after a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from samestep.config import load_config
from samestep.config.trackers import TrackersConfig
from samestep.sweep.tracked_study import TrackedStudy
from tests.distributed.wandb_file import history, records
from tests.ranks import run_ranks


def _sweep_twice(trackers: dict[str, Any], folder: str) -> list[str]:
    """Two starts of a study of three trials, whose second one is resumed; returns what was reported.

    In a process of its own: the libraries leave threads behind.
    """
    from samestep.environment.variables import process_environment

    home, lines = Path(folder), list[str]()
    section = TrackersConfig(**trackers)
    for trials in ([0, 1], [1, 2]):
        study = TrackedStudy("mine", "sweep", section, home, lines.append)
        with study.started({"sampler": "tpe", "api_key": "hush"}):
            assert "WANDB_SERVICE" not in process_environment()
            study.write(0, {"state": "complete", "val_loss": 0.5})
            for trial in trials:
                study.write(trial, {"state": "complete", "val_loss": 0.5 + trial})
        for trial in trials:  # now: W&B has one run at a time in a process
            _run(home / f"trial-{trial}", trackers, study.overrides("trial", f"mine-{trial}"))
    return lines


def _run(folder: Path, trackers: dict[str, Any], overrides: Sequence[str]) -> None:
    """What a trial's run does with its trackers."""
    from samestep.tracking.trackers import open_trackers

    folder.mkdir(exist_ok=True)
    config = load_config({"global_batch": 8, "epochs": 1, "trackers": trackers}, overrides)
    opened = open_trackers(config, folder, is_main=True)
    opened.write({"step": 1, "loss": 2.0})
    opened.close()


def test_one_parent_and_a_child_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    pytest.importorskip("sqlalchemy", reason="needs the extra mlflow")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trackers = {"mlflow": {"uri": uri}, "wandb": {"mode": "offline"}}
    (lines,) = run_ranks(_sweep_twice, 1, trackers, str(tmp_path))
    assert lines == []
    ids = json.loads((tmp_path / "tracker-ids.json").read_text())

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name != "Default"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert (experiment.name, sorted(runs)) == ("mine", ["mine", "mine-0", "mine-1", "mine-2"])
    parent = runs.pop("mine")
    assert (parent.info.run_id, parent.info.status) == (ids["mlflow"], "FINISHED")
    assert parent.data.params == {"sampler": "tpe", "api_key": "..."}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {ids["mlflow"]}
    values = [(m.step, m.value) for m in client.get_metric_history(ids["mlflow"], "val_loss")]
    assert sorted(values) == [(0, 0.5), (1, 1.5), (2, 2.5)]

    files = list(tmp_path.rglob("offline-run-*/*.wandb"))
    shown = set()
    for file in files:
        run = next(r.run for r in records(file) if r.WhichOneof("record_type") == "run")
        shown.add((run.run_id, run.project, run.run_group, run.job_type))
    assert len(files) == 2 + 4, "one for each start"
    assert sorted(kind for _, _, _, kind in shown) == ["sweep", "trial", "trial", "trial"]
    assert {entry[1:3] for entry in shown} == {("mine", "mine")}
    of_parent = [file for file in files if file.stem == f"run-{ids['wandb']}"]
    rows = [row for file in of_parent for row in history(file)]
    assert sorted(row["step"] for row in rows) == [0, 1, 2]


def test_a_tracker_that_cannot_begin_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    section = TrackersConfig(mlflow={"uri": str(tmp_path), "experiment": "e"})  # type: ignore[arg-type]
    lines = list[str]()
    study = TrackedStudy("mine", "cv", section, tmp_path, lines.append)
    with study.started({}):
        study.write(0, {"val_loss": 1.0})
    assert len(lines) == 1
    assert lines[0].startswith("trackers.mlflow failed and gets nothing more of this study:")
    assert study.overrides("fold") == ('trackers.mlflow.experiment="e"',)


def test_no_tracker_is_imported_that_the_config_does_not_name() -> None:
    code = "import sys; from samestep.sweep import coordinator; print({'torch', 'mlflow', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
