"""A run that reports to its sweep after each evaluation, and ends where the sweep prunes it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from samestep.checkpoint.ownership import reraise_os_errors
from samestep.checkpoint.prune_decision import IntermediateValue, PruneDecision, read_decision, write_value
from samestep.distributed.health.activity import EVALUATE
from samestep.evaluation.evaluate import Values
from samestep.run.run import Run
from samestep.tracking.listeners import RunListener

_PAUSE = 0.01
_SECONDS_FOR_AN_ANSWER = 600.0
"""The process of a sweep answers at once. A job on another machine cannot see that it is gone, and would
hold its nodes for nothing."""


class PruningListener(RunListener):
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
            answer = self._ask(IntermediateValue(step, float(value))) if run.is_main else None
            answer = run.context.broadcast(answer)
        if answer is not None and answer.stop:
            run.context.log.main(f"Ends with step {step + 1}: {answer.reason}")
            run.stop(answer.reason)

    def _ask(self, question: IntermediateValue) -> PruneDecision | None:
        """None if a signal stops the run first: the sweep decides before it resumes the run."""
        with reraise_os_errors(self._folder):
            write_value(self._folder, question)
        deadline = time.monotonic() + _SECONDS_FOR_AN_ANSWER
        while not self._run.is_stopping:
            self._run.context.activity.moved()  # it is the sweep that may take long
            answer = read_decision(self._folder)
            if answer is not None and answer.step == question.step:
                return answer
            if time.monotonic() > deadline:
                self._run.context.log.warn(
                    f"The sweep has not answered for {_SECONDS_FOR_AN_ANSWER:g} s: its process is gone. "
                    "This run saves and ends; samestep sweep run continues it"
                )
                signal.raise_signal(signal.SIGTERM)
                deadline += _SECONDS_FOR_AN_ANSWER
            time.sleep(_PAUSE)
        return None
