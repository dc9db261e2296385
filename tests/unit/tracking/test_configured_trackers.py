"""Trackers that a config names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.errors import ConfigError, MissingExtraError
from samestep.tracking.contract import TrackerIds
from samestep.tracking.trackers import open_trackers

OWN = """
import json, samestep

class Own(samestep.Tracker):
    def __init__(self, file):
        self.file = file
        self.rows = []
    def start(self, run):
        seen = {"id": run.id, "tags": run.tags, "params": run.params, "start": run.start}
        (run.folder / "seen.json").write_text(json.dumps(seen))
        self.path = run.folder / self.file
        run.keep_id(f"number {run.start}")
    def write(self, row):
        self.rows.append(row)
    def log_file(self, path, name):
        self.rows.append({"file": name, "size": path.stat().st_size})
    def flush(self): ...
    def close(self):
        self.path.write_text(json.dumps(self.rows))

class Half(samestep.Tracker):
    def flush(self): ...

class Other: ...
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_tracker_file.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_tracker_file", raising=False)


def config(folder: Path, **trackers: Any) -> Config:
    path = folder / "config.json"
    values = {"global_batch": 8, "epochs": 1, "trackers": trackers}
    path.write_text(json.dumps({**values, "params": {"api_key": "hush", "tokens": 5}}))
    return load_config(path)


def own(name: str = "own_tracker_file.py:Own", **args: Any) -> dict[str, Any]:
    return {"classes": [{"name": name, "args": args}]}


def test_a_class_of_the_user_gets_params_rows_files_and_its_id(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "model").write_text("abc")
    (run / "checkpoints" / "step-2.partial").mkdir()
    (run / "checkpoints" / "step-2.partial" / "model").write_text("half")
    found = config(tmp_path, **own(file="rows.json"), tags={"team": "vision"})
    for start, known in ((0, None), (4, "number 0")):
        trackers = open_trackers(found, run, is_main=True, start=start)
        trackers.write({"step": start, "loss": 1.0})
        trackers.log_files(run, ["checkpoints/*", "seen.json", "nothing"])
        trackers.close()
        seen = json.loads((run / "seen.json").read_text())
        assert (seen["id"], seen["start"], seen["tags"]) == (known, start, {"team": "vision"})
    assert seen["params"]["params.api_key"] == "..."
    assert seen["params"]["params.tokens"] == 5
    rows = json.loads((run / "rows.json").read_text())
    assert rows[0] == {"step": 4, "loss": 1.0}
    assert rows[1] == {"file": "checkpoints/step-1/model", "size": 3}
    assert [row["file"] for row in rows[2:]] == ["seen.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_tracker_file.py:Nothing", "has no class Nothing"),
        ("own_tracker_file.py:Other", "is not a subclass of samestep.Tracker"),
        ("own_tracker_file.py:Half", "must define write"),
        ("missing.py:Own", "there is no file"),
        ("no.such.module:Own", "there is no module no.such.module: install it"),
        ("json:JSONDecoder", "is not a subclass of samestep.Tracker"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        open_trackers(config(tmp_path, **own(name)), tmp_path, is_main=True)
    assert "trackers.classes.0.name" in str(found.value)


def test_arguments_that_it_does_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not take its args: .*'speed'"):
        open_trackers(config(tmp_path, **own(file="a", speed=1)), tmp_path, is_main=True)


def test_a_name_without_a_class_is_refused_when_the_config_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"module:Class or FILE\.py:Class"):
        config(tmp_path, **own("wandb"))


@pytest.mark.parametrize("pattern", ["/etc/passwd", "../other/*"])
def test_files_of_elsewhere_are_no_artifacts(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="leads elsewhere"):
        config(tmp_path, artifacts=[pattern])


def test_the_id_of_a_wandb_run_is_not_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="id is set by the run"):
        config(tmp_path, wandb={"args": {"id": "x"}})


@pytest.mark.parametrize("extra", ["wandb", "mlflow"])
def test_a_library_that_is_not_there_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(MissingExtraError, match=rf"trackers.{extra} needs .*\.\[{extra}\]"):
        open_trackers(config(tmp_path, **{extra: {}}), tmp_path, is_main=True)


def test_ids_survive_a_damaged_file(tmp_path: Path) -> None:
    ids = TrackerIds(tmp_path / "tracker-ids.json")
    ids.keep("wandb", "a")
    ids.keep("mlflow", "b")
    assert (ids.get("wandb"), ids.get("mlflow"), ids.get("x")) == ("a", "b", None)
    (tmp_path / "tracker-ids.json").write_text('{"wandb": 3')
    assert ids.get("wandb") is None
