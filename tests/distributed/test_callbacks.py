"""Listeners that come with samestep, and the time limit, on one rank and on several."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.interrupting import go_on
from tests.distributed.running import EACH_EPOCH, Recorded, rows_of, train
from tests.variations import variations

TASK = """
import torch

import samestep
from tests.distributed.tasks import Everything

class Followed(Everything):
    def listeners(self, run):
        return [
            samestep.callbacks.FlopsUtilization(run, 1e6, 1e12),
            samestep.callbacks.SamplePredictions(run, self.predictions),
            samestep.callbacks.GradientNorms(run, every=2),
            samestep.callbacks.GradientNorms(run, every=3, depth=1),
        ]

    def predictions(self, model):
        assert not model.training and not torch.is_grad_enabled()
        x, _ = self.valid_data().tensors
        return {"sample/logits": model(x[:2]), "sample/text": "two samples"}

class Wrong(Everything):
    def listeners(self, run):
        return [print]
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "followed_task.py"
    path.write_text(TASK)
    return path


def rows_with(run: Recorded, name: str) -> list[dict[str, Any]]:
    with (run.folder / "metrics.jsonl").open() as file:
        return [row for row in map(json.loads, file) if name in row]


def test_a_tasks_listeners_write_once_and_change_nothing(tmp_path: Path, task: Path) -> None:
    values = {"clip": {"norm": 1e30}, "evaluation": EACH_EPOCH}
    plain = train(tmp_path, 1, **values)
    followed = [train(tmp_path, world, f"{task}:Followed", **values) for world in (1, 2)]
    for world, run in zip((1, 2), followed, strict=True):
        assert run.record.state_hash == plain.record.state_hash
        assert run.record.losses == plain.record.losses
        rates = rows_with(run, "mfu")
        assert [row["step"] for row in rates] == [1, 3, 5]
        seconds = {row["step"]: row["seconds"] for row in rows_with(run, "loss")}
        for row in rates:
            assert row["flops_per_second"] == pytest.approx(32 * 1e6 / seconds[row["step"]])
            assert row["mfu"] == pytest.approx(row["flops_per_second"] / (1e12 * world))
        samples = rows_with(run, "sample/logits")
        assert [row["step"] for row in samples] == [2, 5]
        assert samples == rows_with(followed[0], "sample/logits"), "the same at any size"
        check_norms(run)
    assert len(samples[0]["sample/logits"]) == 2


def check_norms(run: Recorded) -> None:
    """The parts' norms make up the whole's."""
    whole = {row["step"]: row["grad_norm"] for row in rows_with(run, "loss")}
    found = [
        {name: value for name, value in row.items() if name.startswith("grad_norm/")} | {"": row["step"]}
        for row in rows_of(run.folder)
        if any(name.startswith("grad_norm/") for name in row)
    ]
    assert [row[""] for row in found] == [1, 2, 3, 5, 5]
    by_parameter = [any(name.count(".") for name in row) for row in found]
    assert by_parameter == [True, False, True, True, False]
    for row in found:
        step = row.pop("")
        assert math.hypot(*row.values()) == pytest.approx(whole[step], rel=1e-5)


def test_what_is_no_listener_is_refused(tmp_path: Path, task: Path) -> None:
    ((ok, said),) = go_on(tmp_path / "run", 1, f"{task}:Wrong")
    assert not ok
    assert "Wrong.listeners returned a builtin_function_or_method" in said


@pytest.mark.parametrize("world", variations([1, 2], kept=[2]))
def test_a_time_limit_stops_all_ranks_at_one_step_and_the_run_resumes(world: int, tmp_path: Path) -> None:
    untouched = train(tmp_path, world)
    folder, limit = tmp_path / "run", {"preemption": {"after_minutes": 1e-9}}
    for done in range(1, 6):
        for ok, said in go_on(folder, world, **limit):
            assert not ok
            assert f"preemption.after_minutes stopped the run after step {done}: it is saved" in said
    assert all(ok for ok, _ in go_on(folder, world, **limit))
    ended = Recorded(folder)
    assert ended.record.steps == 6
    assert ended.record.state_hash == untouched.record.state_hash
