"""Measures a task's validation set, by the config's `evaluation.mode`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from samestep.data.batch import Moment
from samestep.errors import TaskError
from samestep.evaluation.eval_rows import RetrievalEvaluator, RetrievalRequest
from samestep.evaluation.evaluate import Values, evaluate, evaluate_gathered
from samestep.evaluation.metrics import make_metrics, mergers_of
from samestep.run_setup import RunSetup
from samestep.train.task import Task


class TaskEvaluation:
    """Evaluates a task's model. What cannot be measured is refused here, and not after an epoch."""

    def __init__(self, setup: RunSetup, task: Task, train_data: Any, valid_data: Any, step: int) -> None:
        self._setup, self._task, self._valid_data = setup, task, valid_data
        self._references: Any = None
        rule = setup.config.evaluation
        if rule.mode == "retrieval":
            self._request = RetrievalRequest(rule.retrieval_metrics, rule.views, rule.distance, rule.keep_in)
            self._references = self._reference_data(train_data)
        elif rule.mode == "gather":
            if type(task).evaluate_gathered is Task.evaluate_gathered:
                raise TaskError(
                    f"evaluation.mode is gather: {type(task).__name__} must define evaluate_gathered(self, outputs)"
                )
        else:
            mergers_of(make_metrics(task.metrics, setup.rng, step))

    def measure(self, modules: Sequence[nn.Module], moment: Moment) -> Values:
        """Return the values of the validation set, by name; the same on every rank."""
        setup, task, rule = self._setup, self._task, self._setup.config.evaluation
        if rule.mode == "retrieval":
            embed = partial(task.eval_embed, modules[0])
            found = RetrievalEvaluator(setup, modules, moment).run(
                self._valid_data, self._references, embed, task.labels, task.collate, self._request
            )
            return dict(found)
        if rule.mode == "gather":
            return evaluate_gathered(
                setup, modules, moment, self._valid_data, task.eval_outputs, task.evaluate_gathered, task.collate
            )
        metrics = make_metrics(task.metrics, setup.rng, moment.step)
        return evaluate(setup, modules, moment, self._valid_data, task.evaluate, metrics, task.collate)

    def _reference_data(self, train_data: Any) -> Any:
        """Return where neighbours are sought."""
        task, name = self._task, self._setup.config.evaluation.reference
        if not task.has_embeddings:
            raise TaskError(
                f"evaluation.mode is retrieval, and {type(task).__name__} has no embeddings: define "
                "eval_embed(self, model, batch)"
            )
        given, own = task.reference_data(name), {"train": train_data, "valid": self._valid_data}
        if given is None and name not in own:
            raise TaskError(
                f"{type(task).__name__}.reference_data({name!r}) returned None, which means train_data or "
                "valid_data by the names train and valid: return a dataset"
            )
        return own[name] if given is None else given
