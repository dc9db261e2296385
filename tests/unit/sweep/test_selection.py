"""The fastest of the trials that are nearly as good as the best one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from samestep.cli import app
from samestep.errors import RunDirError
from samestep.parsing.plain_yaml import parse_yaml
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.plots import plots_of
from samestep.sweep.selection import Latency, Seconds, prefer_faster
from samestep.sweep.storage import Storage
from tests.unit.sweep.studies import begin_study

VALUES = [0.90, 1.0, 0.99, 0.985]
SPEEDS = [4000, 100, 200, 400]


def study_of(folder: Path, values: list[float], **changes: Any) -> LoadedSweep:
    loaded = begin_study(folder, **changes)
    storage = Storage(loaded.sweep, loaded.sweep.path)
    for number, value in enumerate(values):
        drawn = {"params.lr": 0.01, "params.kind": "plain", "params.depth": 1 + number % 3}
        storage.begin(drawn, {})
        storage.complete(number, value)
    storage.close()
    return loaded


def write_times(loaded: LoadedSweep, number: int, *speeds: float, fold: str = "") -> None:
    run = loaded.sweep.path / "trials" / f"trial-{number:04d}" / fold
    run.mkdir(parents=True)
    rows = [{"step": at, "samples_per_second": speed} for at, speed in enumerate(speeds)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def timed(tmp_path: Path) -> LoadedSweep:
    loaded = study_of(tmp_path, VALUES)
    for number, speed in enumerate(SPEEDS):
        # The first steps of a run are slow: the median is what counts.
        write_times(loaded, number, 1, speed, speed)
    return loaded


@pytest.mark.parametrize(("margin", "chosen"), [(0.0, 1), (0.0101, 2), (0.015, 3), (0.05, 3), (0.1, 0)])
def test_the_fastest_within_the_margin_is_taken(timed: LoadedSweep, margin: float, chosen: int) -> None:
    choice = prefer_faster(timed, margin)
    assert (choice.trial.number, choice.best.number) == (chosen, 1)
    assert choice.cost == 1 / SPEEDS[chosen]


def test_less_can_be_better(tmp_path: Path) -> None:
    loaded = study_of(tmp_path, [1.2, 1.0, 1.01], objective={"metric": "val_loss"})
    for number, speed in enumerate((900, 100, 200)):
        write_times(loaded, number, speed)
    assert prefer_faster(loaded, 0.015).trial.number == 2


def test_the_time_of_folds_is_their_mean(tmp_path: Path) -> None:
    loaded = study_of(tmp_path, [1.0, 1.0], folds={"k": 2})
    for number, speeds in enumerate([(100, 100), (50, 1000)]):
        for fold, speed in enumerate(speeds):
            write_times(loaded, number, speed, fold=f"fold-{fold}")
    choice = prefer_faster(loaded, 0.0)
    assert choice.trial.number == 0
    assert choice.cost == pytest.approx(0.01)


def test_without_times_of_all_the_smallest_model_is_the_fastest(tmp_path: Path) -> None:
    loaded = study_of(tmp_path, VALUES)
    with pytest.raises(RunDirError, match="how fast the trials 1, 2, 3 are"):
        prefer_faster(loaded, 0.015)
    write_times(loaded, 1, 1000)
    for number, size in ((1, 8), (2, 2), (3, 4)):
        run = loaded.sweep.path / "trials" / f"trial-{number:04d}"
        run.mkdir(exist_ok=True, parents=True)
        weights = {"w": np.zeros((size, 3), np.float32), "b": np.zeros(1, np.float32)}
        save_file(weights, run / "model.safetensors")
    choice = prefer_faster(loaded, 0.015)
    assert (choice.trial.number, choice.measure, choice.cost) == (2, "parameters", 7)
    assert choice.best_cost == 25


def measured(monkeypatch: pytest.MonkeyPatch, **rounds: list[float]) -> None:
    """In place of a measurement: the rounds of each trial in milliseconds."""

    def measure(runs: Mapping[int, Path], batch: int) -> dict[int, Latency]:
        found = {n: Seconds.of([ms / 1e3 for ms in rounds[f"trial_{n}"]]) for n in runs}
        return {n: Latency(one, one, batch) for n, one in found.items()}

    monkeypatch.setattr("samestep.sweep.selection.measure_latencies", measure)


def test_latency_counts_before_times_of_training(timed: LoadedSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, trial_1=[8, 9, 10], trial_2=[1, 2, 3], trial_3=[4, 5, 6])
    choice = prefer_faster(timed, 0.015)
    assert (choice.trial.number, choice.measure) == (2, "seconds for one sample")
    assert (choice.cost, choice.best_cost) == (0.002, 0.009)
    told = choice.as_json()
    assert [entry["number"] for entry in told["candidates"]] == [1, 2, 3]
    assert told["candidates"][1]["one_sample"] == {"median": 0.002, "low": 0.0015, "high": 0.0025}
    assert "not_measured" not in told
    header, rows = choice.figures("f1")
    assert rows[1] == ("2", "0.99", "2 ms (1.5 to 2.5)", "2 ms (1.5 to 2.5) for 8")
    assert len(header) == len(rows[0])


def test_what_the_spread_cannot_tell_apart_is_equally_fast(timed: LoadedSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, trial_1=[8, 9, 10], trial_2=[3, 5, 9], trial_3=[3, 4, 6])
    assert prefer_faster(timed, 0.015).trial.number == 2, "the better of the two fast ones"


def test_commands_say_what_was_preferred_to_what(timed: LoadedSweep) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["sweep", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    folder, option = str(timed.sweep.path), ["--prefer-faster-within", "0.015"]
    words = "trial 3 is within 0.015 of the best, f1 1 (trial 1), and has the fewest: 0.0025 seconds per sample in training, where that has 0.01"
    shown = run("best", folder, *option)
    assert words in shown
    assert "latency was not measured: trial 1: " in shown
    found = json.loads(run("best", folder, *option, "--json"))
    assert found["number"] == 3
    assert found["choice"]["best"] == {"number": 1, "value": 1.0, "cost": 0.01}
    assert "trial 1: " in found["choice"]["not_measured"]
    assert "choice" not in json.loads(run("best", folder, "--json"))
    exported = run("best", folder, *option, "--config")
    assert exported.splitlines()[1] == f"# {words}"
    assert parse_yaml(exported)["params"]["depth"] == 1
    assert parse_yaml(run("best", folder, "--config"))["params"]["depth"] == 2
    wrong = CliRunner().invoke(app, ["sweep", "best", folder, "--prefer-faster-within", "2"])
    assert wrong.exit_code == 2


def test_the_pareto_front_has_no_trial_that_is_slower_and_worse(timed: LoadedSweep) -> None:
    panel = next(panel for panel in plots_of(timed).panels if panel.title == "Value and time")
    assert panel.lines[0].x == [0.25, 2.5, 5.0, 10.0]
    assert panel.lines[0].y == [0.90, 0.985, 0.99, 1.0]
