"""How a task's validation set is measured: by the config's `evaluation.mode`."""

from __future__ import annotations

from functools import partial
from typing import Any

from samestep.errors import TaskError
from samestep.train.evaluate import Values
from samestep.train.metrics import make_metrics, mergers_of
from samestep.train.run import Run
from samestep.train.task import Task


class TaskEvaluation:
    """Evaluates a task's model. What cannot be measured is refused here, and not after an epoch."""

    def __init__(self, run: Run, task: Task, train_data: Any, valid_data: Any) -> None:
        """Args:
        run: The run, with the task's model prepared.
        task: The task.
        train_data: What its `train_data` returned.
        valid_data: What its `valid_data` returned.
        """
        self._run, self._task, self._valid_data = run, task, valid_data
        self._references: Any | None = None
        mode = run.config.evaluation.mode
        if mode == "retrieval":
            self._references = reference_set(
                task, run.config.evaluation.reference, train_data, valid_data
            )
        elif mode == "gather":
            if type(task).evaluate_whole is Task.evaluate_whole:
                raise TaskError(
                    f"evaluation.mode is gather: {type(task).__name__} must define "
                    "evaluate_whole(self, outputs)"
                )
        else:
            mergers_of(make_metrics(task.metrics, run.setup.rng, run.start_step))

    def measure(self, step: int, prefix: str = "") -> Values:
        """The values of the validation set, by name.

        Args:
            step: The step after which this is measured.
            prefix: Put before every name.
        """
        run, task, rule = self._run, self._task, self._run.config.evaluation
        if rule.mode == "retrieval":
            return run.retrieval(
                self._valid_data, self._references, partial(task.eval_embed, run.model), task.labels,
                rule.retrieval_metrics, rule.views, rule.distance, task.collate, step, prefix,
            )  # fmt: skip
        if rule.mode == "gather":
            return run.evaluate_whole(
                self._valid_data, task.eval_outputs, task.evaluate_whole, task.collate, step, prefix
            )
        metrics = make_metrics(task.metrics, run.setup.rng, step)
        return run.evaluate(self._valid_data, task.evaluate, metrics, task.collate, step, prefix)


def reference_set(task: Task, name: str, train_data: Any, valid_data: Any) -> Any | None:
    """Where neighbours are sought; None for the validation set itself.

    Args:
        task: The task.
        name: The config's `evaluation.reference`.
        train_data: What its `train_data` returned.
        valid_data: What its `valid_data` returned.

    Raises:
        TaskError: if the task has no embeddings, or does not know the name.
    """
    if not task.has_embeddings:
        raise TaskError(
            f"evaluation.mode is retrieval, and {type(task).__name__} has no embeddings: define "
            "eval_embed(self, model, batch)"
        )
    given = task.reference_data(name)
    if given is None:
        given = {"train": train_data, "valid": valid_data}[name]
    return None if given is valid_data else given
