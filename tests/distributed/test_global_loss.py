"""Losses over the whole global batch: the same run at any size, and that of a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.step.global_loss import measured_activations
from tests.distributed.contrastive_tasks import Plain, made_data
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import assert_same, settings, train
from tests.ranks import run_ranks
from tests.variations import variations

TASKS = Path(__file__).with_name("contrastive_tasks.py")


def contrast(folder: Path, world: int, task: str, **values: Any) -> Any:
    return train(folder, world, f"{TASKS}:{task}", **{"epochs": 3, **values})


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "views, BatchNorm, dropout, tail": ("Views", {"clip": {"norm": 0.5}}),
    "a loss with weights, two towers": ("WithProxies", {}),
    "fp16": ("Views", {"precision": "fp16", "loss_scale": {"interval": 3}}),
    "five lanes, averages": (
        "Views",
        {"lanes": 5, "global_batch": 30, "ema": {"decay": 0.9}, "swa": {"start": 0.5, "every": 2}},
    ),
    "skipping": ("WithProxies", {"on_nonfinite": "skip"}),
    "a queue that the loss fills": ("WithQueue", {}),
    "shared rows": ("Shared", {}),
    "micro-batches": ("WithProxies", {"memory": {"lane_split": 3}}),
}
IN_CI = ("views, BatchNorm, dropout, tail", "a queue that the loss fills")


def test_it_is_the_same_with_one_to_eight_lanes_a_rank(tmp_path: Path) -> None:
    assert_same([contrast(tmp_path, world, "Views", epochs=2) for world in (8, 1)])


@pytest.mark.requirement("000-P3-1")
@pytest.mark.parametrize("case", variations(CASES, kept=IN_CI))
def test_a_loss_over_the_global_batch_is_the_same_at_any_size(case: str, tmp_path: Path) -> None:
    task, values = CASES[case]
    worlds = (1, 2, 4) if task == "Views" else (1, 2, 3, 4)
    assert_same([contrast(tmp_path, world, task, **values) for world in worlds])


@pytest.mark.variation("test_a_loss_over_the_global_batch_is_the_same_at_any_size: with a loss of another library")
def test_losses_of_other_libraries_with_weights_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_metric_learning")
    assert_same([contrast(tmp_path, world, "ArcFace") for world in (1, 2, 4)])


@pytest.mark.parametrize("world", variations([1, 2], kept=[2]))
def test_activations_kept_and_computed_again_give_the_same_bits(world: int, tmp_path: Path) -> None:
    runs = [
        contrast(tmp_path / str(recompute), world, "Views", contrastive={"recompute": recompute})
        for recompute in (True, False, "auto")
    ]
    assert_same(runs)
    assert len(set(runs[0].record.losses)) > 5


@pytest.mark.parametrize("values", [{"lanes": 1}, {}, {"same": "rounding"}, {"same": "samples"}])
def test_what_the_loss_leaves_in_its_buffers_stays(values: dict[str, Any], tmp_path: Path) -> None:
    """In the order of the samples: the last ones of all lanes, and one move of its BatchNorm."""
    found = [
        contrast(tmp_path / str(again), 2 if "same" in values else 1, "WithQueue", epochs=2,
                 contrastive={"recompute": again}, **values).state
        for again in (True, False)
    ]  # fmt: skip
    names = [name for name in found[0] if name.endswith("norm.num_batches_tracked")]
    assert [int(found[0][name]) for name in names] == [6]
    assert all(found[0][name.replace("num_batches_tracked", "running_mean")].all() for name in names)
    for name in found[0]:
        if name.endswith((".rows", ".classes")):
            assert found[0][name].count_nonzero() > 30
            assert torch.equal(found[0][name], found[1][name])


@pytest.mark.variation(
    "test_micro_batches_that_were_found_are_those_that_are_asked_for: of a loss over the global batch"
)
def test_micro_batches_are_found_by_trial(tmp_path: Path) -> None:
    """Whole lanes fit, and the trial leaves no trace but the number that it found."""
    whole, tried = (contrast(tmp_path / str(split), 2, "Views", memory={"lane_split": split}) for split in (1, "auto"))
    assert tried.record.losses == whole.record.losses
    for name, value in whole.state.items():
        assert torch.equal(tried.state[name], value), name


@pytest.mark.parametrize("world", variations([1, 2], kept=[2]))
@pytest.mark.parametrize("same", variations(["rounding", "samples"], kept=["rounding"]))
def test_weaker_promises_give_one_loss_too_and_move_batchnorm_once(same: str, world: int, tmp_path: Path) -> None:
    """Where DistributedDataParallel sums, and a rank has several lanes or one of them fused."""
    runs = [
        contrast(tmp_path / str(again), world, "Views", same=same, contrastive={"recompute": again})
        for again in (True, False, "auto")
    ]
    for run in runs:
        counted = [v for name, v in run.state.items() if name.endswith("num_batches_tracked")]
        assert [int(value) for value in counted] == [9]
        assert run.record.losses == pytest.approx(runs[0].record.losses, rel=1e-5)
    if same == "rounding":
        bits = contrast(tmp_path, 1, "Views")
        assert runs[0].record.losses == pytest.approx(bits.record.losses, rel=1e-4)


def _embeddings(config: dict[str, Any], free: float) -> list[int]:
    """How often each step embeds a lane, with so much free memory."""
    from unittest import mock

    from samestep.step.global_loss import GlobalSteps

    task, calls, found = Plain(), [0], []

    def embed(batch: Any) -> Any:
        calls[0] += 1
        return model(batch.x)

    patched = mock.patch.object(GlobalSteps, "_free_memory", return_value=free)
    with patched, samestep.start(config) as run:
        model = task.model()
        model, _ = run.prepare(model, task.optimizers(model))
        for step in run.steps(task.train_data()):
            calls[0] = 0
            step.train_global(embed, task.batch_loss)
            found.append(calls[0])
    return found


@pytest.mark.parametrize(("lanes", "later"), [(0, 7), (1.5, 7), (3.5, 5), (1e9, 4)])
def test_as_many_activations_are_kept_as_fit(lanes: float, later: int, tmp_path: Path) -> None:
    model = Plain().model()
    with measured_activations(list(model.parameters())) as saved:
        model(made_data()[:8][0].clone())
    free = 2 * lanes * saved.bytes
    config = settings(f"{TASKS}:Plain", tmp_path / "run", lanes=4, epochs=1, drop_last=True)
    config.pop("task")
    # The first lane of the first step is measured.
    assert run_ranks(_embeddings, 1, config, free) == [[later + 1, later]]


@pytest.mark.parametrize("recompute", [True, False])
def test_batchnorm_moves_once_in_a_step_of_one_lane(recompute: bool, tmp_path: Path) -> None:
    run = contrast(tmp_path, 1, "Views", lanes=1, contrastive={"recompute": recompute})
    counted = [v for name, v in run.state.items() if name.endswith("num_batches_tracked")]
    assert [int(value) for value in counted] == [9]


@pytest.mark.requirement("002-C-9")
@pytest.mark.parametrize(("world", "lanes", "split"), [(1, 1, 1), (1, 8, 1), (4, 8, 1), (2, 4, 3)])
def test_it_is_the_loss_of_a_plain_loop_with_the_whole_batch(
    world: int, lanes: int, split: int, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"lanes": lanes, "memory": {"lane_split": split}, "drop_last": True}
    run = contrast(tmp_path, world, "Plain", epochs=2, **values)
    task = Plain()
    x, y = made_data().tensors
    model = task.model()
    optimizer = task.optimizers(model)
    for step in range(4):
        at = slice(32 * (step % 2), 32 * (step % 2) + 32)
        optimizer.zero_grad()
        loss = samestep.losses.supcon(model(x[at]), y[at], temperature=0.2)
        assert run.record.losses[step] == pytest.approx(loss.item(), abs=1e-5)
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.state[f"model.{name}"], value, rtol=0, atol=1e-5)


@pytest.mark.variation("test_a_run_goes_on_at_other_sizes_with_the_same_bits: with a loss over the global batch")
def test_a_run_goes_on_at_another_size(tmp_path: Path) -> None:
    values = {"checkpoint": {"every_steps": 2}, "epochs": 3}
    untouched = contrast(tmp_path, 1, "Views", **values)
    folder, task = tmp_path / "run", f"{TASKS}:Views"
    go_on(folder, 4, task, at=3, rank=2, how="SIGTERM", **values)
    go_on(folder, 8, task, at=6, rank=7, how="SIGTERM", **values)
    ended = finish(folder, 3, task, **values)
    assert 0 < ended.record.start < 9
    assert ended.record.state_hash == untouched.record.state_hash


WRONG = {
    "rows": "must have a row for each of its 4 samples, or as many rows for each; its shape is (3, 5)",
    "texts": "the embeddings of lane 0 holds a str: only tensors",
    "detached": "the loss does not depend on embeddings that require a gradient",
    "labels": "supcon got 32 samples and labels of the shape (31,): give one for each",
    "vector": "the loss of a lane must be a tensor of no dimensions, not (32,)",
    "names": "a loss over the whole batch is one loss",
    "buffers": "the loss over the whole batch changed buffer 1.running_mean of the model",
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_loss_over_the_batch_is_refused(kind: str, tmp_path: Path) -> None:
    for ok, said in go_on(tmp_path / "run", 1, f"{TASKS}:Wrong", params={"kind": kind}):
        assert not ok
        assert WRONG[kind] in said
