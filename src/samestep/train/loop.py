"""Our loop, written on the same steps as anybody's: validation, schedule, saving, early stopping."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from samestep.checkpoint.ownership import reraise_os_errors
from samestep.data.generated import Generated
from samestep.errors import PeerLost, TaskError
from samestep.evaluation.evaluate import Values
from samestep.evaluation.metrics import console_text, refuse_double
from samestep.run.run import Run
from samestep.step.step import Step
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener
from samestep.tracking.progress import TrainingProgress
from samestep.train.best_so_far import BestSoFar
from samestep.train.task import Task, stepper
from samestep.train.task_evaluation import TaskEvaluation
from samestep.train.task_optim import choose_optimizers, choose_schedules
from samestep.train.training_averages import TrainingAverages


@dataclass
class Outcome:
    """The progress of a training, and how it ended."""

    best: BestSoFar
    steps: int = 0
    loss: float | None = None
    metrics: Values = field(default_factory=dict)
    stopped: str = "done"

    def state_dict(self) -> dict[str, Any]:
        best = {"value": self.best.value, "step": self.best.step, "waited": self.best.waited}
        return {"steps": self.steps, "metrics": self.metrics, "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.metrics = state["steps"], state["metrics"]
        for name, value in state["best"].items():
            setattr(self.best, name, value)


class Training(RunListener):
    """A task's training on a run."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run, self._task = run, task
        self.draws = self.reads_weights = type(task).after_update is not Task.after_update
        run.once_per_node(task.prepare_data)
        run.on_all_ranks(task.prepare_ranks)
        self._train_data = task.train_data()
        valid_data = task.valid_data()
        rule = run.config.evaluation
        self._evaluates = valid_data is not None and bool(rule.every_epochs or rule.every_steps)
        with torch.device("meta") if task.meta_resume and run.start_step else nullcontext():
            model = task.model()
        modules = [model, *task.extra_modules()]
        self._optimizers = choose_optimizers(run, task, modules)
        self._add_listeners()
        self._order = task.order(self._train_data)
        # What a function draws are whole batches.
        self._collate = None if isinstance(self._train_data, Generated) else task.collate
        self._source = run.source(self._train_data, self._order, self._collate)
        self._total = run.total_steps(self._source)
        self._schedules = choose_schedules(run, task, self._optimizers, self._source, self._evaluates)
        per_step = [schedule for schedule in self._schedules if schedule.every == "step"]
        objects: list[Any] = [*modules, *self._optimizers, *per_step]
        self.model = run.prepare(*objects)[0]
        self._best = BestSoFar(run.config.best)
        self.outcome = Outcome(self._best)
        run.register("training", self.outcome)
        for every in ("epoch", "evaluation"):
            for number, schedule in enumerate(self._schedules_by(every)):
                run.register(f"{every} schedule {number}", schedule)
        run.add_listener(self)
        self.averages = TrainingAverages(run, self._optimizers, self._source, self._total)
        self._evaluation = None
        if valid_data is not None:
            self._evaluation = TaskEvaluation(run.setup, task, self._train_data, valid_data, run.start_step)

    def _add_listeners(self) -> None:
        """Before the data is opened: a listener may need the ids of its samples."""
        for listener in self._task.listeners(self._run):
            if not isinstance(listener, RunListener):
                raise TaskError(
                    f"{type(self._task).__name__}.listeners returned a {type(listener).__name__}: "
                    "return instances of subclasses of samestep.RunListener"
                )
            self._run.add_listener(listener)

    def train(self) -> Outcome:
        """Train to the end."""
        run = self._run
        progress = TrainingProgress(self._total, run.batch.global_batch, run.context.log, run.context.is_main)
        run.add_listener(progress)
        with progress:
            for _ in self.steps():
                pass
        if type(self._task).on_end is not Task.on_end:
            with run.reminded("on_end"):
                self._write_files(self._task.on_end)
        return self.outcome

    def steps(self) -> Generator[Step, None, None]:
        """Train step by step: each step is yielded when it is through.

        Draw there only from generators of your own: torch's own are at some lane's stream.
        """
        run = self._run
        run.survivors.why_not = self._why_survivors_lack_state()
        self.model.train()
        patience = run.config.early_stopping
        run_step = stepper(self._task, self.model)
        for step in run.steps(self._source, draws_between=False):
            try:
                run_step(step)
            except PeerLost as lost:
                # Here, where a launcher's signal to end does not end the process yet.
                run.survivors.save(lost)
                raise
            self.outcome.steps = step.index + 1
            if step.ends_epoch:
                run.sync_update()
                for schedule in self._schedules_by("epoch"):
                    schedule.step()
            self.averages.end_step(step)
            values = self._evaluate(step) if self._evaluation_is_due(step) else {}
            if patience is not None and self._best.waited >= patience.patience:
                self.outcome.stopped = f"no better {self._best.rule.metric} for {self._best.waited} evaluations"
                run.context.log.main(f"Stopping early: {self.outcome.stopped}")
                run.stop(self.outcome.stopped)
            if run.is_last_step(self._total):
                self._finish(step, values)
            yield step

    def _why_survivors_lack_state(self) -> str:
        """Return what one rank alone cannot save."""
        if type(self._task).on_save is not Task.on_save:
            return "the task's on_save writes files that belong to a checkpoint"
        if self._source.has_streams:
            return "a rank knows the positions of its own streams only"
        return ""

    def on_record(self, record: StepRecord) -> None:
        self.outcome.loss = record.loss

    def after_update(self, step: Step) -> None:
        self._task.after_update(step)

    def on_save(self, step: int, metrics: Mapping[str, Any]) -> None:
        if type(self._task).on_save is not Task.on_save:
            self._write_files(self._task.on_save)

    def _write_files(self, write: Callable[[Path], None]) -> None:
        """Let the task write files of its own, once for the run."""
        if self._run.context.is_main:
            folder = self._run.run_dir / "files"
            with reraise_os_errors(self._run.run_dir):
                folder.mkdir(exist_ok=True)
            write(folder)

    def _schedules_by(self, every: str) -> list[LRScheduler]:
        return [item.scheduler for item in self._schedules if item.every == every]

    def _evaluation_is_due(self, step: Step) -> bool:
        if not self._evaluates:
            return False
        rule = self._run.config.evaluation
        if rule.every_epochs and step.ends_epoch and (step.epoch + 1) % rule.every_epochs == 0:
            return True
        return bool(rule.every_steps and (step.index + 1) % rule.every_steps == 0)

    def _evaluate(self, step: Step) -> Values:
        values = self._measure(step)
        averaged = self.averages.measure(lambda prefix: self._measure(step, prefix))
        refuse_double(values, averaged)
        values |= averaged
        self.outcome.metrics = values
        self._report(step, values)
        is_best = self._best.offer(values, step.index)
        for schedule in self._schedules_by("evaluation"):
            schedule.step(values[self._best.rule.metric])  # type: ignore[arg-type]  # a plateau's
        self._run.record_metrics(values, best=is_best)
        return values

    def _measure(self, step: Step, prefix: str = "") -> Values:
        if self._evaluation is None:
            return {}
        return self._run.evaluate_by(self._evaluation.measure, step.index, prefix)

    def _report(self, step: Step, values: Values) -> None:
        self._run.log(step.index, {"epoch": step.epoch, **values})
        shown = console_text(values, self._best.rule.metric)
        self._run.context.log.main(f"epoch {step.epoch + 1}  step {step.index + 1}  {shown}")

    def _finish(self, step: Step, measured: Values) -> None:
        """Finish the averages with the run's last step, before it is saved."""
        task, run = self._task, self._run
        values = self.averages.finish(
            lambda: run.measure_batchnorm(self._train_data, task.forward_pass, self._order, self._collate),
            lambda prefix: self._measure(step, prefix),
        )
        if values:
            self._report(step, values)
            self.outcome.metrics = {**self.outcome.metrics, **values}
            run.record_metrics({**measured, **values})
