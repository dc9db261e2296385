"""The live table of a sweep, as a terminal gets it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from samestep.cli.live_sweep import LiveSweepTable, bar
from samestep.sweep.optuna_parts import draw
from samestep.sweep.reading import trials_of
from samestep.sweep.storage import Storage
from samestep.sweep.trial import LiveTrial
from tests.unit.sweep.studies import begin_study, finish_study


def test_a_table_has_those_that_are_over_and_those_that_run(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path, folds={"k": 4})
    finish_study(loaded)
    trials = trials_of(loaded)
    over = {trial.number: trial for trial in trials if trial.is_over}
    live = LiveTrial.of(trials[9])
    live.folds = [0.5]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, height=40)
    with LiveSweepTable(loaded, console) as table:
        table.line("trial 9: [bold]as it is[/bold]")
        table.show(over, {9: live}, 20)
        shown = screen.getvalue()
        table.show(over, {9: live}, 20)
        assert screen.getvalue() == shown, "nothing has changed"
        live.add(12, 0.25)
        table.show(over, {9: live}, 20)
    text = screen.getvalue()
    assert "[bold]as it is[/bold]" in text
    assert "RuntimeError: <script>" in text
    assert "█░░░ 1/4" in text
    assert f"{bar(9, 20)} 9 of 20 trials; best: " in text
    assert ", 3 evaluations, step 12" in text


def test_all_objectives_are_in_the_table(tmp_path: Path) -> None:
    objectives = [{"metric": "f1", "mode": "max"}, {"metric": "cost"}]
    loaded = begin_study(tmp_path, objective=objectives, sampler="nsga2")
    storage = Storage(loaded.sweep, loaded.sweep.path)
    for number, values in enumerate([(0.5, 12.25), (0.75, 24.5)]):
        storage.begin(*draw(loaded.sweep, number, {}))
        storage.complete(number, *values)
    storage.begin(*draw(loaded.sweep, 2, {}))
    trials = storage.trials()
    storage.close()
    running = LiveTrial.of(trials[2])
    running.add(3, 0.125)
    console = Console(file=io.StringIO(), width=160, height=40)
    over = {trial.number: trial for trial in trials[:2]}
    console.print(LiveSweepTable(loaded, console).table(over, {2: running}, 4, 0.0))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    for shown in ("f1", "cost", "12.25", "24.5", "0.125", "Pareto front: 0, 1"):
        assert shown in text


def test_many_trials_leave_room_for_those_that_run(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path)
    finish_study(loaded, 30)
    trials = trials_of(loaded)
    over = {trial.number: trial for trial in trials if trial.is_over}
    console = Console(file=io.StringIO(), force_terminal=True, width=160, height=20)
    group = LiveSweepTable(loaded, console).table(over, {29: LiveTrial.of(trials[29])}, 30, 0.0)
    console.print(group)
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    assert len(lines) < 20
    assert any("running" in line for line in lines)


@pytest.mark.parametrize(
    ("done", "total", "expected"), [(0, 4, "░░░░"), (1, 4, "█░░░"), (4, 4, "████"), (5, 4, "████")]
)
def test_a_bar(done: int, total: int, expected: str) -> None:
    assert bar(done, total, 4) == expected
