"""A run asks after each evaluation whether to continue; all ranks get the answer at the same step."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.checkpoint.ownership import naming_errors
from samestep.checkpoint.questions import Answer, Question, read_answer, write_question
from samestep.distributed.health.activity import EVALUATE
from samestep.environment.variables import process_environment, wake_path
from samestep.train.evaluate import Values
from samestep.train.listeners import RunListener

if TYPE_CHECKING:
    from samestep.train.run import Run

_PAUSE = 0.01
_SECONDS_FOR_AN_ANSWER = 600.0
"""The process of a sweep answers at once. A job on another machine cannot see that it is gone, and would
hold its nodes for nothing."""


def _wake_sweep() -> None:
    """Tell the sweep's process, if it waits on this machine; else it finds the question by itself."""
    path = wake_path(process_environment())
    if path is not None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            waker.setblocking(False)
            waker.sendto(b".", path)


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
            write_question(self._folder, question)
        _wake_sweep()
        deadline = time.monotonic() + _SECONDS_FOR_AN_ANSWER
        while not self._run.is_stopping:
            self._run.context.activity.moved()  # it is the sweep that may take long
            answer = read_answer(self._folder)
            if answer is not None and answer.step == question.step:
                return answer
            if time.monotonic() > deadline:
                self._run.context.log.warn(
                    f"The sweep has not answered for {_SECONDS_FOR_AN_ANSWER:g} s: its process is gone. "
                    "This run saves and ends; samestep sweep resume continues it"
                )
                signal.raise_signal(signal.SIGTERM)
                deadline += _SECONDS_FOR_AN_ANSWER
            time.sleep(_PAUSE)
        return None
