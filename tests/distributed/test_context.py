"""Opening, joining, closing and losing a process group, on real ranks."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from samestep import DistributedConfig, create_run_context, detect_hardware
from samestep.distributed.context import DDPContext, SingleProcessContext
from samestep.errors import InitError, PeerLost
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations


def _open_and_talk() -> dict[str, Any]:
    with create_run_context(DistributedConfig(timeout=30), detect_hardware()) as context:
        assert isinstance(context, DDPContext)
        context.barrier()
        weights = torch.full((3,), float(context.rank))
        context.collectives.broadcast_tensors([weights])
        said = {
            "broadcast": context.broadcast(f"from {context.rank}"),
            "gather": context.gather(context.rank),
            "weights": weights.tolist(),
            "main": context.is_main,
        }
    assert not dist.is_initialized()
    return said


@pytest.mark.requirement(
    "000-P1-3",
    "000-P1-4",
    "000-P5-1",
    "003-U-3",
    "004-1.1-5",
    "004-5.1-1",
    "001-D-6",
    "001-S2-4",
    "004-1.1-3",
    "004-2.1-5",
    "004-I-5",
)
def test_ranks_talk_and_close() -> None:
    said = run_ranks(_open_and_talk, 3)
    assert [s.pop("main") for s in said] == [True, False, False]
    expected = {"broadcast": "from 0", "gather": [0, 1, 2], "weights": [0.0] * 3}
    assert said == [expected] * 3


@pytest.mark.requirement("000-P0-6", "001-S2-3", "004-1.2-2")
def test_one_process_is_a_context_without_a_group() -> None:
    with create_run_context(DistributedConfig(), detect_hardware()) as context:
        assert isinstance(context, SingleProcessContext)
        assert (context.rank, context.world, context.is_main) == (0, 1, True)
        assert context.gather("x") == ["x"]
        assert not dist.is_initialized()


def _join() -> tuple[int, bool]:
    dist.init_process_group("gloo")
    with create_run_context(DistributedConfig(), detect_hardware()) as context:
        total = sum(context.gather(context.rank))
    still_open = dist.is_initialized()
    dist.destroy_process_group()
    return total, still_open


def test_an_open_group_is_joined_and_left_open() -> None:
    assert run_ranks(_join, 2) == [(1, True), (1, True)]


def _fail_to_open(policy: str) -> Any:
    os.environ["WORLD_SIZE"] = "3"  # a third rank that nobody starts
    config = DistributedConfig(timeout=3, on_init_failure=policy)
    try:
        with create_run_context(config, detect_hardware()) as context:
            return type(context).__name__
    except InitError as error:
        return str(error)
    except SystemExit as exit:
        return f"exit {exit.code}"


def test_a_group_that_cannot_open_is_an_error_that_says_what_to_do() -> None:
    for rank, message in enumerate(run_ranks(_fail_to_open, 2, "fail")):
        assert f"rank {rank} of 3 could not open the process group" in message
        assert "127.0.0.1:" in message
        assert "on_init_failure: fallback" in message


@pytest.mark.requirement("001-D-13", "001-S6-6")
def test_fallback_is_one_run_never_several() -> None:
    assert run_ranks(_fail_to_open, 2, "fallback") == ["SingleProcessContext", "exit 0"]


def _lose_a_peer() -> str:
    with create_run_context(DistributedConfig(timeout=30), detect_hardware()) as context:
        context.barrier()
        if context.rank == 1:
            return "gone"
        with pytest.raises(PeerLost) as caught:
            context.barrier()
        return str(caught.value)


def test_a_lost_peer_has_a_name() -> None:
    kept, gone = run_ranks(_lose_a_peer, 2)
    assert gone == "gone"
    assert kept.startswith("lost another rank: ")


def _by_hand(rank: int, port: int) -> list[int]:
    config = DistributedConfig(rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, timeout=30)
    with create_run_context(config, detect_hardware()) as context:
        return context.gather(context.rank)


def _spawned_by_hand(port: int) -> list[int]:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return _by_hand(rank, port)


@pytest.mark.requirement("001-T-2")
def test_ranks_can_be_spawned_by_hand() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(_spawned_by_hand, 2, port) == [[0, 1], [0, 1]]


def _take_turns(folder: str, per: Literal["node", "run"]) -> bool:
    with create_run_context(DistributedConfig(timeout=5), detect_hardware()) as context:
        done = Path(folder) / "done"
        with context.rank0_first(per) as first:
            if first:
                time.sleep(6)  # longer than a collective may wait
                done.touch()
            assert done.exists()
        with context.rank0_first(per) as again:
            assert again is first
        context.barrier()  # rank 0 serves the store in which the others look for its word
        return first


@pytest.mark.parametrize("per", variations(["node", "run"], kept=["node"]))
def test_one_rank_goes_first_however_long_it_takes(tmp_path: Path, per: Literal["node", "run"]) -> None:
    assert run_ranks(_take_turns, 3, str(tmp_path), per) == [True, False, False]


def _fail_first() -> None:
    with (
        create_run_context(DistributedConfig(timeout=600), detect_hardware()) as context,
        context.rank0_first() as first,
    ):
        assert first
        raise ValueError("no such download")


def test_those_who_wait_for_the_first_learn_that_it_failed() -> None:
    (_, first), *others = answers_of_ranks(_fail_first, 3)
    assert "ValueError: no such download" in first
    assert all("failed first: ValueError: no such download" in said for _, said in others)
