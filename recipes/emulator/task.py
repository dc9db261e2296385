"""An emulator of sea ice: from the state of air, water and ice in a cell of a grid to area and volume of its ice."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fields import INPUTS, LEVELS, OUTPUTS
from jacobians import JacobianMetrics, JacobianStopping
from networks import Emulator
from patterns import Fields, PatternRows, Patterns
from torch import Tensor, nn

from samestep import LaneBatch, Order, Run, RunContext, RunListener, Task, orders
from samestep.checkpoint.torch_file import write_torch_file
from samestep.errors import TaskError

LOSSES = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


class SeaIce(Task):
    """Each lane trains on patterns of its own, so a rank reads and keeps only those of its lanes."""

    def __init__(
        self,
        global_batch: int,
        lanes: int,
        evaluation_batch: int,
        atmosphere: str = "data/atmosphere.nc",
        ocean: str = "data/ocean.nc",
        inputs: Sequence[str] = INPUTS,
        outputs: Sequence[str] = OUTPUTS,
        mask: str = "sea_ice",
        least_ice: float = 0.05,
        level: int = LEVELS - 1,
        valid_every: int = 5,
        thin: float = 1.0,
        hidden: int = 64,
        layers: int = 3,
        loss: str = "mse",
        jacobian_samples: int = 100,
        jacobian_stopping: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
        global_batch: the config's, by ${global_batch}.
        lanes: the config's, by ${lanes}.
        evaluation_batch: the config's, by ${evaluation.batch}.
        atmosphere: a NetCDF file, relative to the working directory, as run directories are.
        ocean: likewise.
        inputs: names of variables, in either file.
        outputs: likewise.
        mask: sea_ice, ocean, both, or none for files without ice.
        least_ice: the area fraction from which on there is ice.
        level: of the atmosphere, for fields that have levels.
        valid_every: of so many times, the last is only measured on.
        thin: the share of the cells that is kept.
        hidden: the width of the hidden layers.
        layers: how many there are.
        loss: mse, mae or huber, in scaled numbers.
        jacobian_samples: validation patterns whose Jacobians are measured; 0 for none.
        jacobian_stopping: tolerance, patience and least_evaluations; the run never ends by it if None.
        """
        if loss not in LOSSES:
            raise TaskError(f"params.loss is {loss!r}: give {', '.join(LOSSES)}")
        if jacobian_stopping is not None and not jacobian_samples:
            raise TaskError("params.jacobian_stopping needs Jacobians, and jacobian_samples is 0")
        self._fields = Fields(
            Path(atmosphere), Path(ocean), tuple(inputs), tuple(outputs), mask, least_ice, level, valid_every, thin
        )
        self._batch, self._lanes, self._evaluation_batch = global_batch, lanes, evaluation_batch
        self._sizes = {"hidden": hidden, "layers": layers}
        self._loss = loss
        self._jacobian_samples, self._stopping = jacobian_samples, jacobian_stopping
        self._looked: Patterns | None = None
        self._data: PatternRows | None = None

    def prepare_data(self) -> None:
        self._fields.refuse_missing()

    def prepare_ranks(self, context: RunContext) -> None:
        """Look at the data together, each rank at a share."""
        self._looked = Patterns.look(self._fields, context)

    @property
    def patterns(self) -> Patterns:
        """What is known of the data; where ranks have not looked together, the same is found here."""
        if self._looked is None:
            self._looked = Patterns.look(self._fields)
        return self._looked

    def model(self) -> Emulator:
        """Its scales are those of the training patterns; of a trained one, those of its checkpoint."""
        fields = self._fields
        levels = {name: fields.level if fields.variable(name).has_levels else 0 for name in fields.columns}
        meta = {
            "mask": fields.mask,
            "loss": self._loss,
            "input_units": ";".join(fields.variable(name).units for name in fields.inputs),
            "output_units": ";".join(fields.variable(name).units for name in fields.outputs),
            "input_standard_names": ";".join(fields.variable(n).standard_name for n in fields.inputs),
            "output_standard_names": ";".join(fields.variable(n).standard_name for n in fields.outputs),
        }
        model = Emulator(
            {name: levels[name] for name in fields.inputs},
            {name: levels[name] for name in fields.outputs},
            meta,
            **self._sizes,
        )
        if self._looked is not None:
            mean, std = self._looked.moments.scale()
            split = len(fields.inputs)
            model.input_mean.copy_(mean[:split])
            model.input_std.copy_(std[:split])
            model.output_mean.copy_(mean[split:])
            model.output_std.copy_(std[split:])
        return model

    def train_data(self) -> PatternRows:
        rows = self.patterns.rows(valid=False)
        parts = [orders.lane_part(rows, self._lanes, lane) for lane in range(self._lanes)]
        self._data = self.patterns.dataset(valid=False, pieces=parts)
        return self._data

    def order(self, dataset: Any) -> Order:
        return orders.by_lane(len(dataset), self._batch, self._lanes)

    def valid_data(self) -> PatternRows:
        rows, size = self.patterns.rows(valid=True), self._evaluation_batch
        pieces = [range(at, min(at + size, rows)) for at in range(0, rows, size)]
        return self.patterns.dataset(valid=True, pieces=pieces)

    def collate(self, samples: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Inputs and outputs, in the units of the files."""
        rows = torch.stack(samples)
        split = len(self._fields.inputs)
        return rows[:, :split].contiguous(), rows[:, split:].contiguous()

    def model_inputs(self, batch: LaneBatch, method: str = "forward") -> Tensor:
        """`forward` and `jac` take scaled numbers, and two methods outputs."""
        if method in ("normalize_output", "denormalize_output"):
            found: Tensor = batch.y
            return found
        x: Tensor = batch.x
        if method in ("forward", "jac"):
            mean, std = self.patterns.moments.scale()
            split = len(self._fields.inputs)
            return (x - mean[:split].to(x.device)) / std[:split].to(x.device)
        return x

    def predict(self, model: nn.Module, batch: LaneBatch) -> dict[str, Tensor]:
        """Return a column for each output, in the units of the files."""
        found = _inner(model).predict(batch.x)
        return dict(zip(self._fields.outputs, found.unbind(1), strict=True))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        """Of all outputs, scaled: neither their units nor their number decide which one counts."""
        inner = _inner(model)
        predicted = model(inner.normalize_input(batch.x))
        wanted = inner.normalize_output(batch.y)
        return LOSSES[self._loss](predicted, wanted, reduction="sum"), wanted.numel()

    def metrics(self) -> dict[str, Any]:
        errors = {f"rmse_{name}": RootMeanSquare() for name in self._fields.outputs}
        if not self._jacobian_samples:
            return errors
        return {**errors, "jacobian": JacobianMetrics(self._fields.inputs)}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> tuple[Tensor, int]:
        inner = _inner(model)
        x = inner.normalize_input(batch.x)
        errors = (inner.denormalize_output(model(x)) - batch.y).unbind(1)
        for name, error in zip(self._fields.outputs, errors, strict=True):
            metrics[f"rmse_{name}"].update(error)
        # The same patterns whoever measures them: spread over the set, by their numbers.
        chosen = [place for place, number in enumerate(batch.ids) if self._is_sampled(number)]
        if chosen:
            with torch.enable_grad():
                metrics["jacobian"].update(inner.jac(x[chosen]))
        return self.loss(model, batch)

    def _is_sampled(self, number: int) -> bool:
        rows, samples = self.patterns.rows(valid=True), self._jacobian_samples
        return number * samples // rows != (number - 1) * samples // rows

    def listeners(self, run: Run) -> list[RunListener]:
        watching: list[RunListener] = [RankMemory(run, self)]
        if self._stopping is not None:
            rule = {"tolerance": 0.01, "patience": 3, "least_evaluations": 5, **self._stopping}
            watching.append(JacobianStopping(run, **rule))
        return watching

    def held(self) -> int:
        """Return how many training patterns this process keeps."""
        return 0 if self._data is None else self._data.held

    def on_end(self, folder: Path) -> None:
        """The best weights in one file, on rank 0 alone."""
        run = folder.parent
        if not any((run / "checkpoints").glob("step-*")):
            return  # checkpoint.enabled is false
        history = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        extra = {
            "config": json.loads((run / "config.json").read_text(encoding="utf-8")),
            "history": [json.loads(line) for line in history],
        }
        write_torch_file(run, "best", folder / "best_model.pt", force=True, extra=extra)


def _inner(model: nn.Module) -> Any:
    """Return the emulator itself: `same: rounding` wraps it."""
    return getattr(model, "module", model)


class RootMeanSquare:
    """Of errors, over all samples of all ranks."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, errors: Tensor) -> None:
        self.total += float(errors.double().square().sum())
        self.count += errors.numel()

    def merge(self, other: RootMeanSquare) -> None:
        self.total += other.total
        self.count += other.count

    def compute(self) -> float:
        return float((self.total / self.count) ** 0.5) if self.count else float("nan")


class RankMemory(RunListener):
    """Writes `files/memory.json`: what each rank kept of the data, and the most memory that it used."""

    draws = False

    def __init__(self, run: Run, task: SeaIce) -> None:
        self._run, self._task = run, task

    def on_end(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = self._run.context.gather({"patterns": self._task.held(), "peak_bytes": peak})
        if self._run.is_main:
            folder = self._run.run_dir / "files"
            folder.mkdir(exist_ok=True)
            (folder / "memory.json").write_text(json.dumps(found), encoding="utf-8")
