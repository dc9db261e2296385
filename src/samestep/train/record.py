"""The exact record of a run: every loss, every sample, the final state. What verify compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.data.batch import LaneBatch
from samestep.pytree import leaves
from samestep.step.step_log import StepRecord
from samestep.train.evaluate import Values
from samestep.train.listeners import RunListener
from samestep.train.run import Run


@dataclass(frozen=True)
class RunRecord:
    """What a run did, to the bit."""

    world: int
    steps: int
    losses: list[float]
    samples: list[str]
    """For each step from `start` on, a digest of the sample ids in lane order."""
    state_hash: str
    rank_hashes: list[str]
    seconds_per_step: float
    start: int = 0
    """The step that the run was last resumed at."""

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        return cls(**json.loads((folder / "record.json").read_text()))


def read_state(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the recorded run's final state, by name."""
    return load_file(folder / "state.safetensors")


class Recorder(RunListener):
    """Follows a run and writes its record."""

    draws = False
    needs_sample_ids = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._records: list[StepRecord] = []
        self._ids: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        run.add_listener(self)

    def on_record(self, record: StepRecord) -> None:
        self._records.append(record)

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self._ids.setdefault(step, []).append((batch.lane, batch.ids))

    def write(
        self,
        folder: Path,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        metrics: Values,
        averages: Mapping[str, Tensor],
    ) -> None:
        """Write the record; every rank calls this, rank 0 writes."""
        context = self._run.context
        state = final_state(model, optimizers, metrics, averages)
        hashes = context.gather(hash_state(state))
        gathered = context.gather(self._ids)
        if not context.is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / "state.safetensors")
        # The first reading holds start-up costs: lazy initialisation, first allocations.
        times = [record.seconds for record in self._records]
        settled = [t for t in times if t != times[0]] or times
        earlier = _losses_before(self._run.run_dir / "metrics.jsonl", self._run.start_step)
        record = RunRecord(
            world=context.world,
            steps=len(earlier) + len(self._records),
            losses=[*earlier, *(record.loss for record in self._records)],
            samples=[_digest(record.step, gathered) for record in self._records],
            state_hash=hashes[0],
            rank_hashes=hashes,
            seconds_per_step=median(settled) if settled else 0.0,
            start=self._run.start_step,
        )
        (folder / "record.json").write_text(json.dumps(asdict(record)))


def _losses_before(metrics: Path, start: int) -> list[float]:
    """What a resumed run had measured before; its metrics hold every float in full."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row and row["step"] < start]


def _digest(step: int, gathered: Sequence[Mapping[int, list[tuple[int, tuple[Any, ...]]]]]) -> str:
    units = sorted((unit for rank in gathered for unit in rank.get(step, [])), key=lambda u: u[0])
    ids = [sample for _, samples in units for sample in samples]
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()


def final_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    metrics: Values,
    averages: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Weights, buffers, their averages, optimizer state and metrics as tensors, by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    found: dict[str, Tensor] = {
        f"model.{name}": value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    for number, optimizer in enumerate(optimizers):
        position = 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = names.get(id(param), f"parameter-{position}")
                position += 1
                if id(param) not in names:
                    found[f"optimizer{number}.{name}"] = param
                for key, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, (Tensor, float, int)):
                        found[f"optimizer{number}.{name}.{key}"] = torch.as_tensor(value)
    found |= averages
    for name, value in metrics.items():
        # A list may hold lists of other lengths, as a curve for each class does.
        numbers = list(leaves(value)) if isinstance(value, list) else value
        found[f"metrics.{name}"] = torch.tensor(numbers, dtype=torch.float64)
    return {name: value.detach().cpu().contiguous().clone() for name, value in found.items()}


def hash_state(state: Mapping[str, Tensor]) -> str:
    """One digest over names, types, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
