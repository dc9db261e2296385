"""On a GPU: BatchNorm over the global batch, between ranks that share it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.running import assert_same, train
from tests.distributed.test_loader_loops import train_body
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TASKS = Path(__file__).parents[1] / "distributed" / "batchnorm_tasks.py"


@pytest.mark.parametrize("task", ["Images", "Contrast"])
def test_it_is_one_run_at_any_size(task: str, tmp_path: Path) -> None:
    values = {"global_batch": 24, "batchnorm": "global"}
    shared = {"device": "cuda", "backend": "gloo"}
    name = f"{TASKS}:{task}"
    several = [train(tmp_path, world, name, lanes=4, distributed=shared, **values) for world in (1, 2, 4)]
    assert_same(several)
    one = train(tmp_path, 1, name, lanes=1, distributed=shared, **values)
    assert several[0].record.losses == pytest.approx(one.record.losses, abs=1e-4)
    # A layer without running statistics evaluates by batches, which are as large as a lane.
    trained = {name: v for name, v in one.state.items() if not name.startswith("kept.")}
    for name, value in trained.items():
        torch.testing.assert_close(several[0].state[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_activations_that_are_computed_again(tmp_path: Path) -> None:
    """In the thread of a GPU's backward pass."""
    values = {
        "clip": {"norm": 0.5}, "loss_weights": {"class": 1.0, "small": 0.01}, "global_batch": 24, "lanes": 4,
        "batchnorm": "global", "distributed": {"device": "cuda", "backend": "gloo"},
    }  # fmt: skip
    name = f"{TASKS}:Everything"
    again = {"memory": {"checkpoint": ["2", "5", "9"]}}
    assert_same([train(tmp_path, 2, name, **values), train(tmp_path, 1, name, **values, **again)])


@pytest.mark.parametrize("name", ["convolutions", "adversaries"])
def test_a_loop_is_one_run_at_any_size(tmp_path: Path, name: str) -> None:
    train = partial(train_body, batchnorm="global", distributed={"device": "cuda", "backend": "gloo"})
    [expected] = run_ranks(train, 1, str(tmp_path / "1"), name)
    assert run_ranks(train, 2, str(tmp_path / "2"), name) == [expected] * 2
