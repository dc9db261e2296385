"""Runs of the test tasks at a given world size, and what they recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from samestep.config import load_config
from samestep.train.record import RunRecord, read_state
from tests.ranks import run_ranks

TASKS = Path(__file__).with_name("tasks.py")
EACH_EPOCH = {"every_epochs": 1}
"""For tests about evaluations: metrics take as long as training does here, so other runs have one in two epochs."""


def settings(task: str, folder: Path, **values: Any) -> dict[str, Any]:
    distributed = {"threads_per_rank": 1, "timeout": 600, **values.pop("distributed", {})}
    return {
        "task": task if ":" in task else f"{TASKS}:{task}",
        "global_batch": 32,
        "lanes": 8,
        "epochs": 2,
        "run_dir": str(folder),
        "log_every": 2,
        "evaluation": {"every_epochs": 2},
        "distributed": distributed,
        **values,
    }


def train_rank(config: Any, record: str | None = None, overrides: Sequence[str] = ()) -> int:
    """Train as a rank, or alone. Return the number of steps."""
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.train.train_once import train_once

    loaded = load_config(config, overrides)
    with create_run_context(loaded, detect_hardware()) as context:
        return train_once(loaded, context, None if record is None else Path(record)).steps


def losses_of(run: Path) -> list[float]:
    """Return the losses that a run has logged."""
    return [row["loss"] for row in rows_of(run) if "loss" in row]


def digest(model: nn.Module) -> str:
    """Return a hash of a model's parameters and buffers."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        state.update(tensor.cpu().numpy().tobytes())
    return state.hexdigest()


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return what a run has logged."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Recorded:
    """What one run left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = RunRecord.read(folder / "record")
        self.state = read_state(folder / "record")


def train(folder: Path, world: int, task: str = "Everything", **values: Any) -> Recorded:
    folder = folder / f"{task.rpartition(':')[2]}-{world}"
    while folder.exists():
        folder = folder.with_name(folder.name + "x")
    config = settings(task, folder, **values)
    run_ranks(train_rank, world, config, str(folder / "record"))
    return Recorded(folder)


def assert_same(runs: Sequence[Recorded]) -> None:
    first = runs[0]
    assert first.record.steps > 3
    for run in runs:
        assert len(set(run.record.rank_hashes)) == 1, "the ranks of one run differ"
        assert run.record.samples == first.record.samples
        assert run.record.losses == first.record.losses
        assert run.record.state_hash == first.record.state_hash
