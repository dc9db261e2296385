"""A run that asks after each evaluation whether to continue."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.checkpoint.prune_decision import PruneDecision, read_decision, read_value, write_decision
from samestep.checkpoint.run_result import read_result
from samestep.errors import CheckpointError, Stopped
from samestep.train.pruning import PruningListener
from tests.unit.train.own_loops import settings, train


class Sweep(threading.Thread):
    """Answers each question, as the process of a sweep does."""

    def __init__(self, folder: Path, stop_at: int) -> None:
        super().__init__()
        self.folder, self.stop_at = folder, stop_at
        self.values: list[tuple[int, float]] = []
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            question, answer = read_value(self.folder), read_decision(self.folder)
            if question is None or (answer is not None and answer.step == question.step):
                continue
            self.values.append((question.step, question.value))
            stop = question.step == self.stop_at
            write_decision(self.folder, PruneDecision(question.step, stop, "pruned" if stop else ""))


def run_with(folder: Path, config: dict[str, Any], each: Any = lambda step: None) -> None:
    with samestep.start(config) as run:
        run.add_listener(PruningListener(run, folder))

        def evaluate(step: Any) -> None:
            # As run.evaluate tells all listeners; the second is of averaged weights.
            run._listeners.on_evaluation(step.index, {"val_loss": 1.0 / (step.index + 1)})
            run._listeners.on_evaluation(step.index, {"ema_val_loss": 9.0})
            each(step)

        train(run, each=evaluate)


def test_the_answer_ends_the_run_with_that_step(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, stop_at=2)
    sweep.start()
    try:
        run_with(tmp_path, settings(tmp_path / "run"))
    finally:
        sweep.over.set()
        sweep.join()
    assert sweep.values == [(0, 1.0), (1, 0.5), (2, 1.0 / 3)]
    result = read_result(tmp_path / "run")
    assert result is not None
    assert (result.status, result.reason, result.steps) == ("stopped_early", "pruned", 3)


def test_a_stop_signal_ends_the_wait_for_an_answer(tmp_path: Path) -> None:
    waiting = threading.Thread(target=_interrupt_when_asked, args=(tmp_path,))
    waiting.start()
    try:
        with pytest.raises(Stopped):
            run_with(tmp_path, settings(tmp_path / "run"))
    finally:
        waiting.join()
    question = read_value(tmp_path)
    assert question is not None
    assert read_decision(tmp_path) is None, "the sweep decides before it resumes the run"


def test_a_run_that_nobody_answers_saves_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.train.pruning._SECONDS_FOR_AN_ANSWER", 0.05)
    with pytest.raises(Stopped):
        run_with(tmp_path, settings(tmp_path / "run"))
    result = read_result(tmp_path / "run")
    assert result is not None
    assert result.status == "preempted"
    log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "The sweep has not answered for 0.05 s" in log


def _interrupt_when_asked(folder: Path) -> None:
    while read_value(folder) is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("text", ["[1]", '{"step": 1'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "value.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"value\.json"):
        read_value(tmp_path)
    (tmp_path / "value.json").write_text(json.dumps({"step": 3, "value": 0.5}))
    assert read_value(tmp_path) is not None
