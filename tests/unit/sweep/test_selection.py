"""The fastest of the trials that are nearly as good as the best one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.errors import TaskError
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


def measured(monkeypatch: pytest.MonkeyPatch, **rounds: list[float]) -> None:
    """In place of a measurement: the rounds of each trial in milliseconds."""

    def measure(runs: Mapping[int, Path], batch: int) -> dict[int, Latency]:
        found = {n: Seconds.of([ms / 1e3 for ms in rounds[f"trial_{n}"]]) for n in runs}
        return {n: Latency(one, one, batch) for n, one in found.items()}

    monkeypatch.setattr("samestep.sweep.selection.measure_latencies", measure)


ROUNDS = {f"trial_{number}": [1000 / speed] * 3 for number, speed in enumerate(SPEEDS)}


@pytest.mark.parametrize(("margin", "chosen"), [(0.0, 1), (0.0101, 2), (0.015, 3), (0.05, 3), (0.1, 0)])
def test_the_fastest_within_the_margin_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, margin: float, chosen: int
) -> None:
    measured(monkeypatch, **ROUNDS)
    choice = prefer_faster(study_of(tmp_path, VALUES), margin)
    assert (choice.trial.number, choice.best.number) == (chosen, 1)
    assert choice.cost(choice.trial) == pytest.approx(1 / SPEEDS[chosen])


def test_less_can_be_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, trial_0=[1.0] * 3, trial_1=[9.0] * 3, trial_2=[4.0] * 3)
    loaded = study_of(tmp_path, [1.2, 1.0, 1.01], objective={"metric": "val_loss"})
    assert prefer_faster(loaded, 0.015).trial.number == 2


def test_what_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"cannot measure the models: trial 1: .*checkpoint.* Leave out the option"):
        prefer_faster(study_of(tmp_path, VALUES), 0.015)


def test_every_candidate_is_shown_with_its_latency(timed: LoadedSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, trial_1=[8, 9, 10], trial_2=[1, 2, 3], trial_3=[4, 5, 6])
    choice = prefer_faster(timed, 0.015)
    assert choice.trial.number == 2
    assert (choice.cost(choice.trial), choice.cost(choice.best)) == (0.002, 0.009)
    told = choice.as_json()
    assert [entry["number"] for entry in told["candidates"]] == [1, 2, 3]
    assert told["candidates"][1]["one_sample"] == {"median": 0.002, "low": 0.0015, "high": 0.0025}
    header, rows = choice.figures("f1")
    assert rows[1] == ("2", "0.99", "2 ms (1.5 to 2.5)", "2 ms (1.5 to 2.5) for 8")
    assert len(header) == len(rows[0])


def test_what_the_spread_cannot_tell_apart_is_equally_fast(timed: LoadedSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, trial_1=[8, 9, 10], trial_2=[3, 5, 9], trial_3=[3, 4, 6])
    assert prefer_faster(timed, 0.015).trial.number == 2, "the better of the two fast ones"


def test_commands_say_what_was_preferred_to_what(timed: LoadedSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, **ROUNDS)

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["sweep", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    folder, option = str(timed.sweep.path), ["--prefer-faster-within", "0.015"]
    words = (
        "trial 3 is within 0.015 of the best, f1 1 (trial 1), and is the fastest: "
        "2.5 ms (2.5 to 2.5) for one sample, where that takes 10 ms (10 to 10)"
    )
    shown = run("best", folder, *option)
    assert words in shown
    assert "2.5 ms (2.5 to 2.5) for 8" in shown
    found = json.loads(run("best", folder, *option, "--json"))
    assert found["number"] == 3
    assert found["choice"]["best"] == {"number": 1, "value": 1.0, "cost": 0.01}
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


def test_the_time_of_folds_is_their_mean(tmp_path: Path) -> None:
    loaded = study_of(tmp_path, [1.0, 1.0], folds={"k": 2})
    for number, speeds in enumerate([(100, 100), (50, 1000)]):
        for fold, speed in enumerate(speeds):
            write_times(loaded, number, speed, fold=f"fold-{fold}")
    panel = next(panel for panel in plots_of(loaded).panels if panel.title == "Value and time")
    assert panel.lines[0].x[0] == pytest.approx(10.0), "of trial 0; those of trial 1 take 10.5 ms"
