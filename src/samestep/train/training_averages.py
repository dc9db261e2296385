"""A training's EMA and SWA, as configured: kept with the run, measured, and finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from samestep.data.batch import Source
from samestep.evaluation.evaluate import Values
from samestep.optim.weight_average import Ema, Swa, WeightAverage
from samestep.run.run import Run
from samestep.step.step import Step
from samestep.tracking.listeners import RunListener


class TrainingAverages(RunListener):
    """A training's EMA and SWA; nothing of either where the config has no section for it."""

    draws = reads_weights = False

    def __init__(self, run: Run, optimizers: Sequence[Optimizer], source: Source, total: int | None) -> None:
        config, epoch = run.config, source.steps_per_epoch
        self._log = run.context.log
        self._ema = self._swa = None
        if config.ema is not None:
            self._ema = Ema(run.model, config.ema, epoch, run.context.collectives, settle=run.sync_update)
        if config.swa is not None:
            self._swa = Swa(run.model, config.swa, optimizers, total, epoch)
        named: dict[str, WeightAverage | None] = {"ema": self._ema, "swa": self._swa}
        self._averages = {name: average for name, average in named.items() if average is not None}
        for name, average in self._averages.items():
            run.register(name, average)
        run.add_listener(self)

    def after_update(self, step: Step) -> None:
        for average in self._averages.values():
            average.update()

    def end_step(self, step: Step) -> None:
        """After everything else that moves weights and rates in this step."""
        if self._swa is not None:
            self._swa.hold_rate()
            if step.ends_epoch:
                self._swa.end_epoch()

    def measure(self, measure: Callable[[str], Values]) -> Values:
        """Return an evaluation of the moving average; empty if there is none."""
        if self._ema is None:
            return {}
        with self._ema.swapped():
            return measure("ema_")

    def finish(self, measure_batchnorm: Callable[[], bool], measure: Callable[[str], Values]) -> Values:
        """Give the mean its own BatchNorm statistics after the run's last step, and measure it."""
        if self._swa is None:
            return {}
        if not self._swa.updates:
            self._log.warn("swa averaged nothing: the run ended before it took any weights")
            return {}
        with self._swa.swapped():
            if measure_batchnorm():
                self._swa.take_statistics()
            return measure("swa_")

    def weights(self) -> dict[str, Tensor]:
        """Return all averaged weights, as `ema.NAME` and `swa.NAME`; the same on every rank."""
        return {
            f"{kind}.{name}": tensor
            for kind, average in self._averages.items()
            if average is self._ema or average.updates
            for name, tensor in average.weights().items()
        }
