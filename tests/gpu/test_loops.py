"""Loops over the loader on a GPU: bodies that are replayed as CUDA graphs, with the bits of eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_loader_loops import train_body
from tests.distributed.test_sharding import loop_of
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

REPLAYED = ("convolutions", "summed", "views", "diffusion")
"""Those whose random numbers, if any, are drawn on the device, with one optimizer and backward pass."""


def _train(folder: str, name: str, graph: Any, precision: str) -> tuple[str, list[float]]:
    section = {"device": "cuda", "threads_per_rank": 1}
    return train_body(folder, name, epochs=5, precision=precision, speed={"graph": graph}, distributed=section)


def _sharded(folder: str, name: str, shard: str, precision: str, stop: int | None = None) -> tuple[str, list[float]]:
    section = {"device": "cuda", "backend": "gloo"}
    return loop_of(folder, shard, name, stop, precision=precision, speed={"graph": False}, distributed=section)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["convolutions", "adversaries", "scaled"])
def test_owners_that_share_a_gpu_run_a_loop(name: str, precision: str, tmp_path: Path) -> None:
    [whole] = run_ranks(_sharded, 1, str(tmp_path / "whole"), name, "none", precision)
    for world in (2, 3, 4):
        for shard in ("optimizer", "weights"):
            folder = str(tmp_path / f"{shard}-{world}")
            answers = run_ranks(_sharded, world, folder, name, shard, precision)
            assert answers[0] == whole
            assert [seen for _, seen in answers] == [whole[1]] * world
    run_ranks(_sharded, 3, str(tmp_path / "parts"), name, "weights", precision, 3)
    run_ranks(_sharded, 2, str(tmp_path / "parts"), name, "optimizer", precision, 6)
    answers = run_ranks(_sharded, 4, str(tmp_path / "parts"), name, "weights", precision)
    assert answers[0][0] == whole[0], "written in parts, by ranks that share a GPU"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", REPLAYED)
def test_a_replayed_body_has_the_bits_of_an_eager_one(name: str, precision: str, tmp_path: Path) -> None:
    [eager] = run_ranks(_train, 1, str(tmp_path / "eager"), name, False, precision)
    [replayed] = run_ranks(_train, 1, str(tmp_path / "auto"), name, "auto", precision)
    said = (tmp_path / "auto" / "logs" / "rank-0.log").read_text()
    assert replayed == eager, said
    assert "steps are replayed from here on" in said, said


@pytest.mark.parametrize("name", ["adversaries", "sharpness", "critic", "mixup", "scaled", "autoencoder"])
def test_other_bodies_train_without_a_graph_or_in_part(name: str, tmp_path: Path) -> None:
    [eager] = run_ranks(_train, 1, str(tmp_path / "eager"), name, False, "fp32")
    assert run_ranks(_train, 1, str(tmp_path / "auto"), name, "auto", "fp32") == [eager]
