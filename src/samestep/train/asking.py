"""A run asks after each evaluation whether to continue; all ranks get the answer at the same step.

By two files, which are replaced as a whole: the run's question, and the answer of the sweep that
started it. They need no port, work wherever a run's directory does, and are still there after a crash.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.files import Files, partial_of
from samestep.checkpoint.ownership import naming_errors
from samestep.distributed.health.activity import EVALUATE
from samestep.errors import CheckpointError, TextError
from samestep.foreign.files import is_file
from samestep.foreign.json_text import read_json
from samestep.train.evaluate import Values
from samestep.train.listeners import RunListener

if TYPE_CHECKING:
    from samestep.train.run import Run

_QUESTION, _ANSWER = "asked.json", "answer.json"
_PAUSE = 0.01


@dataclass(frozen=True)
class Question:
    """The value of `best.metric` after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Answer:
    """Whether the run that asked after this step is to end with it."""

    step: int
    stop: bool
    reason: str = ""


def read_question(folder: Path) -> Question | None:
    """What the run of this directory has asked last."""
    document = _read(folder / _QUESTION)
    return None if document is None else Question(int(document["step"]), float(document["value"]))


def write_answer(folder: Path, answer: Answer) -> None:
    """Answer what the run has asked."""
    _write(folder / _ANSWER, asdict(answer))


def read_answer(folder: Path) -> Answer | None:
    """The last answer that was given."""
    document = _read(folder / _ANSWER)
    if document is None:
        return None
    return Answer(int(document["step"]), bool(document["stop"]), str(document["reason"]))


class Asking(RunListener):
    """Follows a run, and asks after each evaluation of `best.metric`."""

    draws = False

    def __init__(self, run: Run, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._metric = run.config.best.metric

    def on_evaluation(self, step: int, values: Values) -> None:
        value = values.get(self._metric)
        if not isinstance(value, (int, float)):
            return  # an evaluation of other weights; without the metric in any, the run itself refuses
        run = self._run
        with run.context.activity.during(EVALUATE):
            answer = self._ask(Question(step, float(value))) if run.is_main else None
            answer = run.context.broadcast(answer)
        if answer is not None and answer.stop:
            run.context.log.main(f"Ends with step {step + 1}: {answer.reason}")
            run.stop(answer.reason)

    def _ask(self, question: Question) -> Answer | None:
        """None if a signal stops the run first: the sweep decides before it resumes the run."""
        with naming_errors(self._folder):
            _write(self._folder / _QUESTION, asdict(question))
        while not self._run.is_stopping:
            answer = read_answer(self._folder)
            if answer is not None and answer.step == question.step:
                return answer
            time.sleep(_PAUSE)
        return None


def _write(path: Path, document: dict[str, Any]) -> None:
    partial = partial_of(path)
    partial.write_text(json.dumps(document), encoding="utf-8")
    Files().replace(partial, path)


def _read(path: Path) -> dict[str, Any] | None:
    if not is_file(path):
        return None
    try:
        document = read_json(path)
    except TextError as error:
        raise CheckpointError(f"{path} {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not what a run of a sweep writes")
    return document
