"""`samestep average`, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from samestep.cli import app
from tests.cli.processes import samestep, write_config


def test_it_reports_what_it_averaged_and_what_is_wrong(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", epochs=3, run_dir="run")
    trained = samestep("train", config, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    made = samestep("average", "run", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    printed = json.loads(made.stdout)
    assert [row["step"] for row in printed["checkpoints"]] == [6, 9]
    assert printed["average"]["value"] == printed["average"]["metrics"]["val_loss"]
    assert (tmp_path / "run" / "average.safetensors").is_file()
    shown = samestep("average", "run", "--best", "1", "best.metric=f1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "their average" in shown.stdout
    assert "f1" in shown.stdout
    few = samestep("average", "run", "--last", "5", cwd=tmp_path)
    assert few.returncode == 2
    assert "Traceback" not in few.stderr
    assert "--last is 5, but run has" in few.stderr
    assert "checkpoint.keep_last=5" in few.stderr


def test_mistakes_are_reported_before_anything_is_read(tmp_path: Path) -> None:
    call = CliRunner().invoke
    nowhere = call(app, ["average", str(tmp_path)])
    assert nowhere.exit_code == 2
    assert "is not a run's directory" in nowhere.stderr
    (tmp_path / "config.json").write_text("{}")
    both = call(app, ["average", str(tmp_path), "--last", "2", "--best", "2"])
    assert both.exit_code == 2
    assert "keep one of them" in both.stderr
