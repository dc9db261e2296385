"""Listeners that many runs want; give them to `run.add_listener`, or return them from `Task.listeners`.

Early stopping is none of them: the key `early_stopping`, which `train.loop` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from samestep.errors import TaskError
from samestep.evaluation.eval_mode import evaluating
from samestep.step.step import Step
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener

if TYPE_CHECKING:
    from samestep.evaluation.evaluate import Values
    from samestep.run.run import Run


class FlopsUtilization(RunListener):
    """Writes `flops_per_second` of all ranks together, and `mfu`, the share of their peak.

    Once in `log_every` steps, by the mean time of the steps that were read together.

    Example:
        run.add_listener(samestep.callbacks.FlopsUtilization(run, 6 * params * tokens, 989e12))
    """

    draws = False

    def __init__(self, run: Run, flops_per_sample: float, peak_per_rank: float | None = None) -> None:
        """Args:
        run: The run.
        flops_per_sample: Of the forward and the backward pass.
        peak_per_rank: What a device can do in a second in the run's precision; without it there
            is no `mfu`.
        """
        for name, value in (("flops_per_sample", flops_per_sample), ("peak_per_rank", peak_per_rank)):
            if value is not None and not value > 0:
                raise TaskError(f"FlopsUtilization: {name} is {value}: give a number above 0")
        self._run = run
        self._per_step = flops_per_sample * run.batch.global_batch
        self._peak = None if peak_per_rank is None else peak_per_rank * run.context.world

    def on_record(self, record: StepRecord) -> None:
        if (record.step + 1) % self._run.config.log_every or record.seconds <= 0:
            return
        values = {"flops_per_second": self._per_step / record.seconds}
        if self._peak is not None:
            values["mfu"] = values["flops_per_second"] / self._peak
        self._run.log(record.step, values)


class GradientNorms(RunListener):
    """Writes the norm of every parameter's gradient, or of every module's, once in some steps.

    Of the global batch's gradients as the optimizer got them: summed, divided, clipped. Reading
    them waits for the device; `every` says how often.

    Example:
        run.add_listener(samestep.callbacks.GradientNorms(run, every=100, depth=1))
    """

    draws, reads_gradients = False, True

    def __init__(self, run: Run, every: int = 100, depth: int | None = None) -> None:
        """Args:
        run: The run.
        every: Steps between two measurements.
        depth: Parameters whose names have so many leading parts in common count as one; None
            for each by itself.
        """
        for name, value in (("every", every), ("depth", depth)):
            if value is not None and not value >= 1:
                raise TaskError(f"GradientNorms: {name} is {value}: give 1 or more")
        self._run, self._every, self._depth = run, every, depth

    def on_step(self, step: Step) -> None:
        if (step.index + 1) % self._every:
            return
        groups: dict[str, list[Tensor]] = {}
        for name, param in self._run.model.named_parameters():
            if param.grad is not None:
                groups.setdefault(".".join(name.split(".")[: self._depth]), []).append(param.grad)
        if not groups:
            return
        norms = torch.stack([torch.nn.utils.get_total_norm(grads) for grads in groups.values()])
        named = zip(groups, norms.tolist(), strict=True)
        self._run.log(step.index, {f"grad_norm/{name}": norm for name, norm in named})


class SamplePredictions(RunListener):
    """Writes what the model makes of the same few inputs after every evaluation.

    Every rank computes them, so that what the model draws at random sets none apart; they are
    written once.

    Example:
        run.add_listener(
            samestep.callbacks.SamplePredictions(run, lambda model: {"digits": model(x).argmax(1)})
        )
    """

    def __init__(self, run: Run, predict: Callable[[nn.Module], dict[str, Any]]) -> None:
        """Args:
        run: The run.
        predict: Gets the model in evaluation mode, without gradients; returns values by name as
            `run.log` takes them: numbers, texts, tensors, figures.
        """
        self._run, self._predict = run, predict
        self._last: int | None = None

    def on_evaluation(self, step: int, values: Values) -> None:
        if step == self._last:  # the averages are measured after the model, in the same step
            return
        self._last = step
        model = self._run.model
        with evaluating([model]), torch.no_grad():
            found = self._predict(model)
        self._run.log(step, found)
