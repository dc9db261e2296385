"""A sweep's plots, from studies that were written without their runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.report.chart import Panel
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.plots import importances, plots_of
from samestep.sweep.reading import best_trial, trials_of
from samestep.sweep.storage import Storage
from tests.unit.sweep.studies import BAD, begin_study, data_of, finish_study
from tests.variations import variations


@pytest.fixture
def study(tmp_path: Path) -> LoadedSweep:
    loaded = begin_study(tmp_path, folds={"k": 2})
    finish_study(loaded)
    return loaded


def panels_by_title(loaded: LoadedSweep) -> dict[str, Panel]:
    return {panel.title: panel for panel in plots_of(loaded).panels}


def plot(*words: Any) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plot", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_every_kind_of_plot_is_there_and_shows_every_trial(study: LoadedSweep) -> None:
    panels = panels_by_title(study)
    assert list(panels) == [
        "History", "Learning curves", "Parallel coordinates",
        "Importance of each key, by Optuna's estimate", "Spread over folds", "Slice: params.lr",
        "Slice: params.kind", "Slice: params.depth",
    ]  # fmt: skip
    trials = trials_of(study)
    history = {line.name: line for line in panels["History"].lines}
    assert list(history["failed"].x) == [5]
    assert history["pruned"].y == [trials[3].value]
    assert history["complete"].y == [t.value for t in trials if t.state == "complete"]
    values = [value for value in history["best so far"].y if value is not None]
    assert values == sorted(values)
    assert values[-1] == best_trial(study).value == history["best"].y[0]
    assert len(panels["Learning curves"].lines) == 2 * len(trials)
    spread = next(line for line in panels["Spread over folds"].lines if line.name == "folds")
    assert len(spread.x) == 2 * len(history["complete"].x)


def test_parallel_coordinates_are_places_in_the_space(study: LoadedSweep) -> None:
    panel = panels_by_title(study)["Parallel coordinates"]
    assert panel.xlabels == ["params.lr", "params.kind", "params.depth", "f1"]
    trials = {f"trial {trial.number}": trial for trial in trials_of(study)}
    assert len(panel.lines) == 8, "those that were measured"
    for line in panel.lines:
        _, kind, depth, _ = line.y
        values = trials[line.name].values
        assert kind == [BAD, "plain"].index(values["params.kind"])
        assert depth == (values["params.depth"] - 1) / 2
        assert all(place is not None and 0 <= place <= 1 for place in line.y)
    assert panel.lines[-1].name == f"trial {best_trial(study).number}", "on top of the others"


def test_the_key_that_decides_is_the_most_important_one(study: LoadedSweep) -> None:
    found, why = importances(study.sweep, trials_of(study))
    assert why is None
    assert next(iter(found)) == "params.lr"
    assert sum(found.values()) == pytest.approx(1.0)
    few, why = importances(study.sweep, trials_of(study)[:3])
    assert (few, why) == ({}, "importance needs 4 complete trials, and there are 3")


def test_a_page_is_self_contained_and_texts_stay_texts(study: LoadedSweep, tmp_path: Path) -> None:
    code, out, _ = plot(study.sweep.path, "--report", tmp_path / "new" / "page.html")
    assert code == 0
    assert out == f"Page: {tmp_path / 'new' / 'page.html'}\n"
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert BAD not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not [word for word in ("src=", "href=", "@import", "url(h") if word in page]
    slices = next(panel for panel in data_of(page) if panel["title"] == "Slice: params.kind")
    assert slices["xlabels"][1] == "plain"
    assert "10 trials: 7 complete, 1 pruned, 1 failed, 1 running; best: " in page


@pytest.mark.parametrize(("name", "begins"), variations([("c.png", b"\x89PNG"), ("c.svg", b"<?xml")], kept=["c.png"]))
def test_a_picture_has_all_panels(study: LoadedSweep, tmp_path: Path, name: str, begins: bytes) -> None:
    code, out, _ = plot(study.sweep.path, "--picture", tmp_path / name)
    assert (code, out) == (0, f"Plot: {tmp_path / name}\n")
    assert (tmp_path / name).read_bytes().startswith(begins)
    again, _, told = plot(study.sweep.path, "--picture", tmp_path / name)
    assert again == 2
    assert "--force" in told


def test_without_matplotlib_there_is_the_page_and_what_installs_it(
    study: LoadedSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = tmp_path / "page.html"
    code, _, told = plot(study.sweep.path, "--picture", tmp_path / "c.png", "--report", page)
    assert code == 2
    assert "matplotlib" in told
    assert page.is_file()


def test_a_sweep_without_a_finished_trial_can_be_drawn(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path)
    code, out, told = plot(loaded.sweep.path)
    assert (code, out) == (0, f"Page: {loaded.sweep.path / 'plots.html'}\n")
    assert "importance needs 4 complete trials, and there are 0" in told
    finish_study(loaded, 1)
    assert list(panels_by_title(loaded)) == ["History", "Learning curves"]
    assert plot(loaded.sweep.path, "--picture", tmp_path / "c.png")[0] == 0
    assert plot("nowhere")[0] == 2


def test_a_trial_of_another_program_is_not_in_the_space(study: LoadedSweep) -> None:
    storage = Storage(study.sweep, study.sweep.path)
    storage._study.enqueue_trial({"params.lr": 0.05})
    storage._study.ask()
    storage.complete(10, 7.0)
    storage.close()
    panels = panels_by_title(study)
    assert len(panels["Parallel coordinates"].lines) == 8
    assert 7.0 in next(line for line in panels["History"].lines if line.name == "best").y
