"""BatchNorm over the global batch: the run of a plain loop with the whole batch, on as many ranks as lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from tests.distributed.batchnorm_tasks import BATCH, Contrast, Images, made_data, made_model
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import Recorded, assert_same, settings, train
from tests.ranks import run_ranks

TASKS = Path(__file__).with_name("batchnorm_tasks.py")


def over_all(folder: Path, world: int, task: str = "Images", **values: Any) -> Recorded:
    return train(folder, world, f"{TASKS}:{task}", **of(world, **values))


def of(world: int, **values: Any) -> dict[str, Any]:
    return {"global_batch": BATCH, "lanes": world, "batchnorm": "global", **values}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of two epochs."""
    x, y = made_data().tensors
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True)) * 2


def assert_close(run: Recorded, module: nn.Module, prefix: str) -> None:
    for name, value in module.state_dict().items():
        found = run.state[f"{prefix}.{name}"]
        assert found.dtype == value.dtype
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("world", [2, 4])
def test_it_is_the_run_of_a_plain_loop_with_the_whole_batch(world: int, tmp_path: Path) -> None:
    model = made_model()
    optimizer = Images().optimizers(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = over_all(tmp_path, world)
    assert run.record.losses == pytest.approx(losses, abs=1e-5)
    assert_close(run, model, "model")
    assert_same([run, over_all(tmp_path, world)])
    # Each lane by itself is another run.
    lanes = over_all(tmp_path, world, batchnorm="lane")
    assert lanes.record.losses != pytest.approx(losses, abs=1e-3)


@pytest.mark.parametrize("world", [2, 4])
def test_a_run_goes_on_as_if_nothing_had_been(world: int, tmp_path: Path) -> None:
    untouched = over_all(tmp_path, world)
    folder, task = tmp_path / "run", f"{TASKS}:Images"
    go_on(folder, world, task, at=2, rank=world - 1, how="SIGTERM", **of(world))
    ended = finish(folder, world, task, **of(world))
    assert 0 < ended.record.start < 6
    assert ended.record.state_hash == untouched.record.state_hash


@pytest.mark.parametrize(("world", "again"), [(2, True), (4, False)])
def test_embeddings_of_a_loss_over_the_batch_are_normalised_over_it(
    world: int, again: bool, tmp_path: Path
) -> None:
    """In the loss itself all samples are on every rank, and nothing is exchanged."""
    task, model = Contrast(), made_model()
    optimizer = task.optimizers(model)
    for x, y in batches():
        optimizer.zero_grad()
        task.head(model(x), y).backward()
        optimizer.step()
    run = over_all(tmp_path, world, "Contrast", contrastive={"recompute": again})
    assert len(set(run.record.rank_hashes)) == 1
    assert_close(run, model, "model")
    assert_close(run, task.head, "extra0")


def test_averages_precision_and_second_forward_passes(tmp_path: Path) -> None:
    values: dict[str, Any] = {"precision": "bf16", "swa": {"start": 0.5}, "ema": {"decay": 0.9}}
    kept = over_all(tmp_path, 2, **values)
    again = over_all(tmp_path, 2, **values, memory={"checkpoint": ["0", "2", "5"]})
    assert_same([kept, again])


def test_one_rank_with_one_lane_has_the_plain_layer(tmp_path: Path) -> None:
    assert_same([over_all(tmp_path, 1, batchnorm=kind, epochs=3) for kind in ("global", "lane")])


def _own_loop(config: dict[str, Any]) -> list[float]:
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
                losses.append(run.backward(loss, len(b)).item())
                optimizer.step()
            if run.rank == 0:
                buffers = [buffer.clone() for buffer in model.buffers()]
                model(x[:5])
                for buffer, before in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
    return losses


def test_a_loop_over_the_loader(tmp_path: Path) -> None:
    config = settings("", tmp_path / "run", **of(2))
    config.pop("task")
    task = over_all(tmp_path, 2)
    assert run_ranks(_own_loop, 2, config) == [task.record.losses] * 2


SEVERAL = "batchnorm: global, but 2 ranks drive 4 lanes: all lanes meet in each BatchNorm layer"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "several lanes a rank": ("Images", {"lanes": 4}, SEVERAL),
    "a rank without samples": (
        "Images",
        {"global_batch": 64},
        "68 samples in batches of 64 leave a rest of 4, which fills 1 of 2 lanes",
    ),
    "streams that end": ("Streams", {}, "some rank has no samples in this step"),
    "streams shorter than an epoch": (
        "Streams",
        {"steps_per_epoch": 3},
        "some rank has no samples in this step",
    ),
    "a layer of one's own": ("OwnForward", {}, "0 is a _Own with a forward pass of its own"),
    "graphs": (
        "Images",
        {"speed": {"graph": True}},
        "speed.graph: true, but batchnorm: global lets",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_normalised_over_the_batch_is_refused(case: str, tmp_path: Path) -> None:
    task, values, words = REFUSED[case]
    for ok, said in go_on(tmp_path / "run", 2, f"{TASKS}:{task}", **of(2, **values)):
        assert not ok
        assert words in said


@pytest.mark.parametrize("values", [{"drop_last": True}, {"epochs": None, "steps": 1}])
def test_a_rest_that_is_left_out_or_not_reached_does_no_harm(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run = over_all(tmp_path, 2, global_batch=64, **values)
    assert run.record.steps == (2 if "drop_last" in values else 1)


def test_a_model_without_batchnorm_may_have_a_rank_without_samples(tmp_path: Path) -> None:
    runs = [
        over_all(tmp_path, 2, "WithoutNorm", global_batch=64, batchnorm=kind)
        for kind in ("global", "lane")
    ]
    assert_same(runs)
