"""Collectives of the user's, found in stacks."""

from __future__ import annotations

from pathlib import Path

import torch

import samestep
from samestep.distributed.health.peer_errors import own_call, unmatched_calls

TORCH = Path(torch.__file__).parent
USER = '  File "/home/me/task.py", line 12, in loss\n    dist.all_reduce(x)\n'
OURS = f'  File "{Path(samestep.__file__).parent}/step/build_engine.py", line 3, in run\n    loss()\n'
WRAPPED = f'  File "{TORCH}/distributed/c10d_logger.py", line 83, in wrapper\n    func()\n'


def inside(name: str) -> str:
    return f'  File "{TORCH}/distributed/distributed_c10d.py", line 3000, in {name}\n    wait()\n'


CALL = OURS + USER + WRAPPED + inside("all_reduce")


def test_a_call_is_named_with_its_place() -> None:
    assert own_call(CALL) == "torch.distributed.all_reduce (task.py:12, in loss)"


def test_what_is_no_call_of_the_users() -> None:
    assert own_call("") is None
    assert own_call(USER + OURS + WRAPPED + inside("barrier")) is None, "through samestep"
    assert own_call(OURS + USER) is None
    forward = f'  File "{TORCH}/nn/modules/module.py", line 1, in forward\n    x\n'
    assert own_call(OURS + USER + forward) is None


def test_a_call_that_the_others_do_not_make() -> None:
    said = unmatched_calls({0: CALL, 1: "", 2: ""}, waiting=[1, 2])
    assert said is not None
    assert "rank 0 is in torch.distributed.all_reduce (task.py:12, in loss)" in said
    assert "the others are not in it" in said


def test_different_calls_of_the_users() -> None:
    other = OURS + USER + WRAPPED + inside("broadcast")
    said = unmatched_calls({0: CALL, 1: other}, waiting=[])
    assert said is not None
    assert "rank 1 is in torch.distributed.broadcast" in said


def test_a_rank_that_may_still_come_is_no_mismatch() -> None:
    assert unmatched_calls({0: CALL, 1: CALL}, waiting=[]) is None
    assert unmatched_calls({0: CALL, 1: OURS + USER, 2: ""}, waiting=[2]) is None
    assert unmatched_calls({0: "", 1: ""}, waiting=[0, 1]) is None
