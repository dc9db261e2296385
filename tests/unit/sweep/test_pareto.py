"""What a sweep with several objectives shows: its front, in commands and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from samestep.cli import app
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.plots import plots_of
from samestep.sweep.reading import trials_of
from samestep.sweep.storage import Storage, best_words, front
from tests.unit.sweep.studies import begin_study

VALUES = [(0.9, 5.0), (0.8, 2.0), (0.8, 3.0), (0.7, 2.0), (0.9, 5.0)]


@pytest.fixture
def study(tmp_path: Path) -> LoadedSweep:
    """Trials 0, 1 and 4 are the front of more f1 and less time."""
    objective = [{"metric": "f1", "mode": "max"}, {"metric": "time"}]
    loaded = begin_study(tmp_path, objective=objective)
    storage = Storage(loaded.sweep, loaded.sweep.path)
    drawn = {"params.lr": 0.01, "params.kind": "plain", "params.depth": 2}
    for number, values in enumerate(VALUES):
        storage.begin({**drawn, "params.lr": 0.01 + number / 1000}, {})
        storage.complete(number, *values)
    storage.begin(drawn, {})
    storage.fail(len(VALUES), "no reason")
    storage.close()
    return loaded


def samestep(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    return done.output if done.exit_code == 0 else f"{done.exit_code}: {done.output}"


def test_no_trial_of_the_front_is_beaten(study: LoadedSweep) -> None:
    trials = trials_of(study)
    assert [trial.number for trial in front(study.sweep, trials)] == [0, 1, 4]
    assert best_words(study.sweep, trials) == "Pareto front: 0, 1, 4"
    assert front(study.sweep, []) == []


def test_commands_show_the_front_and_export_what_is_chosen(study: LoadedSweep) -> None:
    name = str(study.sweep.path)
    document = json.loads(samestep("sweep", "best", name, "--json"))
    assert document["metrics"] == ["f1", "time"]
    shown = [(trial["number"], trial["values"]) for trial in document["trials"]]
    assert shown == [(0, [0.9, 5.0]), (1, [0.8, 2.0]), (4, [0.9, 5.0])]
    states = [trial["state"] for trial in json.loads(samestep("show", name, "--json"))["trials"]]
    assert states == ["complete"] * 5 + ["failed"]
    assert "no single best trial" in samestep("sweep", "best", name, "--config")
    assert "is not complete: it is failed" in samestep("sweep", "best", name, "--config", "--trial", "5")
    text = samestep("sweep", "best", name, "--config", "--trial", "1")
    assert text.startswith("# Trial 1 of the sweep mine: f1 0.8, time 2.0\n")
    assert yaml.safe_load(text)["params"]["lr"] == 0.011


def test_the_front_is_drawn(study: LoadedSweep, tmp_path: Path) -> None:
    plots = plots_of(study)
    panel = plots.panels[0]
    assert (panel.title, panel.x, panel.y) == ("Pareto front", "f1", "time")
    line, others, marks = panel.lines
    assert list(zip(line.x, line.y, strict=True)) == [(0.8, 2.0), (0.9, 5.0), (0.9, 5.0)]
    assert (len(others.x), len(marks.x)) == (2, 3)
    plots.write_report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Pareto front: 0, 1, 4" in page
    assert "max f1 (best), min time (best)" in page
