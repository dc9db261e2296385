"""samestep tune lr as a person types it, in real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from samestep.config import load_config
from tests.cli.processes import samestep


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    assert samestep("init", "mine", cwd=tmp_path).returncode == 0
    return tmp_path / "mine" / "config.yaml"


def test_alone_it_shows_a_table_and_writes_a_layer(starter: Path, tmp_path: Path) -> None:
    before, page = starter.read_text(), tmp_path / "pages" / "lr.html"
    found = starter.with_name("found.yaml")
    options = ["--from", "1e-5", "--suggest", "steepest", "--write", found, "--report", page]
    done = samestep("tune", "lr", starter, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rate = load_config(found).params["lr"]
    assert rate != 0.01
    assert {**load_config(found).params, "lr": 0.01} == load_config(starter).params
    assert "it was 0.01" in found.read_text()
    assert starter.read_text() == before
    again = samestep("tune", "lr", starter, *options, cwd=tmp_path)
    assert (again.returncode, "exists already, and is kept" in again.stderr) == (2, True)
    assert re.search(rf"steepest .*│ {rate:.3g} ", done.stdout)
    assert "of 0.01 now" in done.stdout
    assert f"with params.lr: {rate:.3g}" in done.stdout
    assert page.is_file()
    written = json.loads((tmp_path / "runs" / "mine" / "tune-lr" / "tune-lr.json").read_text())["written"]
    assert written["value"] == rate
    assert not (tmp_path / "runs" / "mine" / "tune-lr" / "tune-lr.html").exists()


def test_losses_that_suggest_nothing_exit_8_and_write_nothing(starter: Path, tmp_path: Path) -> None:
    before = starter.read_bytes()
    done = samestep("tune", "lr", starter, "--to", "1e-6", "--steps", "20", "--write", "found.yaml", cwd=tmp_path)
    assert done.returncode == 8, done.stderr
    assert "No suggestion: the loss never fell" in done.stdout
    assert "Give a " in done.stdout
    assert starter.read_bytes() == before
    assert not (tmp_path / "found.yaml").exists()
    assert (tmp_path / "runs" / "mine" / "tune-lr" / "tune-lr.png").is_file()
