"""samestep tune lr as a person types it, in real processes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from samestep.config import load_config
from tests.cli.processes import ROOT, samestep, torchrun


@pytest.fixture
def starter(tmp_path: Path) -> Path:
    assert samestep("init", "mine", cwd=tmp_path).returncode == 0
    return tmp_path / "mine" / "config.yaml"


@pytest.mark.variation(
    "test_the_curve_and_the_suggestions_are_the_same_on_any_number_of_ranks, and alone test_alone_it_shows_a_table_and_writes_a_layer"
)
def test_under_torchrun_it_writes_what_it_suggests(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes" / "digits", tmp_path / "digits")
    config, found = tmp_path / "digits" / "config.yaml", tmp_path / "digits" / "found.yaml"
    before = config.read_text()
    done = torchrun(
        "tune", "lr", config, "--from", "1e-6", "--steps", "60", "--json", "--write", found,
        "--suggest", "steepest", "distributed.threads_per_rank=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rate = printed["suggestions"]["steepest"]
    assert 1e-4 < rate < 0.5
    assert printed["written"]["value"] == rate
    assert config.read_text() == before
    assert load_config(found).params == {"lr": rate}
    folder = tmp_path / "runs" / "digits" / "tune-lr"
    assert json.loads((folder / "tune-lr.json").read_text()) == printed
    assert (folder / "tune-lr.png").read_bytes().startswith(b"\x89PNG")
    assert "2 ranks drive 4+4 lanes" in (folder / "logs" / "rank-1.log").read_text()
    assert sorted(p.name for p in folder.parent.iterdir()) == [".samestep-run", "tune-lr"]


def test_alone_it_shows_a_table_and_writes_a_layer(starter: Path, tmp_path: Path) -> None:
    before, page = starter.read_text(), tmp_path / "pages" / "lr.html"
    found = starter.with_name("found.yaml")
    options = ["--from", "1e-5", "--write", found, "--report", page]
    done = samestep("tune", "lr", starter, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rate = load_config(found).params["lr"]
    assert rate != 0.01
    assert {**load_config(found).params, "lr": 0.01} == load_config(starter).params
    assert "it was 0.01" in found.read_text()
    assert starter.read_text() == before
    again = samestep("tune", "lr", starter, *options, cwd=tmp_path)
    assert (again.returncode, "exists already, and is kept" in again.stderr) == (2, True)
    assert re.search(rf"valley .*│ {rate:.3g} ", done.stdout)
    assert "of 0.01 now" in done.stdout
    assert f"with params.lr: {rate:.3g}" in done.stdout
    assert page.is_file()
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


def test_a_mistake_is_reported_without_a_traceback(starter: Path, tmp_path: Path) -> None:
    done = samestep("tune", "lr", starter, "--from", "1", "--to", "0.1", cwd=tmp_path)
    assert done.returncode == 2
    assert "give a --from above 0 and a larger --to" in done.stderr
    assert "Traceback" not in done.stderr
