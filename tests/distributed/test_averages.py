"""Averages of weights are the same at any size, and go on at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep.checkpoint.format import read_model, read_training
from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.manifest import MANIFEST, MODEL, TRAINING, verify_checkpoint
from samestep.models.trained_model import load_trained
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import EACH_EPOCH, assert_same, rows_of, settings, train
from tests.ranks import run_ranks
from tests.variations import variations

EMA = {"decay": 0.8, "per": "epoch", "every": 2}
SWA = {"start": 0.34, "every": 2, "lr": 1e-3, "anneal": 2}
BOTH: dict[str, Any] = {"ema": EMA, "swa": SWA, "epochs": 3}
RANK0: dict[str, Any] = {**BOTH, "ema": {**EMA, "policy": "rank0"}}


def newest(folder: Path) -> Path:
    return list_checkpoints(folder / "checkpoints", checksums=False)[-1].folder


@pytest.mark.requirement("000-P2-10", "000-P1-8")
def test_the_same_at_any_size_with_both_policies(tmp_path: Path) -> None:
    per_rank = [train(tmp_path, world, **BOTH) for world in (1, 2, 4)]
    rank0 = [train(tmp_path, world, **RANK0) for world in (2, 4)]
    assert_same([*per_rank, *rank0])
    first = per_rank[0]
    assert {
        "kept.ema.model.norm.running_mean",
        "kept.swa.model.hidden.weight",
        "kept.training.metrics.ema_f1",
        "kept.training.metrics.swa_f1",
    } <= (first.state.keys())
    written = {tuple(verify_checkpoint(newest(run.folder)).files.items()) for run in per_rank}
    assert len(written) == 1, "the checkpoints with the averages are the same, byte for byte"
    assert {path.name for path in newest(first.folder).iterdir()} == {MODEL, TRAINING, MANIFEST}, "of no rank"
    state = first.state
    assert not torch.equal(state["kept.ema.model.hidden.weight"], state["model.hidden.weight"])
    assert not torch.equal(state["kept.swa.model.norm.running_mean"], state["kept.ema.model.norm.running_mean"])


@pytest.mark.variation("test_the_same_at_any_size_with_both_policies: over a resume")
@pytest.mark.parametrize("values", [BOTH, RANK0], ids=["per_rank", "rank0"])
def test_they_go_on_at_another_size(values: dict[str, Any], tmp_path: Path) -> None:
    values = {**values, "checkpoint": {"every_steps": 2}}
    untouched = train(tmp_path, 1, **values)
    folder = tmp_path / "run"
    go_on(folder, 4, at=1, rank=3, how="SIGTERM", **values)
    go_on(folder, 1, at=5, how="raises", **values)  # in the phase, in the middle of its annealing
    ended = finish(folder, 2, **values)
    assert ended.record.start == 4
    assert ended.record.state_hash == untouched.record.state_hash
    assert [row["lr"] for row in rows_of(folder) if "lr" in row] == [
        row["lr"] for row in rows_of(untouched.folder) if "lr" in row
    ]


def test_what_a_run_says_of_its_averages_is_so(tmp_path: Path) -> None:
    run = train(tmp_path, 1, best={"metric": "ema_val_loss"}, evaluation=EACH_EPOCH, **BOTH)
    evaluated = [row for row in rows_of(run.folder) if "val_loss" in row]
    assert len(evaluated) == 3
    assert all(row["ema_val_loss"] != row["val_loss"] for row in evaluated)
    (ended,) = [row for row in rows_of(run.folder) if "swa_val_loss" in row]
    # From step 3 of 9 on: the schedule's rate, two steps down to the phase's, and there it stays.
    rates = [row["lr"] for row in rows_of(run.folder) if "lr" in row]
    assert rates[4] == pytest.approx((rates[3] + 1e-3) / 2)
    assert rates[5:] == [1e-3] * 4
    manifest = verify_checkpoint(newest(run.folder))
    assert manifest.metrics["swa_val_loss"] == ended["swa_val_loss"]
    assert manifest.best is not None
    assert manifest.best.value == min(row["ema_val_loss"] for row in evaluated)
    kept = read_training(newest(run.folder))["kept"]
    assert kept["swa"]["updates"] == 3
    for weights in ("ema", "swa"):
        model = load_trained(run.folder, "last", weights).model.state_dict()
        for name, tensor in model.items():
            assert torch.equal(tensor, run.state[f"kept.{weights}.model.{name}"]), name
        assert torch.equal(model["hidden.weight"], kept[weights]["model"]["hidden.weight"])


def test_tied_weights_are_averaged_once_and_loaded_twice(tmp_path: Path) -> None:
    run = train(tmp_path, 1, "Tokens", ema={"decay": 0.5}, swa={"every": "epoch"})
    model: Any = load_trained(run.folder, "last", "ema").model
    assert torch.equal(model.out.weight, model.embed.weight)
    assert torch.equal(model.embed.weight, run.state["kept.ema.model.embed.weight"])
    assert not torch.equal(model.embed.weight, run.state["model.embed.weight"])
    assert torch.equal(model.frozen.weight, run.state["model.frozen.weight"])
    assert torch.equal(run.state["kept.swa.model.embed.weight"], run.state["model.embed.weight"])


def test_a_skipped_step_changes_no_average(tmp_path: Path) -> None:
    values: dict[str, Any] = {"params": {"step": 2}, "on_nonfinite": "skip", "epochs": 1}
    run = train(tmp_path, 2, "BadLoss", ema={"decay": 0.5}, **values)
    kept = read_training(newest(run.folder))["kept"]["ema"]
    assert (run.record.steps, kept["steps"], kept["updates"]) == (3, 2, 2)


def test_a_phase_that_the_run_ends_before_says_so(tmp_path: Path) -> None:
    values: dict[str, Any] = {"epochs": 9, "best": {"min_delta": 100.0}, "early_stopping": {"patience": 1}}
    run = train(tmp_path, 1, swa={"start": 20}, **values)
    assert "swa averaged nothing" in (run.folder / "logs" / "rank-0.log").read_text()
    assert not read_training(newest(run.folder))["kept"]["swa"]["model"]
    with pytest.raises(Exception, match="holds no swa weights"):
        load_trained(run.folder, "last", "swa")


# -- samestep average ----------------------------------------------------------------------------


def _average(config: dict[str, Any], count: int, by: Any) -> Any:
    from samestep.config import load_config
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.models.checkpoint_average import average_run

    loaded = load_config(config)
    with create_run_context(loaded, detect_hardware()) as context:
        return average_run(loaded.run_path, loaded, context, count, by)


@pytest.mark.parametrize("task", variations(["Everything", "TwoOptimizers"], kept=["Everything"]))
def test_a_mean_of_checkpoints_is_the_same_file_at_any_size(task: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"checkpoint": {"keep_last": 1, "keep_best": 3}, "epochs": 4, "evaluation": EACH_EPOCH}
    run = train(tmp_path, 1, task, **values)
    config = settings(task, run.folder, **values)
    found = list_checkpoints(run.folder / "checkpoints", checksums=False)
    ranked = sorted(found, key=lambda item: item.manifest.metrics["val_loss"])  # type: ignore[union-attr]
    made = {}
    for world in (1, 2) if task == "TwoOptimizers" else (1, 2, 4):
        (said, *others) = run_ranks(_average, world, config, 3, "best")
        made[world] = said.path.read_bytes()
        assert all(other.values == said.values for other in others)
    assert len(set(made.values())) == 1
    assert list(said.checkpoints) == sorted(item.step for item in ranked[:3])
    mean = torch.stack([read_model(c.folder)["hidden.weight"] for c in ranked[:3]]).mean(0)
    model = load_trained(run.folder, "last", "average").model.state_dict()
    assert torch.allclose(model["hidden.weight"], mean, rtol=1e-5, atol=1e-7)
    assert set(said.values) == {"val_loss", "f1", "auroc", "brier", "samples"}


def test_iterable_data_is_measured_too(tmp_path: Path) -> None:
    values = {"swa": {"start": 2, "every": 1}, "epochs": 1}
    runs = [train(tmp_path, world, "Streamed", **values) for world in (1, 3)]
    assert runs[0].record.state_hash == runs[1].record.state_hash
    assert "kept.swa.model.norm.running_mean" in runs[0].state


def _sync_batchnorm(config: dict[str, Any]) -> list[float]:
    from samestep.config import load_config
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.evaluation.update_bn import measure_batchnorm
    from samestep.run_setup import RunSetup
    from tests.distributed.tasks import points

    loaded = load_config(config)
    with create_run_context(loaded, detect_hardware()) as context:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(1))
        data = torch.utils.data.TensorDataset(*points(70))
        setup = RunSetup.create(loaded, context)
        assert setup.assignment.fused
        measure_batchnorm(setup, [model], lambda m, batch: m(batch.x), data, None, None)
        return [model.running_mean.item(), model.running_var.item()]


def test_sync_batchnorm_waits_for_nobody(tmp_path: Path) -> None:
    """On 3 ranks some have more batches than others; torch's would wait, or refuse the CPU."""
    config = settings("Everything", tmp_path, same="samples")
    alone = run_ranks(_sync_batchnorm, 1, config)[0]
    assert alone[0] != 0.0
    assert run_ranks(_sync_batchnorm, 3, config) == [alone] * 3
