"""BatchNorm over the global batch: the run of a plain loop with the whole batch, at any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import StepError
from tests.distributed.batchnorm_tasks import BATCH, Contrast, Images, made_data, made_model
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import Recorded, assert_same, settings, train
from tests.distributed.test_loader_loops import train_body
from tests.ranks import run_ranks
from tests.variations import variations

TASKS = Path(__file__).with_name("batchnorm_tasks.py")


def over_all(folder: Path, world: int, task: str = "Images", **values: Any) -> Recorded:
    return train(folder, world, f"{TASKS}:{task}", **of(**values))


def of(**values: Any) -> dict[str, Any]:
    return {"global_batch": BATCH, "lanes": 4, "batchnorm": "global", **values}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of two epochs."""
    x, y = made_data().tensors
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True)) * 2


def assert_close(run: Recorded, module: nn.Module, prefix: str) -> None:
    for name, value in module.state_dict().items():
        found = run.state[f"{prefix}.{name}"]
        assert found.dtype == value.dtype
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5, msg=name)


def test_it_is_the_run_of_a_plain_loop_with_the_whole_batch(tmp_path: Path) -> None:
    model = made_model()
    optimizer = Images().optimizers(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    runs = [over_all(tmp_path, world) for world in (1, 2, 4)]
    assert runs[0].record.losses == pytest.approx(losses, abs=1e-5)
    assert_close(runs[0], model, "model")
    assert_same(runs)
    # Each lane by itself is another run.
    lanes = over_all(tmp_path, 2, batchnorm="lane")
    assert lanes.record.losses != pytest.approx(losses, abs=1e-3)


EVERYTHING: dict[str, Any] = {
    "clip": {"norm": 0.5},
    "loss_weights": {"class": 1.0, "small": 0.01},
    "global_batch": 64,  # the rest of an epoch, four samples, is lane 0's: other ranks have none
    "epochs": 3,
}


@pytest.mark.parametrize("precision", variations(["fp32", "bf16"], kept=["fp32"]))
def test_everything_is_one_run_at_any_size(precision: str, tmp_path: Path) -> None:
    values = {**EVERYTHING, "precision": precision}
    runs = [over_all(tmp_path, world, "Everything", **values) for world in (1, 2, 3, 4)]
    assert_same(runs)
    again = over_all(tmp_path, 2, "Everything", **values, memory={"checkpoint": ["2", "5", "9"]})
    assert_same([runs[0], again])


@pytest.mark.variation("test_everything_is_one_run_at_any_size: over a resume")
def test_it_resumes_at_another_size(tmp_path: Path) -> None:
    untouched = over_all(tmp_path, 1, "Everything", **EVERYTHING)
    folder, task = tmp_path / "run", f"{TASKS}:Everything"
    go_on(folder, 4, task, at=1, rank=3, how="SIGTERM", **of(**EVERYTHING))
    go_on(folder, 1, task, at=3, how="SIGTERM", **of(**EVERYTHING))
    ended = finish(folder, 2, task, **of(**EVERYTHING))
    assert 0 < ended.record.start < 6
    assert ended.record.state_hash == untouched.record.state_hash


def test_embeddings_of_a_loss_over_the_batch_are_normalised_over_it(tmp_path: Path) -> None:
    """In the loss itself all samples are on every rank, and nothing is exchanged."""
    task, model = Contrast(), made_model()
    optimizer = task.optimizers(model)
    for x, y in batches():
        optimizer.zero_grad()
        task.head(model(x), y).backward()
        optimizer.step()
    runs = [over_all(tmp_path, world, "Contrast") for world in (1, 2, 4)]
    assert_close(runs[0], model, "model")
    assert_close(runs[0], task.head, "extra0")
    assert_same(runs)


@pytest.mark.variation("test_everything_is_one_run_at_any_size: with a loss over the batch")
def test_a_loss_over_the_batch_with_ranks_without_samples(tmp_path: Path) -> None:
    values = {"global_batch": 64, "epochs": 3}
    assert_same([over_all(tmp_path, world, "Contrast", **values) for world in (1, 2, 4)])


def test_averages_and_precision(tmp_path: Path) -> None:
    values: dict[str, Any] = {"precision": "bf16", "swa": {"start": 0.5}, "ema": {"decay": 0.9}}
    assert_same([over_all(tmp_path, world, **values) for world in (1, 2)])


def test_a_step_that_is_skipped_leaves_the_statistics(tmp_path: Path) -> None:
    """Lane 0 of step 1 has a value that is not finite."""
    runs = [over_all(tmp_path, world, "Broken", on_nonfinite="skip") for world in (1, 2, 4)]
    assert_same(runs)
    statistics = [value for name, value in runs[0].state.items() if "running" in name]
    assert statistics
    assert all(torch.isfinite(value).all() for value in statistics)


@pytest.mark.variation("test_everything_is_one_run_at_any_size: with iterable data")
@pytest.mark.parametrize("steps", variations([None, 3], kept=[3]))
def test_streams_of_different_lengths(steps: int | None, tmp_path: Path) -> None:
    values = {"steps_per_epoch": steps, "epochs": 2}
    assert_same([over_all(tmp_path, world, "Streams", **values) for world in (1, 2, 4)])


def test_one_rank_with_one_lane_has_the_plain_layer(tmp_path: Path) -> None:
    kinds = ("global", "lane")
    assert_same([over_all(tmp_path, 1, lanes=1, batchnorm=kind, epochs=3) for kind in kinds])


# -- loops over the loader ---------------------------------------------------------------------


def _loop(config: dict[str, Any]) -> list[float]:
    """One rank alone puts a batch through the model, between epochs; the others must not wait for it."""
    x = made_data().tensors[0]
    losses = []
    with samestep.start(config) as run:
        model = made_model()
        model, optimizer = run.prepare(model, Images().optimizers(model))
        data = run.source(made_data(), samestep.orders.sequential(len(x)))
        for _ in run.epochs():
            for _, (a, b) in run.enumerate(data):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(a), b, reduction="sum")
                losses.append(run.backward(loss, b.size(0)).item())
                optimizer.step()
            if run.rank == 0:
                buffers = [buffer.clone() for buffer in model.buffers()]
                model(x[:5])
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
    return losses


def _settings(folder: Path) -> dict[str, Any]:
    config = settings("", folder, **of())
    config.pop("task")
    return config


@pytest.mark.variation("test_a_loop_is_one_run_at_any_size: compared with a task")
def test_a_loop_over_the_loader_is_the_run_of_a_task(tmp_path: Path) -> None:
    task = over_all(tmp_path, 2)
    for world in (1, 2):
        found = run_ranks(_loop, world, _settings(tmp_path / str(world)))
        assert found == [task.record.losses] * world


@pytest.mark.parametrize("name", variations(["convolutions", "adversaries", "views"], kept=["adversaries"]))
def test_a_loop_is_one_run_at_any_size(tmp_path: Path, name: str) -> None:
    """Two optimizers and backward passes, a teacher that is averaged: the layers meet each time."""
    [expected] = run_ranks(partial(train_body, batchnorm="global"), 1, str(tmp_path / "1"), name)
    assert expected != train_body(str(tmp_path / "lane"), name)
    for world in (2, 4):
        assert (
            run_ranks(partial(train_body, batchnorm="global"), world, str(tmp_path / str(world)), name)
            == [expected] * world
        )


def _refused_in_loop(config: dict[str, Any], kind: str) -> None:
    with samestep.start(config) as run:
        model = made_model()
        model, optimizer = run.prepare(model, Images().optimizers(model))
        data = run.source(made_data(), samestep.orders.sequential(68))
        for _ in run.epochs():
            for _, (x, y) in run.enumerate(data):
                if kind == "by itself":
                    run.each_lane(model, x)
                head = run.each_lane(lambda x: model[10](x.flatten(1)[:, :8]), x)
                run.backward(F.cross_entropy(model(x) + head, y))
                optimizer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("by itself", "a BatchNorm over the global batch was called for one lane alone"),
        ("a weight", "a parameter was used where lanes run by themselves"),
    ],
)
def test_what_runs_lanes_by_themselves_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=words):
        _refused_in_loop(_settings(tmp_path), kind)


def _other_weights(config: dict[str, Any]) -> list[float]:
    """A teacher in inference mode, and weights that are other tensors within a step."""
    losses = []
    with samestep.start(config) as run:
        model, teacher = made_model(), made_model().requires_grad_(False)
        model, teacher, optimizer = run.prepare(model, teacher, Images().optimizers(model))
        data = run.source(made_data(), samestep.orders.sequential(68))
        for _ in run.epochs():
            for _, (x, y) in run.enumerate(data):
                with torch.inference_mode():
                    aim = teacher(x)
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y) + F.mse_loss(model(x), aim.clone())
                    losses.append(run.backward(loss).item())
                    for param in model.parameters():
                        param.data = param.data - 0.01 * param.grad
                optimizer.step()
    return losses


@pytest.mark.variation("test_everything_is_one_run_at_any_size: with weights that are replaced")
def test_weights_that_are_replaced_within_a_step(tmp_path: Path) -> None:
    [expected] = run_ranks(_other_weights, 1, _settings(tmp_path / "1"))
    assert expected[1] < expected[0] - 1e-3, "the second pass has the new weights"
    assert run_ranks(_other_weights, 2, _settings(tmp_path / "2")) == [expected] * 2


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a layer of one's own": ("OwnForward", {}, "0 is a _Own with a forward pass of its own"),
    "graphs": ("Images", {"speed": {"graph": True}}, "speed.graph: true, but batchnorm: global lets"),
    "a length": ("Counts", {}, "write batch.size, the number of samples in each lane"),
    "gradients of one lane": ("Gradients", {}, "torch.autograd.grad of one lane with batchnorm"),
    "a second embedding": ("Contrast", {"contrastive": {"recompute": True}}, "contrastive.recompute: true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_normalised_over_the_batch_is_refused(case: str, tmp_path: Path) -> None:
    task, values, words = REFUSED[case]
    for ok, said in go_on(tmp_path / "run", 2, f"{TASKS}:{task}", **of(**values)):
        assert not ok
        assert words in said


def test_a_model_without_batchnorm_is_not_changed(tmp_path: Path) -> None:
    kinds = ("global", "lane")
    assert_same([over_all(tmp_path, 2, "WithoutNorm", batchnorm=kind) for kind in kinds])
