"""A world of one: every collective gives back what it got, and nothing is sent."""

from __future__ import annotations

import pytest
import torch

from samestep.distributed import collectives as collectives_module
from samestep.distributed.collectives import SoloCollectives, group_is_open
from samestep.distributed.health.activity import Activity


def test_one_process_is_rank_0_of_1_and_talks_to_itself() -> None:
    activity = Activity()
    found = SoloCollectives(activity)
    value = object()
    found.barrier()
    assert (found.rank, found.world) == (0, 1)
    assert found.broadcast(value) is value
    assert found.gather(value) == [value]
    assert found.collect(value) == [value]
    assert (activity.sequence, found.activity) == (0, activity), "no collective was called"


def test_one_processs_tensors_stay_as_they_are() -> None:
    tensor = torch.tensor([1.0])
    SoloCollectives(Activity()).broadcast_tensors([tensor])
    assert tensor.tolist() == [1.0]


def test_tensors_are_sent_from_where_they_are() -> None:
    device = torch.device("cuda", 3)
    assert SoloCollectives(Activity()).wire(device) == device


@pytest.mark.parametrize(
    ("available", "initialized", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_group_is_open_only_if_torch_can_have_one(
    monkeypatch: pytest.MonkeyPatch, available: bool, initialized: bool, expected: bool
) -> None:
    monkeypatch.setattr(collectives_module.dist, "is_available", lambda: available)
    with monkeypatch.context() as patch:
        patch.setattr(collectives_module.dist, "is_initialized", lambda: initialized)
        assert group_is_open() is expected
