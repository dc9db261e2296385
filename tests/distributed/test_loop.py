"""What the loop decides, it decides once for all ranks."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from samestep.checkpoint.format import read_training
from samestep.checkpoint.manifest import verify_checkpoint
from tests.distributed.interrupting import finish
from tests.distributed.running import EACH_EPOCH, assert_same, rows_of, settings, train, train_rank
from tests.distributed.tasks import Everything, Net
from tests.ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
DIGITS = Path(__file__).parents[2] / "recipes" / "digits" / "config.yaml"


def _train_watching_writes(config: dict[str, Any]) -> list[str]:
    """Train, and tell every file this rank opened for writing in the run's folder."""
    written: list[str] = []

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)):
            path, mode, flags = os.fsdecode(args[0]), args[1], args[2]
            writes = (mode and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if writes and config["run_dir"] in path:
                written.append(Path(path).relative_to(config["run_dir"]).as_posix())

    sys.addaudithook(audit)
    train_rank(config)
    return written


@pytest.mark.requirement(
    "000-P0-7",
    "000-P2-6",
    "000-P2-7",
    "000-V-4",
    "001-S6-5",
    "002-K-4",
    "004-2.2-3",
    "004-2.2-5",
    "001-S2-9",
    "004-KR-3",
    "004-AO-2",
    "000-X-1",
)
def test_only_rank_0_writes_what_the_run_writes_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = settings("Everything", tmp_path / "run", trackers={"tensorboard": True})
    written = run_ranks(_train_watching_writes, 2, config)
    assert "metrics.jsonl" in written[0]
    assert any(name.startswith("tensorboard/") for name in written[0])
    assert set(written[1]) == {"logs/rank-1.log"}
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def _train_then_list_threads(config: dict[str, Any]) -> set[str]:
    """What still runs in this process when a run and its process group are over."""
    _train_watching_writes(config)
    return {name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")}


@pytest.mark.requirement("004-2.1-5")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads by /proc")
@pytest.mark.parametrize("same", ["bits", "rounding"])
def test_no_thread_of_the_backend_outlives_the_run(same: str, tmp_path: Path) -> None:
    """One that does can end the process in the interpreter's exit, after all went well."""
    config = settings("Everything", tmp_path / "run", epochs=1, same=same)
    for names in run_ranks(_train_then_list_threads, 3, config):
        assert not [name for name in names if "gloo" in name]


@pytest.mark.requirement("000-P4-7", "000-G-4")
def test_every_step_and_evaluation_is_tracked_once(tmp_path: Path) -> None:
    run = train(tmp_path, 2, evaluation=EACH_EPOCH)
    rows = rows_of(run.folder)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == run.record.losses
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 5]
    assert all(0 <= row["f1"] <= 1 for row in rows if "f1" in row)
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["lanes_per_rank"] == [4, 4]
    assert plan["steps"] == 6
    assert (run.folder / "logs" / "rank-1.log").read_text()


@pytest.mark.requirement("000-P2-5", "000-P5-3", "002-K-6")
def test_metrics_are_those_of_the_whole_validation_set(tmp_path: Path) -> None:
    run = train(tmp_path, 4)
    folder = run.folder / "checkpoints"
    model = Net(0.3).eval()
    last = folder / f"step-{run.record.steps:08d}"
    assert verify_checkpoint(last).world == 4
    assert read_training(last)["position"]["step"] == run.record.steps
    load_model(model, last / "model.safetensors")
    task = Everything()
    metrics = task.metrics()
    valid = task.valid_data()
    with torch.no_grad():
        x, y = valid.tensors
        logits = model(x)
        metrics["f1"].update(logits, y)
        metrics["auroc"].update(logits.softmax(1), y)
    assert float(run.state["kept.training.metrics.samples"]) == len(valid)
    for name in ("f1", "auroc"):
        assert float(run.state[f"kept.training.metrics.{name}"]) == pytest.approx(float(metrics[name].compute()))


def test_early_stopping_stops_all_ranks_at_one_step(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "epochs": 50, "params": {"optimizer": "momentum"}, "early_stopping": {"patience": 2}, "evaluation": EACH_EPOCH,
        "best": {"metric": "val_loss", "mode": "min", "min_delta": 100.0},
    }  # fmt: skip
    run = finish(tmp_path / "run", 2, **values)
    assert run.record.steps == 9
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006", "step-00000009"]
    last = verify_checkpoint(run.folder / "checkpoints" / kept[-1])
    assert last.best is not None
    assert last.best.step == 3
    assert last.ended == "no better val_loss for 2 evaluations"
    best = run.folder / "checkpoints" / kept[0] / "model.safetensors"
    assert (run.folder / "model.safetensors").read_bytes() == best.read_bytes()
    again = finish(tmp_path / "run", 1, **values).record
    assert again.start == again.steps == 9, "it stays stopped"


@pytest.mark.requirement("002-M2-5", "002-K-1")
def test_batch_per_rank_depends_on_the_ranks_and_says_so(tmp_path: Path) -> None:
    values: dict[str, Any] = {"global_batch": None, "lanes": None, "batch_per_rank": 8}
    one = train(tmp_path, 1, accumulation=2, **values)
    two = train(tmp_path, 2, accumulation=2, **values)
    assert (one.record.steps, two.record.steps) == (12, 6)
    plan = json.loads((two.folder / "plan.json").read_text())
    assert (plan["global_batch"], plan["lanes"]) == (32, 4)
    assert "depend on its 2 ranks" in (two.folder / "logs" / "rank-0.log").read_text()


def _own_loop(overrides: list[str]) -> None:
    sys.argv = [str(EXAMPLE), *overrides]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


@pytest.mark.variation("test_a_loop_is_one_run_at_any_size: with the loss as a function, compared with a task")
def test_a_hand_written_loop_is_the_same_run_as_the_task(tmp_path: Path) -> None:
    short = ["epochs=1", "distributed.threads_per_rank=1"]
    curves = {}
    for world in (1, 2, 4):
        folder = tmp_path / f"own-{world}"
        run_ranks(_own_loop, world, [*short, f"run_dir={folder}"])
        curves[world] = [row["loss"] for row in rows_of(folder) if "loss" in row]
    folder = tmp_path / "task"
    run_ranks(train_rank, 2, DIGITS, None, [*short, f"run_dir={folder}"])
    rows = rows_of(folder)
    assert curves[1] == curves[2] == curves[4] == [row["loss"] for row in rows if "loss" in row]
    assert [r["accuracy"] for r in rows if "accuracy" in r] == [
        r["accuracy"] for r in rows_of(tmp_path / "own-4") if "accuracy" in r
    ]


def test_data_are_prepared_once_on_a_machine_and_draws_for_it_change_nothing(tmp_path: Path) -> None:
    runs = []
    for world in (1, 2, 4):
        data = tmp_path / f"data-{world}"
        data.mkdir()
        runs.append(train(tmp_path, world, "Downloaded", params={"folder": str(data)}))
        assert (data / "downloads").read_text() == "x"
    assert_same(runs)
