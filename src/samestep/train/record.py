"""The exact record of a run: every loss, every sample, the final state. What verify compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from samestep.checkpoint.format import read_tensors
from samestep.checkpoint.ownership import claim
from samestep.data.batch import LaneBatch
from samestep.errors import CheckpointError, TextError
from samestep.parsing.json_text import read_json, read_json_lines
from samestep.run.run import Run
from samestep.run.state_tensors import dense, digest_of, state_tensors
from samestep.step.step_log import StepRecord
from samestep.tracking.listeners import RunListener
from samestep.words import listed


@dataclass(frozen=True)
class RunRecord:
    """The exact record of a run."""

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
    threads: list[int] = field(default_factory=list)
    """The number of threads of each rank, on which the bits of CPUs can depend."""
    rank_difference: str | None = None
    """The first tensor that is not the same on all ranks, and which do not have rank 0's."""

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Return the record in a folder; raises a `CheckpointError` if there is none that can be read."""
        path = folder / "record.json"
        try:
            document = read_json(path)
        except TextError as error:
            raise CheckpointError(f"{path} {error}") from None
        names = {field.name for field in fields(cls)}
        if not isinstance(document, dict) or not document.keys() <= names:
            raise CheckpointError(f"{path} is no record of a run")
        try:
            return cls(**document)
        except TypeError as error:
            raise CheckpointError(f"{path} is no record of a run: {error}") from None


def read_state(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the recorded run's final state, by name."""
    return read_tensors(folder / "state.safetensors")


class Recorder(RunListener):
    """Follows a run and writes its record when it has ended."""

    draws = False
    needs_sample_ids = True

    def __init__(self, run: Run, folder: Path) -> None:
        """Args:
        run: The run, before its first step.
        folder: Where the record goes; every rank names the same, rank 0 writes.
        """
        self._run, self._folder = run, folder
        if run.context.is_main:
            if folder.is_relative_to(run.run_dir):
                claim(run.run_dir)  # which a run whose global batch is not known yet has not done
            claim(folder, purpose="record")
        self._records: list[StepRecord] = []
        self._ids: dict[int, list[tuple[int, tuple[Any, ...]]]] = {}
        run.add_listener(self)

    def on_record(self, record: StepRecord) -> None:
        self._records.append(record)

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self._ids.setdefault(step, []).append((batch.lane, batch.ids))

    def on_end(self) -> None:
        context = self._run.context
        with self._run.whole_state():
            state = state_tensors(self._run.state)
            digests = context.gather({name: digest_of(tensor) for name, tensor in state.items()})
            if context.is_main:
                # Copies: safetensors refuses tensors that share memory, as tied weights do.
                copies = {name: dense(tensor).clone() for name, tensor in state.items()}
                save_file(copies, self._folder / "state.safetensors")
        threads = context.gather(torch.get_num_threads())
        gathered = context.gather(self._ids)
        if not context.is_main:
            return
        # The first reading holds start-up costs: lazy initialisation, first allocations.
        times = [record.seconds for record in self._records]
        settled = [t for t in times if t != times[0]] or times
        earlier = _losses_before(self._run.run_dir / "metrics.jsonl", self._run.start_step)
        # A state that only rank 0 holds, such as an EMA of policy rank0, is no difference.
        hashes = [hash_digests({**digests[0], **of_rank}) for of_rank in digests]
        record = RunRecord(
            world=context.world,
            steps=len(earlier) + len(self._records),
            losses=[*earlier, *(record.loss for record in self._records)],
            samples=[_digest(record.step, gathered) for record in self._records],
            state_hash=hashes[0],
            rank_hashes=hashes,
            seconds_per_step=median(settled) if settled else 0.0,
            start=self._run.start_step,
            threads=threads,
            rank_difference=_first_difference(digests),
        )
        (self._folder / "record.json").write_text(json.dumps(asdict(record)))


def _first_difference(digests: Sequence[Mapping[str, str]]) -> str | None:
    for name, digest in digests[0].items():
        others = [rank for rank, found in enumerate(digests) if found.get(name, digest) != digest]
        if others:
            return f"{name} on {listed('rank', others)}"
    return None


def _losses_before(metrics: Path, start: int) -> list[float]:
    """Return what a resumed run had measured before; its metrics hold every float in full."""
    rows = [row for row in read_json_lines(metrics) if row is not None]
    return [row["loss"] for row in rows if "loss" in row and row.get("step", start) < start]


def _digest(step: int, gathered: Sequence[Mapping[int, list[tuple[int, tuple[Any, ...]]]]]) -> str:
    units = sorted((unit for rank in gathered for unit in rank.get(step, [])), key=lambda u: u[0])
    ids = [sample for _, samples in units for sample in samples]
    return hashlib.blake2b(repr(ids).encode(), digest_size=8).hexdigest()


def hash_state(state: Mapping[str, Tensor]) -> str:
    """One digest over names, types, shapes and bits."""
    return hash_digests({name: digest_of(tensor) for name, tensor in state.items()})


def hash_digests(digests: Mapping[str, str]) -> str:
    """One digest over those of all tensors, by name."""
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
