"""Trackers of real runs: rank 0 alone, one tracked run also after a resume, and no harm to the training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import EACH_EPOCH, train
from tests.distributed.wandb_file import history, records
from tests.ranks import run_ranks
from tests.variations import variations

OWN = """
import json, os, random
import samestep
import torch

class Own(samestep.Tracker):
    '''Appends each of its calls to a file, one for all of its runs; fails at a step.'''

    def __init__(self, file, fails_at=None):
        self.file, self.fails_at = file, fails_at

    def note(self, call, **more):
        random.random(), torch.rand(3)
        with open(self.file, "a") as file:
            file.write(json.dumps({"call": call, "rank": os.environ.get("RANK", "0"), **more}) + "\\n")

    def start(self, run):
        self.note("start", id=run.id, step=run.start)
        run.keep_id(run.id or "the first")

    def write(self, row):
        if row["step"] == self.fails_at:
            raise ConnectionError("no network")
        if "loss" in row:
            self.note("loss", step=row["step"], loss=row["loss"])

    def log_file(self, path, name):
        self.note("file", name=name)

    def flush(self): ...

    def close(self):
        self.note("close")
"""


def own(folder: Path, **args: Any) -> tuple[dict[str, Any], Path]:
    code, calls = folder / "noting_tracker.py", folder / "calls.jsonl"
    code.write_text(OWN)
    args = {"file": str(calls), **args}
    entry = {"name": f"{code}:Own", "args": args}
    return {"classes": [entry], "artifacts": ["model.safetensors"]}, calls


def calls_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_own_tracker_follows_one_run_over_a_stop(tmp_path: Path) -> None:
    untouched = train(tmp_path, 1)
    trackers, path = own(tmp_path)
    run = tmp_path / "run"
    go_on(run, 2, at=2, rank=1, how="SIGTERM", trackers=trackers)
    assert "file" not in {call["call"] for call in calls_of(path)}, "a stop is not the end"
    ended = finish(run, 2, trackers=trackers)
    calls = calls_of(path)
    assert {call["rank"] for call in calls} == {"0"}
    starts = [(call["id"], call["step"]) for call in calls if call["call"] == "start"]
    assert starts == [(None, 0), ("the first", 3)]
    assert [call["loss"] for call in calls if call["call"] == "loss"] == untouched.record.losses
    assert [call["name"] for call in calls if call["call"] == "file"] == ["model.safetensors"]
    assert Counter(call["call"] for call in calls)["close"] == 2
    assert ended.record.state_hash == untouched.record.state_hash
    kept = json.loads((run / "config.json").read_text())["trackers"]["classes"][0]["name"]
    assert kept == trackers["classes"][0]["name"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_tracker_that_fails_changes_and_ends_nothing(world: int, tmp_path: Path) -> None:
    trackers, path = own(tmp_path, fails_at=2)
    failing = train(tmp_path, world, trackers=trackers)
    untouched = train(tmp_path, world)
    assert failing.record.losses == untouched.record.losses
    assert failing.record.state_hash == untouched.record.state_hash
    assert [call["step"] for call in calls_of(path) if call["call"] == "loss"] == [0, 1]
    log = (failing.folder / "logs" / "rank-0.log").read_text()
    assert log.count("gets nothing more of this run: ConnectionError: no network.") == 1


def test_a_new_run_in_the_directory_is_tracked_anew(tmp_path: Path) -> None:
    trackers, path = own(tmp_path)
    run = tmp_path / "run"
    for _ in range(2):
        finish(run, 1, trackers=trackers, resume={"checkpoint": "never"})
    assert [call["id"] for call in calls_of(path) if call["call"] == "start"] == [None, None]
    assert (run / "earlier" / "1" / "tracker-ids.json").is_file()


def _track_a_figure(trackers: dict[str, Any], folder: str) -> list[str]:
    """In a process of its own: the libraries leave threads behind. Returns the warnings."""
    from matplotlib.figure import Figure

    from samestep.config import load_config
    from samestep.tracking.trackers import open_trackers

    figure, warnings = Figure(), list[str]()
    figure.subplots().plot([1, 2])
    config = load_config({"global_batch": 8, "epochs": 1, "trackers": trackers})
    opened = open_trackers(config, Path(folder), is_main=True)
    opened.warn_with(warnings.append)
    opened.write({"step": 1, "curve": figure, "odd (name)%": 2.0, "text": "x"})
    opened.flush()
    opened.close()
    return warnings


@pytest.mark.parametrize("library", variations(["wandb", "mlflow"], kept=["wandb"]))
def test_libraries_take_figures_and_any_name(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library, reason=f"needs the extra {library}")
    pytest.importorskip("matplotlib", reason="makes a figure")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.chdir(tmp_path)
    settings = {"wandb": {"mode": "offline"}, "mlflow": {"uri": f"sqlite:///{tmp_path / 'm.db'}"}}
    (warnings,) = run_ranks(_track_a_figure, 1, {library: settings[library]}, str(tmp_path))
    assert warnings == []
    where = {"wandb": "wandb/offline-run-*/files/media/images/*.png", "mlflow": "mlruns/*/*/artifacts/images/*.png"}
    assert len(list(tmp_path.glob(where[library]))) == 1


def losses_by_step(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in sorted(rows, key=lambda row: row["step"]) if "loss" in row]


@pytest.mark.requirement("004-2.1-4")
def test_wandb_offline_is_one_run_over_a_stop(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    trackers = {
        "wandb": {"project": "tests", "mode": "offline"},
        "tags": {"team": "vision"},
        "artifacts": ["model.safetensors"],
    }
    run = tmp_path / "run"
    go_on(run, 2, at=2, rank=1, how="SIGTERM", trackers=trackers)
    ended = finish(run, 2, trackers=trackers)
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "one for each start, which wandb sync puts together by their id"
    assert {path.stem.removeprefix("run-") for path in files} == {
        json.loads((run / "tracker-ids.json").read_text())["wandb"]
    }
    rows = [row for path in files for row in history(path)]
    with (run / "metrics.jsonl").open() as file:
        written = [json.loads(line) for line in file]
    assert losses_by_step(rows) == losses_by_step(written)
    assert len(losses_by_step(rows)) == 6
    assert any("val_loss" in row for row in rows)
    first = next(r.run for r in records(files[0]) if r.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert (list(first.tags), config["global_batch"], config["same"]) == (["team=vision"], 32, "bits")
    assert ended.record.steps == 6
    assert "failed" not in (run / "logs" / "rank-0.log").read_text()


@pytest.mark.requirement("001-S6-4")
def test_mlflow_is_one_run_over_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    pytest.importorskip("sqlalchemy", reason="needs the extra mlflow")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trackers = {
        "mlflow": {"uri": uri, "experiment": "tests"},
        "tags": {"team": "vision"},
        "artifacts": ["model.safetensors", "checkpoints/*"],
    }
    run = tmp_path / "run"
    values = {"trackers": trackers, "evaluation": EACH_EPOCH}
    go_on(run, 2, at=2, rank=1, how="SIGTERM", **values)
    finish(run, 2, **values)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    (found,) = client.search_runs([experiment.experiment_id])
    number = found.info.run_id
    assert number == json.loads((run / "tracker-ids.json").read_text())["mlflow"]
    assert found.info.status == "FINISHED"
    assert found.data.tags["team"] == "vision"
    assert (found.data.params["global_batch"], found.data.params["same"]) == ("32", "bits")
    losses = sorted((m.step, m.value) for m in client.get_metric_history(number, "loss"))
    with (run / "metrics.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    assert losses == [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(client.get_metric_history(number, "val_loss")) == 2
    names = {entry.path for entry in client.list_artifacts(number)}
    assert names == {"model.safetensors", "checkpoints"}
    assert "failed" not in (run / "logs" / "rank-0.log").read_text()
