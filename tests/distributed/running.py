"""Runs of the test tasks at a given world size, and what they recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def _train(config: dict[str, Any], record: str) -> None:
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.train.train_once import train_once

    loaded = load_config(config)
    with create_run_context(loaded, detect_hardware()) as context:
        train_once(loaded, context, Path(record))


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
    run_ranks(_train, world, config, str(folder / "record"))
    return Recorded(folder)


def assert_same(runs: Sequence[Recorded]) -> None:
    first = runs[0]
    assert first.record.steps > 3
    for run in runs:
        assert len(set(run.record.rank_hashes)) == 1, "the ranks of one run differ"
        assert run.record.samples == first.record.samples
        assert run.record.losses == first.record.losses
        assert run.record.state_hash == first.record.state_hash
