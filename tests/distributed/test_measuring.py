"""Validation is the same at any number of ranks, or refused by all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from samestep.checkpoint.format import read_training
from tests.distributed import measuring_tasks
from tests.distributed.running import Recorded, assert_same, rows_of, settings, train, train_rank
from tests.ranks import answers_of_ranks
from tests.sameness.models import unusual
from tests.sameness.models.base import points

TASKS, EXTRA = Path(measuring_tasks.__file__), f"{unusual.__file__}:ExtraModule"
EACH = {"every_steps": 3}
WORLDS = (1, 2, 4)
LAST = "step-00000006"


def measured(run: Recorded) -> list[dict[str, Any]]:
    return [row for row in rows_of(run.folder) if "val_loss" in row or "swa_val_loss" in row]


@pytest.mark.variation("test_nested_metrics_are_those_of_the_whole_set: of extra modules")
def test_extra_modules_are_evaluated_as_the_model_is(tmp_path: Path) -> None:
    runs = [train(tmp_path, world, EXTRA, evaluation=EACH, swa={"start": 2, "every": 1}) for world in WORLDS]
    assert_same(runs)
    assert all(measured(run) == measured(runs[0]) for run in runs)
    heads = [read_training(run.folder / "checkpoints" / LAST)["modules"][0] for run in runs]
    for head in heads:
        assert all(torch.equal(value, heads[0][name]) for name, value in head.items())
    assert heads[0]["0.num_batches_tracked"] == 6, "validation counts as no batch"
    task = unusual.ExtraModule()
    model = task.model().eval()
    load_model(model, runs[0].folder / "checkpoints" / LAST / "model.safetensors")
    task.head.load_state_dict(heads[0])
    x, y = points(37, seed=9)
    loss = torch.nn.functional.cross_entropy(task.head.eval()(model(x)), y)
    evaluations = [row for row in measured(runs[0]) if "val_loss" in row]
    assert evaluations[-1]["val_loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_nested_metrics_are_those_of_the_whole_set(tmp_path: Path) -> None:
    runs = [train(tmp_path, world, f"{TASKS}:Wrapped", evaluation=EACH) for world in WORLDS]
    rows = [measured(run) for run in runs]
    assert rows[0] == rows[1] == rows[2]
    assert rows[0][0]["blurred"] != rows[0][1]["blurred"]
    row = rows[0][-1]
    task = measuring_tasks.Wrapped()
    model = task.model()
    load_model(model, runs[0].folder / "checkpoints" / LAST / "model.safetensors")
    metrics = task.metrics()
    x, y = points(37)
    with torch.no_grad():
        for metric in metrics.values():
            metric.update(model(x).softmax(1), y)
    plain = metrics["plain"].compute().item()
    same = ("plain", "minmax/raw", "minmax/min", "minmax/max", "all/one", "mergeable/accuracy")
    assert [row[name] for name in same] == pytest.approx([plain] * len(same))
    assert row["twice"] == pytest.approx(2 * plain)
    assert row["all/two"] == pytest.approx(metrics["all"].compute()["two"].item())
    assert row["auroc"] == pytest.approx(metrics["auroc"].compute().item())
    by_class = {f"by/{key}": value.item() for key, value in metrics["by"].compute().items()}
    assert {name: row[name] for name in by_class} == pytest.approx(by_class)
    assert row["mergeable/seen"] == 37
    assert 0 < row["boot/mean"] < 1
    assert row["boot/std"] > 0


@pytest.mark.parametrize("mode", ["sharded", "rank0"])
def test_a_buffer_that_validation_moves_is_refused_by_all_ranks(tmp_path: Path, mode: str) -> None:
    config = settings(f"{TASKS}:MovingBuffer", tmp_path, evaluation={**EACH, "mode": mode})
    answers = answers_of_ranks(train_rank, 2, config, str(tmp_path / "record"))
    for ok, text in answers:
        assert not ok
        assert "TaskError: the evaluation changed buffers in evaluation mode: model.1.calls" in text
        assert "(_Counter)" in text


def test_what_cannot_be_merged_is_refused_before_the_first_step(tmp_path: Path) -> None:
    config = settings(f"{TASKS}:Unmergeable", tmp_path, evaluation=EACH)
    for ok, text in answers_of_ranks(train_rank, 2, config, str(tmp_path / "record")):
        assert not ok
        assert "TaskError: metric window: Running is over the last updates" in text
    assert (tmp_path / "metrics.jsonl").read_text() == ""
