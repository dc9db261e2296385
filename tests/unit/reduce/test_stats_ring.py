"""Numbers that replays of a graph write one after the other; here the ring writes once by hand."""

from __future__ import annotations

import math

import torch

from samestep.reduce.stats_ring import StepStatsRing

CPU = torch.device("cpu")


def test_measured_numbers_are_put_among_those_that_stay() -> None:
    ring = StepStatsRing(3, 7, CPU)
    ring.write([0.0, None, torch.tensor([1.5, 2.5]), torch.tensor(7), 4.0, torch.tensor(0.25)])
    found = ring.next_row()
    numbers = found.fill(found.measured.tolist())
    assert numbers[0] == 0.0
    assert math.isnan(numbers[1])
    assert numbers[2:] == [1.5, 2.5, 7.0, 4.0, 0.25]
    assert [float(value) for value in found.unread()][2:] == numbers[2:]


def test_rows_last_until_as_many_others_have_been_written() -> None:
    ring = StepStatsRing(3, 2, CPU)
    found = []
    for number in range(7):
        ring.write([torch.tensor(float(number)), 5.0])
        found.append(ring.next_row())
    kept = found[-3:]
    assert [row.fill(row.measured.tolist()) for row in kept] == [[4.0, 5.0], [5.0, 5.0], [6.0, 5.0]]


def test_a_float64_keeps_its_bits_beside_others() -> None:
    ring = StepStatsRing(2, 5, CPU)
    third, tenth = torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.1)
    ring.write([tenth, third])
    found = ring.next_row()
    assert found.fill(found.measured.tolist()) == [float(tenth), 1 / 3]
