"""Over nccl, between ranks that share a GPU: each rank is a machine to nccl, and sends over loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.running import assert_same, train
from tests.distributed.test_sharded_weights import _train
from tests.gpu.test_gpu import CASES, SHARED
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NCCL = {
    "device": "cuda", "backend": "nccl",
    "network": {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ["everything", "bf16", "two optimizers"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "weights"])
def test_ranks_over_nccl_are_the_same_run(shard: str, case: str, tmp_path: Path) -> None:
    alone = train(tmp_path, 1, distributed=SHARED, **CASES[case])
    owned = {**NCCL, "shard": shard}
    assert_same([alone, *(train(tmp_path, w, distributed=owned, **CASES[case]) for w in (2, 4))])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_blocks_over_nccl(precision: str, tmp_path: Path) -> None:
    """Blocks whose weights are freed after the forward pass, and come back for the compiled backward pass."""
    values: dict[str, Any] = {"precision": precision, "speed": {"compile": "blocks", "graph": False}}
    [expected] = run_ranks(_train, 1, str(tmp_path / "1"), "none", None, _on_gpu(values, SHARED))
    for world in (2, 4):
        keys = _on_gpu(values, NCCL)
        answers = run_ranks(_train, world, str(tmp_path / str(world)), "weights", None, keys)
        assert [answer[1] for answer in answers] == [expected[1]] * world
        assert answers[0][0] == expected[0]


def _on_gpu(values: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    return {**values, "distributed": section}


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_steps_are_replayed_over_nccl(shard: str, tmp_path: Path) -> None:
    values = {"epochs": 5, **CASES["everything"]}
    runs = [train(tmp_path, 1, distributed=SHARED, speed={"graph": False}, **values)]
    runs += [train(tmp_path, w, distributed={**NCCL, "shard": shard}, **values) for w in (2, 4)]
    for run in runs[1:]:
        said = (run.folder / "logs" / "rank-0.log").read_text()
        assert "steps are replayed from here on" in said, said
    assert_same(runs)
