"""A DataLoader, taken apart: what becomes the run's order, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from samestep.data.loader_parts import parts_of
from samestep.errors import TaskError
from tests.unit.step.engines import setup_of

DATA: Dataset[Any] = TensorDataset(torch.arange(10.0))


def loader(**values: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **{"batch_size": 4, **values})


def order_of(**values: Any) -> list[list[int]]:
    """The indices of the first two epochs."""
    order = parts_of(loader(**values), setup_of()).order
    assert order is not None
    return [list(map(int, order(7, epoch))) for epoch in range(2)]


def test_a_loader_that_does_not_shuffle_is_read_in_order() -> None:
    assert order_of() == [list(range(10))] * 2


def test_a_loader_that_shuffles_has_a_new_order_of_the_runs_seed_each_epoch() -> None:
    first, second = order_of(shuffle=True)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert order_of(shuffle=True) == [first, second], "whatever the loader's own generator is at"


def test_samplers_become_orders() -> None:
    for drawn in order_of(sampler=RandomSampler(DATA, replacement=True, num_samples=30)):
        assert len(drawn) == 30
        assert set(drawn) <= set(range(10))
    for drawn in order_of(sampler=RandomSampler(DATA, num_samples=6)):
        assert len(set(drawn)) == 6
    for drawn in order_of(sampler=SubsetRandomSampler([1, 3, 5])):
        assert sorted(drawn) == [1, 3, 5]
    for drawn in order_of(sampler=WeightedRandomSampler([0.0] * 8 + [1.0] * 2, 12)):
        assert len(drawn) == 12
        assert set(drawn) == {8, 9}
    whole = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    assert order_of(sampler=whole) == [list(range(10))] * 2, "lanes cut the batches, not it"


def test_workers_pinning_and_the_tail_are_the_loaders() -> None:
    taken = parts_of(loader(num_workers=2, prefetch_factor=5, drop_last=True), setup_of())
    config = taken.setup.config
    assert (config.loader.workers, config.loader.prefetch, config.drop_last) == (2, 5, True)
    assert parts_of(loader(), setup_of()).setup.config.loader.pin_memory == "auto"


def test_a_collate_function_is_taken_over() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    assert parts_of(loader(collate_fn=collate), setup_of()).collate is collate


class Odd(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])

    def __len__(self) -> int:
        return 1


class OddBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 8}, "batch_size=8, and global_batch is 4"),
        ({"batch_size": None}, "batch_size=None"),
        ({"sampler": Odd()}, "has a Odd, whose order samestep cannot derive"),
        ({"worker_init_fn": print}, "worker_init_fn"),
        ({"sampler": WeightedRandomSampler([1.0] * 10, 4, replacement=False)}, "replacement=True"),
    ],
)
def test_what_cannot_be_the_same_at_any_size_is_refused(values: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        parts_of(loader(**values), setup_of())


def test_batch_samplers_are_refused_unless_they_are_torchs_own() -> None:
    odd: DataLoader[Any] = DataLoader(DATA, batch_sampler=OddBatches())
    with pytest.raises(TaskError, match="batch_sampler of its own"):
        parts_of(odd, setup_of())
    plain: DataLoader[Any] = DataLoader(DATA, batch_sampler=BatchSampler(range(10), 4, False))
    with pytest.raises(TaskError, match="batch_size=None"):
        parts_of(plain, setup_of())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"drop_last": True}, "the config sets drop_last to True, the DataLoader to False"),
        ({"loader": {"workers": 3}}, "loader.workers to 3, the DataLoader to 0"),
    ],
)
def test_a_config_that_says_otherwise_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        parts_of(loader(), setup_of(**config))
