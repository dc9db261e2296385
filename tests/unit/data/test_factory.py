"""Which source a dataset becomes, and a first epoch read outside of training."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from samestep.data.factory import first_epoch, open_source
from samestep.data.iterable import StreamSource
from samestep.data.map_style import MapSource
from samestep.data.orders import shuffled
from tests.unit.data.sources import Letters, batches, setup_of


def test_a_dataset_with_a_length_is_shuffled_unless_it_has_an_order() -> None:
    setup = setup_of(global_batch=10, lanes=1, seed=3)
    source = open_source(setup, TensorDataset(torch.arange(10)))
    assert isinstance(source, MapSource)
    [(_, [batch])] = list(batches(source, 1))
    assert list(batch.ids) == list(shuffled(10)(3, 0))


def test_anything_else_is_read_as_streams() -> None:
    source = open_source(setup_of(), Letters(1, 1, 1, 1))
    assert isinstance(source, StreamSource)
    assert (source.samples, source.steps_per_epoch, source.has_streams) == (None, None, True)


def read(dataset: Any, **values: Any) -> list[tuple[int, int, float]]:
    """Each batch of the first epoch: its lane, its size, and a number drawn then."""
    setup = setup_of(**values)
    source = open_source(setup, dataset, collate=list)
    return [(batch.lane, len(batch), torch.rand(()).item()) for batch in first_epoch(source, setup, "measuring")]


def test_the_first_epoch_ends_with_the_data() -> None:
    sizes = [found[:2] for found in read(TensorDataset(torch.arange(7)), lanes=2)]
    assert sizes == [(0, 2), (1, 2), (0, 2), (1, 1)]
    assert [found[:2] for found in read(Letters(3, 2), lanes=2)] == [(0, 2), (1, 2), (0, 1)]


def test_streams_without_an_end_are_read_as_far_as_the_run_goes() -> None:
    endless = Letters(10**9, 10**9)
    assert len(read(endless, lanes=2, epochs=None, steps=3)) == 6
    assert len(read(endless, lanes=2, epochs=None, steps=3, steps_per_epoch=2)) == 4


def test_draws_in_the_first_epoch_follow_from_lane_and_place() -> None:
    drawn = [found[2] for found in read(TensorDataset(torch.arange(8)), lanes=2)]
    assert len(set(drawn)) == 4
    setup = setup_of(lanes=2)
    setup.rng.enter("measuring", 1, at=(1,))
    assert torch.rand(()).item() == drawn[3]
