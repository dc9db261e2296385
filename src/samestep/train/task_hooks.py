"""The optional methods of a task: what it does as a run goes, and with its trained model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from samestep.data.batch import LaneBatch
from samestep.errors import TaskError
from samestep.step.step import Step
from samestep.tracking.listeners import RunListener

if TYPE_CHECKING:
    from samestep.run.run import Run


class RunHooks:
    """Hooks of a task while its run goes: they do nothing, unless overridden."""

    def after_update(self, step: Step) -> None:
        """Called after every update that changed the weights, the same on every rank.

        The place for what follows the weights, such as a momentum teacher: a change of parameters in
        `loss` would happen once for every lane.

        Args:
            step: The step; `step.index` counts from 0.

        Example:
            def after_update(self, step):
                with torch.no_grad():
                    for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                        slow.lerp_(fast, 0.01)
        """

    def listeners(self, run: Run) -> Sequence[RunListener]:
        """Return what follows the run, such as `samestep.callbacks`. Called once, before the first step.

        Args:
            run: The run; its model is there when the first listener is called.
        """
        return ()

    def on_save(self, folder: Path) -> None:
        """Write files of your own when the run is saved, on rank 0 alone.

        Args:
            folder: `files` in the run's directory, the same each time.
        """

    def on_end(self, folder: Path) -> None:
        """Write files of your own when the training is complete, on rank 0 alone.

        Args:
            folder: `files` in the run's directory.

        Example:
            def on_end(self, folder):
                self.encoder.save_pretrained(folder / "encoder")
        """


class TrainedUses:
    """Uses of a task's trained model, by `samestep predict` and `samestep export`."""

    def model_inputs(self, batch: LaneBatch, method: str = "forward") -> Any:
        """Return what the model is called with for a batch: a tensor, or a tuple of them.

        Args:
            batch: One lane's samples.
            method: The model's method; `samestep export` may keep others than `forward`.
        """
        return batch.x if isinstance(batch.data, (tuple, list)) else batch.data

    def export_model(self, model: nn.Module) -> nn.Module:
        """Return what `samestep export` writes: the model, or a wrapper that also normalises.

        Args:
            model: The trained model.
        """
        return model

    def predict_data(self, source: str) -> Any:
        """Return the dataset for `samestep predict RUN DATA`, unless DATA is `valid` or `train`.

        Args:
            source: DATA, as it was given.
        """
        raise TaskError(
            f"{type(self).__name__} does not know the data {source!r}: define "
            "predict_data(self, source), or give valid or train"
        )

    def predict(self, model: nn.Module, batch: LaneBatch) -> Any:
        """Return the predictions for a batch: a tensor, or columns by name, with one entry per sample.

        Args:
            model: The trained model, in evaluation mode.
            batch: One lane's samples.
        """
        inputs = self.model_inputs(batch)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
