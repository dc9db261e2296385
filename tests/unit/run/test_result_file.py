"""What a run leaves about its end, whatever kind of end that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.checkpoint.run_result import RunResult, read_result
from samestep.errors import CheckpointError, Stopped
from samestep.run import result_file
from tests.unit.train.own_loops import Noisy, prepared, settings, squares, train, train_part


def result_of(run: Path) -> RunResult:
    found = read_result(run)
    assert found is not None
    return found


def test_a_finished_run_says_what_it_came_to(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    with samestep.start(config) as run:

        def measure(step: Any) -> None:
            if step.index in (1, 3):
                run.record_metrics({"val_loss": 5.0 - step.index, "f1": 0.5}, best=step.index == 1)

        train(run, each=measure)
    found = result_of(tmp_path / "run")
    assert (found.status, found.reason, found.steps, found.world) == ("finished", None, 6, 1)
    assert found.is_done
    assert found.metrics == {"val_loss": 2.0, "f1": 0.5}
    assert found.best is not None
    assert found.best["step"] == 2
    assert found.best["metrics"] == {"val_loss": 4.0, "f1": 0.5}
    assert found.checkpoints.keys() == {"last", "best"}
    assert all((tmp_path / "run" / path).is_dir() for path in found.checkpoints.values())
    assert found.loss is not None
    assert found.seconds > 0


def test_a_stopped_run_is_not_done_until_it_is_resumed(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    with pytest.raises(Stopped):
        train_part(config, 4)
    half = result_of(tmp_path / "run")
    assert (half.status, half.steps, half.is_done) == ("preempted", 4, False)
    with samestep.start(config) as run:
        train(run)
    whole = result_of(tmp_path / "run")
    assert (whole.status, whole.steps, whole.is_done) == ("finished", 6, True)
    assert whole.seconds >= half.seconds


def test_early_stopping_is_an_end_with_its_reason(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path / "run")) as run:
        train(run, each=lambda step: run.stop("enough") if step.index == 2 else None)
    found = result_of(tmp_path / "run")
    assert (found.status, found.reason, found.steps) == ("stopped_early", "enough", 3)


@pytest.mark.parametrize("by_epochs", [False, True])
def test_a_loop_that_leaves_its_steps_has_ended_the_run(tmp_path: Path, by_epochs: bool) -> None:
    def loop(run: samestep.Run) -> int:
        model, _ = prepared(run)
        for _ in run.epochs() if by_epochs else range(1):
            for step in run.steps(Noisy()):
                step.train(squares(model))
                if step.index == 1:
                    break
            else:
                continue
            break
        return run.start_step

    with samestep.start(settings(tmp_path / "run")) as run:
        loop(run)
    found = result_of(tmp_path / "run")
    assert (found.status, found.reason, found.steps) == ("stopped_early", "its own loop", 2)
    assert found.checkpoints["last"] == "checkpoints/step-00000002"
    with samestep.start(settings(tmp_path / "run")) as run:
        assert loop(run) == 2
    assert result_of(tmp_path / "run") == found


def test_a_loop_that_leaves_a_step_before_its_update_is_not_done(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path / "run")) as run:
        prepared(run)
        for _ in run.steps(Noisy()):
            break
    assert result_of(tmp_path / "run").status == "unfinished"


def test_while_it_trains_the_file_says_so(tmp_path: Path) -> None:
    seen = []
    with samestep.start(settings(tmp_path / "run")) as run:
        train(run, each=lambda step: seen.append(result_of(tmp_path / "run").status))
    assert set(seen) == {"running"}


@pytest.mark.parametrize("at", [None, 2])
def test_an_error_is_the_reason(tmp_path: Path, at: int | None) -> None:
    def fail(step: Any = None) -> None:
        if step is None or step.index == at:
            raise ValueError("mine")

    def run_it() -> None:
        with samestep.start(settings(tmp_path / "run")) as run:
            if at is None:
                fail()
            train(run, each=fail)

    with pytest.raises(ValueError, match="mine"):
        run_it()
    found = result_of(tmp_path / "run")
    assert (found.status, found.reason) == ("failed", "ValueError: mine")
    assert found.steps == (at or 0)


def test_a_refused_start_leaves_the_earlier_runs_result(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path / "run")) as run:
        train(run)
    before = (tmp_path / "run" / "result.json").read_text()
    with pytest.raises(CheckpointError), samestep.start(settings(tmp_path / "run", seed=4)):
        pass
    assert (tmp_path / "run" / "result.json").read_text() == before


def test_a_complete_run_that_is_started_again_keeps_its_result(tmp_path: Path) -> None:
    for _ in range(2):
        with samestep.start(settings(tmp_path / "run")) as run:
            train(run)
    found = result_of(tmp_path / "run")
    assert (found.status, found.steps) == ("finished", 6)
    assert found.loss is not None


def test_a_file_that_cannot_be_written_does_not_hide_the_runs_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(run: Path, result: RunResult) -> None:
        if result.status != "running":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_file, "write_result", full)
    with pytest.raises(ValueError, match="mine"), samestep.start(settings(tmp_path / "run")):
        raise ValueError("mine")
    assert "result.json could not be written" in caplog.text


DONE = RunResult("finished").as_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**DONE, "steps": "six"}), "is not what a run writes"),
        (json.dumps({**DONE, "status": "great"}), "status: Input should be 'running'"),
        (json.dumps({**DONE, "more": 1}), "is not what a run writes"),
        ('{"status": "fin', "is not valid JSON"),
    ],
)
def test_a_changed_or_truncated_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_result(tmp_path)
    assert read_result(tmp_path / "nothing") is None
