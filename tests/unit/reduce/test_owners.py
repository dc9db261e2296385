"""Which rank owns which parameter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.reduce.owners import Owners


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40), world=st.integers(1, 9))
def test_every_parameter_has_one_owner_and_the_load_is_even(sizes: list[int], world: int) -> None:
    params = [torch.empty(size) for size in sizes]
    by_rank = [Owners(params, rank, world) for rank in range(world)]
    for param in params:
        assert len({owners.of(param) for owners in by_rank}) == 1
        assert sum(owners.is_mine(param) for owners in by_rank) == 1
    load = by_rank[0].load
    assert sum(load) == sum(param.nbytes for param in params)
    assert max(load) <= sum(load) / world + max(param.nbytes for param in params)


def test_what_nobody_owns_every_rank_has() -> None:
    owners = Owners([torch.empty(3)], 1, 2)
    assert owners.is_mine(torch.empty(5))
    assert owners.balance == "the largest of 2 owners has 100 % of the parameters"
