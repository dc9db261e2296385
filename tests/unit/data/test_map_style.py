"""Steps of a dataset with a length: which samples, in which lane, with which draws."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from samestep.data import orders
from samestep.data.batch import Position, Source
from samestep.data.factory import open_source
from samestep.data.map_style import is_map_style
from samestep.errors import TaskError
from tests.unit.data.sources import batches, contents, setup_of


class Drawing(Dataset[Any]):
    """Every sample draws from all three generators."""

    def __init__(self, samples: int = 10) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), np.random.random(), torch.rand(()).item()


def numbers(samples: int, rank: int = 0, world: int = 1, **values: Any) -> Source:
    """A dataset whose samples are their own indices, in their own order."""
    dataset = TensorDataset(torch.arange(samples))
    return open_source(setup_of(rank, world, **values), dataset, orders.sequential(samples))


def ids(source: Source, stop: int, start: int = 0) -> list[list[tuple[int, tuple[int, ...]]]]:
    steps = contents(source, stop, Position(start))
    return [[(lane, found) for lane, _, found in step] for step in steps]


# -- steps ----------------------------------------------------------------------------------------


def test_an_epoch_is_cut_into_steps_lanes_and_a_tail() -> None:
    source = numbers(11, lanes=2)
    assert (source.samples, source.steps_per_epoch) == (11, 3)
    assert ids(source, 4) == [
        [(0, (0, 1)), (1, (2, 3))],
        [(0, (4, 5)), (1, (6, 7))],
        [(0, (8, 9)), (1, (10,))],
        [(0, (0, 1)), (1, (2, 3))],
    ]


def test_steps_know_their_epoch() -> None:
    found = [(data.index, data.epoch, data.epoch_step, data.ends_epoch) for data, _ in batches(numbers(5), 4)]
    assert found == [(0, 0, 0, False), (1, 0, 1, True), (2, 1, 0, False), (3, 1, 1, True)]


def test_drop_last_leaves_the_tail_out() -> None:
    source = numbers(11, drop_last=True)
    assert source.steps_per_epoch == 2
    assert [data.epoch for data, _ in batches(source, 4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("start", [0, 1, 2, 3, 5])
def test_steps_from_any_position_are_those_of_the_whole_run(start: int) -> None:
    source = open_source(setup_of(), Drawing())
    assert contents(source, 6, Position(start)) == contents(source, 6)[start:]


@pytest.mark.requirement("000-P2-2", "002-K-3", "004-2.3-2", "001-D-7", "001-S2-5", "004-2.1-3", "004-2.3-1")
def test_a_rank_reads_its_own_lanes_only() -> None:
    assert ids(numbers(8, rank=0, world=2), 1) == [[(0, (0,)), (1, (1,))]]
    assert ids(numbers(8, rank=1, world=2), 1) == [[(2, (2,)), (3, (3,))]]


def test_a_tail_that_leaves_a_rank_without_samples_is_ragged_on_all_ranks() -> None:
    by_rank = [[(data.units, data.ragged) for data, _ in batches(numbers(6, rank, 2), 2)] for rank in range(2)]
    assert by_rank == [[((0, 1), False), ((0, 1), True)], [((2, 3), False), ((), True)]]


def test_fused_lanes_are_one_batch_of_the_rank() -> None:
    source = numbers(11, rank=1, world=2, same="samples", global_batch=8)
    assert ids(source, 2) == [[(1, (4, 5, 6, 7))], []]
    assert ids(numbers(11, world=2, same="samples", global_batch=8), 2)[1] == [(0, (8, 9, 10))]


# -- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_loader_processes_change_neither_batches_nor_draws(workers: int) -> None:
    here = open_source(setup_of(lanes=2), Drawing())
    ahead = open_source(setup_of(lanes=2, loader={"workers": workers}), Drawing())
    assert contents(ahead, 5) == contents(here, 5)


def test_draws_follow_from_seed_lane_and_place_alone() -> None:
    def drawn(**values: Any) -> list[list[Any]]:
        source = open_source(setup_of(**values), Drawing(8), orders.sequential(8))
        return [[data[1:] for _, data, _ in step] for step in contents(source, 4)]

    plain = drawn()
    assert drawn() == plain
    every = [tuple(map(str, lane)) for step in plain for lane in step]
    assert len(set(every)) == 16, "no lane, step or epoch draws what another does"
    assert drawn(seed=4) != plain


def test_reading_a_lane_draws_the_same_on_any_rank() -> None:
    alone = contents(open_source(setup_of(), Drawing()), 3)
    shared = [contents(open_source(setup_of(rank, 2), Drawing()), 3) for rank in range(2)]
    assert [one + other for one, other in zip(*shared, strict=True)] == alone


# -- datasets and orders --------------------------------------------------------------------------


def test_samples_are_fetched_at_once_where_the_dataset_can() -> None:
    class AtOnce(Drawing):
        def __getitems__(self, indices: list[int]) -> list[int]:
            calls.append(indices)
            return [10 * index for index in indices]

    calls: list[list[int]] = []
    source = open_source(setup_of(lanes=2), AtOnce(4), orders.sequential(4))
    assert contents(source, 1) == [[(0, [0, 10], (0, 1)), (1, [20, 30], (2, 3))]]
    assert calls == [[0, 1], [2, 3]]


def test_rows_of_a_tensor_dataset_are_those_of_torchs_collate() -> None:
    whole = TensorDataset(torch.randn(9, 3), torch.arange(9))
    part = Subset(Subset(whole, [8, 1, 4, 6, 2]), [3, 0, 4, 1])
    for dataset in (whole, part):
        source = open_source(setup_of(lanes=2), dataset, orders.sequential(4))
        [(_, found)] = list(batches(source, 1))
        for batch in found:
            expected = default_collate([dataset[index] for index in batch.ids])
            assert type(batch.data) is type(expected)
            assert all(map(torch.equal, batch.data, expected))


@dataclass
class Sentence:
    words: Tensor
    length: int


class BatchEncoding(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers return it."""


def test_a_collate_function_may_return_anything() -> None:
    dataset = TensorDataset(torch.arange(4))
    for make in (
        lambda samples: Sentence(torch.stack([x for (x,) in samples]), len(samples)),
        lambda samples: BatchEncoding(input_ids=torch.stack([x for (x,) in samples])),
        lambda samples: samples,
    ):
        source = open_source(setup_of(lanes=2), dataset, orders.sequential(4), make)
        [(_, first)] = list(batches(source, 1))
        assert type(first[0].data) is type(make([(torch.tensor(0),)]))
    assert first[1].data == [(torch.tensor(2),), (torch.tensor(3),)]


@pytest.mark.requirement("001-S2-8")
def test_an_order_may_repeat_and_leave_out_samples() -> None:
    dataset = TensorDataset(torch.arange(4))
    source = open_source(setup_of(lanes=1), dataset, lambda seed, epoch: [3, 3, 1 + epoch])
    assert source.samples == 3
    assert ids(source, 2) == [[(0, (3, 3, 1))], [(0, (3, 3, 2))]]


def test_an_order_of_another_length_is_refused_by_its_epoch() -> None:
    dataset = TensorDataset(torch.arange(8))
    source = open_source(setup_of(), dataset, lambda seed, epoch: range(8 - epoch))
    with pytest.raises(TaskError, match="gave 7 samples in epoch 1 but 8 at first"):
        contents(source, 4)


def test_an_order_is_made_once_in_an_epoch() -> None:
    epochs: list[int] = []

    def order(seed: int, epoch: int) -> range:
        epochs.append(epoch)
        return range(8)

    source = open_source(setup_of(), TensorDataset(torch.arange(8)), order)
    epochs.clear()
    contents(source, 4)
    assert epochs == [0, 1]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ([1, 2, 3], True),
        (TensorDataset(torch.zeros(2)), True),
        ({"a": 1}, True),
        (iter([1]), False),
        ({1, 2}, False),
        (Endless(), False),
        (object(), False),
    ],
)
def test_a_dataset_is_map_style_with_a_length_and_indices(dataset: Any, expected: bool) -> None:
    assert is_map_style(dataset) is expected
