"""A dataset read once, in its own order, whatever lanes share it."""

from __future__ import annotations

from typing import Any

import torch

from samestep.data.sequential import SequentialSource
from tests.unit.data.sources import setup_of
from tests.unit.data.test_map_style import Drawing


def rounds(rank: int = 0, world: int = 1, **values: Any) -> list[list[tuple[int, Any]]]:
    """By round, each batch as (its number, its samples with what they drew)."""
    source = SequentialSource(setup_of(rank, world, **values), Drawing(11), "data", None)
    entered: list[int] = []
    found = []
    for batches in source.rounds(entered.append):
        found.append(
            [(entered[-1], list(zip(*map(torch.Tensor.tolist, b.data)))) for b in batches]  # noqa: B905
        )
    return found


def test_every_sample_is_read_once_in_its_order() -> None:
    found = rounds(lanes=2)
    assert [number for step in found for number, _ in step] == [0, 1, 2, 3, 4, 5]
    samples = [index for step in found for _, batch in step for index, *_ in batch]
    assert samples == list(range(11))
    assert [len(batch) for step in found for _, batch in step] == [2, 2, 2, 2, 2, 1]


def test_a_batch_draws_by_its_number_however_the_work_is_shared() -> None:
    """Two lanes of two, or four lanes of two: the same numbered batches."""
    few = {number: batch for step in rounds(lanes=2) for number, batch in step}
    many = {number: batch for step in rounds(lanes=4, global_batch=8) for number, batch in step}
    assert few == many
    by_rank = [rounds(rank, 2, lanes=4, global_batch=8) for rank in range(2)]
    shared = {number: batch for ranks in by_rank for step in ranks for number, batch in step}
    assert shared == many


def test_loader_processes_change_nothing() -> None:
    assert rounds(lanes=2, loader={"workers": 2}) == rounds(lanes=2)


def test_the_stream_is_entered_before_each_batch_is_given() -> None:
    events: list[Any] = []
    source = SequentialSource(setup_of(lanes=2), Drawing(4), "data", None)
    for batches in source.rounds(lambda number: events.append(("enter", number))):
        events.extend(("batch", batch.ids) for batch in batches)
    assert events == [("enter", 0), ("batch", (0, 1)), ("enter", 1), ("batch", (2, 3))]
