"""Two tasks: the training of a model, and the decomposition of the trained one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from decomposed import DecomposedModel, LossSettings, Seen, warm_up
from experiments import experiment_of, next_word_loss
from losses import LOSSES, annealed, output_error
from measures import Means, OfTheWeights, identity_error
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import Generated, LaneBatch, RunContext, Task
from samestep.errors import TaskError

MASKS = {
    "importance": "importance", "unmasked": "ones", "stochastic": "stochastic", "random": "random",
    "rounded": "rounded", "zero": "zeros",
}  # fmt: skip
"""Under which masks an evaluation measures the output, as they are called there."""
_VALID_SEED = 2**40
"""Of the validation inputs: the same in every run."""


class ExperimentTask(Task):
    """What both trainings of an experiment share: its data."""

    def __init__(self, experiment: str, sizes: Mapping[str, Any], valid_samples: int) -> None:
        self._experiment = experiment_of(experiment, sizes)
        self._valid_samples = valid_samples

    def prepare_ranks(self, context: RunContext) -> None:
        """The same kernels on every rank: for products this small, mkldnn took three times as long."""
        torch.backends.mkldnn.set_flags(False)

    def train_data(self) -> Generated:
        return Generated(lambda generator, size: (self._experiment.draw(generator, size),))

    def valid_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(_VALID_SEED)
        return TensorDataset(self._experiment.draw(generator, self._valid_samples))


class Target(ExperimentTask):
    """Trains a model that is to be decomposed, and writes its weights to `files/target.pt`."""

    def __init__(self, experiment: str, sizes: Mapping[str, Any] | None = None, valid_samples: int = 4096) -> None:
        super().__init__(experiment, sizes or {}, valid_samples)

    def model(self) -> nn.Module:
        self._model = self._experiment.network()
        return self._model

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, float]:
        return self._experiment.target_loss(model, batch.x)

    def on_end(self, folder: Path) -> None:
        torch.save(self._model.state_dict(), folder / "target.pt")


class Decomposition(ExperimentTask):
    """Decomposes a frozen model into rank-one components."""

    def __init__(
        self,
        experiment: str,
        target: str,
        components: Mapping[str, int],
        losses: Mapping[str, float],
        sizes: Mapping[str, Any] | None = None,
        importance: str = "mlp",
        hidden: int = 16,
        tied: Sequence[Sequence[str]] = (),
        delta: bool = True,
        power: float = 1.0,
        final_power: float | None = None,
        beta: float = 0.0,
        final_shares: Mapping[str, float] | None = None,
        alive: float = 0.0,
        warm_up_steps: int = 200,
        warm_up_lr: float = 0.01,
        warm_up_decay: float = 0.1,
        valid_samples: int = 4096,
    ) -> None:
        """Args:
        experiment: tms, residual_mlp or language.
        target: the file with the frozen model's weights, relative to the working directory.
        components: how many, by patterns of layers' names.
        losses: the config's, as ${loss_weights}.
        sizes: of the experiment's model and data.
        importance: mlp, vector_mlp or shared_mlp.
        hidden: the width of the importance functions' networks.
        tied: pairs of layers; the second has the components of the first, transposed.
        delta: whether what the components leave over is masked, too.
        power: of the minimality loss, at the beginning.
        final_power: at the end; the same if None.
        beta: how much more a component costs that many positions use.
        final_shares: what is left of a loss's weight at the end, by name; from 1 to there on a line.
        alive: an importance above this counts for L0.
        warm_up_steps: in which the components are fitted to the weights before the first step.
        warm_up_lr: the rate of that.
        warm_up_decay: its weight decay.
        valid_samples: how many are evaluated on.
        """
        super().__init__(experiment, sizes or {}, valid_samples)
        if wrong := [name for name in losses if name not in LOSSES]:
            raise TaskError(f"loss_weights has {', '.join(wrong)}: give some of {', '.join(LOSSES)}")
        self._final_shares = dict(final_shares or {})
        if wrong := [name for name in self._final_shares if name not in losses]:
            raise TaskError(f"params.final_shares has {', '.join(wrong)}: loss_weights does not")
        self._target, self._losses = Path(target), tuple(losses)
        self._choices: dict[str, Any] = {
            "counts": components, "importance": importance, "hidden": hidden, "tied": tied, "delta": delta,
        }  # fmt: skip
        self._powers = (power, power if final_power is None else final_power)
        self._beta, self._alive = beta, alive
        self._warm_up = (warm_up_steps, warm_up_lr, warm_up_decay)

    def prepare_data(self) -> None:
        if not self._target.is_file():
            raise TaskError(
                f"params.target is {self._target}, and there is no such file: train the target first, or name its "
                "weights"
            )

    def model(self) -> DecomposedModel:
        """Return the frozen model with components that nearly add up to it already, the same on every rank."""
        self.prepare_data()
        network = self._experiment.network()
        try:
            network.load_state_dict(torch.load(self._target, map_location="cpu", weights_only=True))
        except (RuntimeError, UnpicklingError, EOFError) as error:
            raise TaskError(
                f"params.target: {self._target} does not hold the weights of this experiment: {error}"
            ) from None
        model = DecomposedModel(network, error=self._experiment.error, **self._choices)
        warm_up(model, *self._warm_up)
        return model

    def loss(self, model: nn.Module, batch: LaneBatch) -> dict[str, tuple[Tensor, float]]:
        power = annealed(*self._powers, batch.progress)
        found: dict[str, tuple[Tensor, float]] = model(
            batch.x, LossSettings(self._losses, power, self._beta, batch.lanes)
        )
        for name, share in self._final_shares.items():
            loss, count = found[name]
            found[name] = loss * annealed(1.0, share, batch.progress), count
        return found

    def metrics(self) -> dict[str, Any]:
        """`l0/LAYER`, `mse/MASK` (or `kl/MASK` and `ce/MASK`), `identity_error/LAYER`."""
        kinds = ("mse",) if self._experiment.error == "mse" else ("kl", "ce")
        found: dict[str, Any] = {"l0": Means(), **{kind: Means() for kind in kinds}}
        if self._experiment.probes() is not None:
            found["identity_error"] = OfTheWeights()
        return found

    def evaluate(
        self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]
    ) -> dict[str, tuple[Tensor, float]]:
        inner: DecomposedModel = getattr(model, "module", model)
        x = batch.x
        seen = inner.see(x)
        for name, needed in seen.lower.items():
            metrics["l0"].update(name, (needed > self._alive).sum(), seen.positions)
        for name, kind in MASKS.items():
            output = inner.masked(x, inner.masks(kind, seen.lower))
            self._measure(name, output, seen, x, metrics)
        if "ce" in metrics:
            metrics["ce"].update("target", *next_word_loss(seen.output, x))
        if "identity_error" in metrics and not metrics["identity_error"].values:
            metrics["identity_error"].update(self._identity_errors(inner, x.device))
        return self.loss(model, batch)

    def _measure(self, name: str, output: Tensor, seen: Seen, x: Tensor, metrics: Mapping[str, Any]) -> None:
        error = output_error(self._experiment.error, output, seen.output)
        if self._experiment.error == "mse":
            metrics["mse"].update(name, error, output.numel())
            return
        metrics["kl"].update(name, error, seen.positions)
        metrics["ce"].update(name, *next_word_loss(output, x))

    def probed(self, model: DecomposedModel, device: torch.device) -> dict[str, Tensor]:
        """Of each layer the importances with one feature at a time, (features, components)."""
        probes = self._experiment.probes()
        if probes is None:
            return {}
        with torch.no_grad():
            return {name: one.cpu() for name, one in model.see(probes.to(device)).lower.items()}

    def _identity_errors(self, model: DecomposedModel, device: torch.device) -> dict[str, float]:
        return {
            name: float(identity_error(one))
            for name, one in self.probed(model, device).items()
            if one.shape[0] <= one.shape[1]
        }
