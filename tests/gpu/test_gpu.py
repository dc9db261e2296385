"""On a GPU: the same bits over ranks that share it, and no step that waits for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.config import load_config
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import Recorded, assert_same, settings, train, train_rank
from tests.distributed.test_sharded_weights import train_blocks
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHARED = {"device": "cuda", "backend": "gloo"}
# Each rank is a machine to nccl, and sends over loopback.
NCCL = {
    "device": "cuda", "backend": "nccl",
    "network": {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
    },
}  # fmt: skip
OVER = {"gloo": SHARED, "nccl": NCCL}
CASES: dict[str, dict[str, Any]] = {
    "everything": {"clip": {"norm": 0.5}},
    "bf16": {"precision": "bf16"},
    "tokens": {"task": "Tokens"},
    "two optimizers": {"task": "TwoOptimizers"},
    "overflow": {
        "task": "Overflowing", "params": {"optimizer": "fused"}, "precision": "fp16",
        "loss_scale": {"init": 1024.0, "interval": 3}, "epochs": 3,
    },
    "named": {
        "task": "Named", "optimizer": {"groups": [{"match": ["extra.*"], "name": "rmsprop"}]},
        "schedule": {"name": "cosine", "warmup": 2},
    },
}  # fmt: skip


@pytest.mark.requirement("000-G-1", "000-P1-6", "000-P1-7", "001-S2-7", "002-C-1")
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_a_gpu_are_one_run(case: str, tmp_path: Path) -> None:
    worlds = (1, 2, 3, 4)
    assert_same([train(tmp_path, w, distributed=SHARED, **CASES[case]) for w in worlds])


@pytest.mark.parametrize("case", ["everything", "bf16", "two optimizers"])
@pytest.mark.parametrize(
    ("backend", "shard"),
    [("gloo", "optimizer"), ("gloo", "weights"), ("nccl", "none"), ("nccl", "optimizer"), ("nccl", "weights")],
)
def test_owners_that_share_a_gpu_are_the_same_run(backend: str, shard: str, case: str, tmp_path: Path) -> None:
    owned = {**OVER[backend], "shard": shard}
    whole = train(tmp_path, 1, distributed=SHARED, **CASES[case])
    worlds = (2, 3, 4) if backend == "gloo" else (2, 4)
    assert_same([whole, *(train(tmp_path, world, distributed=owned, **CASES[case]) for world in worlds)])


def _train_by_slices(config: dict[str, Any], record: str) -> None:
    from samestep.reduce import owned_bucket

    owned_bucket._LEAST_BYTES, owned_bucket._WORTH_SLICES = 0, 0.0
    train_rank(config, record)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_sums_by_slices_on_ranks_that_share_a_gpu(shard: str, tmp_path: Path) -> None:
    runs = [train(tmp_path, 1, distributed=SHARED, **CASES["everything"])]
    for world in (2, 4):
        folder = tmp_path / f"slices-{world}"
        values = {"distributed": {**SHARED, "shard": shard}, **CASES["everything"]}
        config = settings("Everything", folder, **values)
        run_ranks(_train_by_slices, world, config, str(folder / "record"))
        runs.append(Recorded(folder))
    assert_same(runs)


@pytest.mark.parametrize(("backend", "shard"), [("gloo", "optimizer"), ("nccl", "none"), ("nccl", "optimizer")])
def test_lanes_of_owners_are_replayed(backend: str, shard: str, tmp_path: Path) -> None:
    values = {"epochs": 5, **CASES["everything"]}
    owned = {**OVER[backend], "shard": shard}
    runs = [train(tmp_path, 1, distributed=SHARED, speed={"graph": False}, **values)]
    runs += [train(tmp_path, world, distributed=owned, **values) for world in (2, 4)]
    for run in runs[1:]:
        said = (run.folder / "logs" / "rank-0.log").read_text()
        assert "steps are replayed from here on" in said, said
    assert_same(runs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_over_nccl(precision: str, tmp_path: Path) -> None:
    """Blocks whose weights are freed after the forward pass, and come back for the compiled backward pass."""
    values: dict[str, Any] = {"precision": precision, "speed": {"compile": "blocks", "graph": False}}
    alone = {**values, "distributed": SHARED}
    [expected] = run_ranks(train_blocks, 1, str(tmp_path / "1"), "none", None, alone)
    for world in (2, 4):
        keys = {**values, "distributed": NCCL}
        answers = run_ranks(train_blocks, world, str(tmp_path / str(world)), "weights", None, keys)
        assert [answer[1] for answer in answers] == [expected[1]] * world
        assert answers[0][0] == expected[0]


@pytest.mark.requirement("000-P1-12", "004-SM-1", "002-M3-1")
def test_one_rank_under_nccls_rules(tmp_path: Path) -> None:
    gloo = train(tmp_path, 1, distributed=SHARED)
    nccl = train(tmp_path, 1, distributed={"device": "cuda", "backend": "nccl"})
    assert_same([gloo, nccl])


def _count_waits(config: dict[str, Any]) -> int:
    """Steps in which the host waited for the device, between two readings of the losses."""
    import samestep
    from tests.distributed.tasks import Everything

    task = Everything()
    with samestep.start(load_config(config)) as run:
        model = task.model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = run.prepare(model, optimizer)
        data = torch.utils.data.TensorDataset(*(t.pin_memory() for t in (task.train_data().x, task.train_data().y)))
        steps = 0
        for _ in run.epochs():
            for _, (x, y) in run.enumerate(data):
                steps = run.step + 1
                torch.cuda.set_sync_debug_mode("error" if run.step > 2 else "default")
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                torch.cuda.set_sync_debug_mode("default")
        return steps


def test_a_step_never_waits_for_the_device(tmp_path: Path) -> None:
    config = settings(
        "Everything", tmp_path / "run", log_every=1000, clip={"norm": 0.5}, distributed={"device": "cuda"}
    )
    assert run_ranks(_count_waits, 1, config) == [6]


def test_a_run_on_a_gpu_goes_on_at_other_sizes(tmp_path: Path) -> None:
    values = {"checkpoint": {"every_steps": 2}, "epochs": 4, "distributed": SHARED}
    untouched = train(tmp_path, 1, **values)
    folder = tmp_path / "run"
    said = go_on(folder, 4, at=1, rank=2, how="SIGTERM", **values)
    # The flag is read two steps late, so that no step waits for the device.
    assert all("SIGTERM on rank 2 stopped the run after step 4" in text for _, text in said), said
    said = go_on(folder, 1, at=7, how="kill -9", **values)
    ended = finish(folder, 2, **values)
    assert ended.record.state_hash == untouched.record.state_hash


def test_a_bad_loss_on_a_gpu_stops_before_the_next_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {"params": {"step": 4}, "log_every": 50, "checkpoint": {"every_steps": 3}}
    said = go_on(folder, 2, "BadLoss", epochs=4, distributed=SHARED, **values)
    assert all("the loss of step 4 is NaN or infinite in lane 5" in text for _, text in said), said
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]


def test_two_ranks_on_one_gpu_are_refused_under_nccl(tmp_path: Path) -> None:
    """A launcher may show each rank a GPU of its own, so that only the ranks together can tell."""
    config = tmp_path / "config.json"
    section = {"device": "cuda", "backend": "nccl"}
    config.write_text(json.dumps(settings("Everything", tmp_path / "run", distributed=section)))
    step = {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "samestep", "train", config],
            env={**os.environ, **step, "SLURM_PROCID": number, "SLURM_LOCALID": number},
            stderr=subprocess.PIPE, text=True,
        )
        for number in ("0", "1")
    ]  # fmt: skip
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 2, said
        assert "nccl takes one rank per GPU, but ranks 0, 1 on" in said
