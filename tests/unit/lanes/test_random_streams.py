"""Streams of random numbers: stable, and apart from each other."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch

from samestep.lanes.random_streams import BETWEEN, DATA, INIT, MODEL, RngStreams, derive, order_rng, reseed, seed_at

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


def test_the_streams_of_existing_runs_do_not_change() -> None:
    assert derive(0) == 8493733112532773764
    assert derive(7, "model", 3) == 17879519764698398508
    assert seed_at(1, 2, 3) == 9549599518208801304


def test_roots_differ_by_seed_and_by_every_part_of_the_key() -> None:
    keys: list[tuple[str | int, ...]] = [(name, lane) for name in (MODEL, DATA, BETWEEN, INIT) for lane in range(8)]
    roots = {derive(seed, *key) for seed in range(4) for key in [(), *keys]}
    assert len(roots) == 4 * 33
    assert all(0 <= root < 2**64 for root in roots)


def test_a_key_in_two_parts_is_not_the_key_of_both() -> None:
    assert derive(1, 2, 3) == derive(1, 2, 3)
    assert derive(1, 23) != derive(1, 2, 3)
    assert derive(12, 3) != derive(1, 23)


def test_positions_differ_also_in_the_low_half_which_is_all_that_numpy_takes() -> None:
    root = derive(0, MODEL, 0)
    positions = list(product(range(40), range(40)))
    assert len({seed_at(root, *position) & 0xFFFFFFFF for position in positions}) == 1600
    assert seed_at(root) == root
    assert seed_at(root, 0, 0) == root


def test_seeds_stay_within_64_bits() -> None:
    assert 0 <= seed_at(2**64 - 1, 2**31, 2**31) < 2**64


def test_an_epochs_order_draws_from_a_generator_of_its_own() -> None:
    reseed(1)
    before = draw()
    reseed(1)
    first = order_rng(0, 1).permutation(100).tolist()
    assert draw() == before
    assert order_rng(0, 1).permutation(100).tolist() == first
    assert order_rng(0, 2).permutation(100).tolist() != first
    assert order_rng(1, 1).permutation(100).tolist() != first


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**64 - 1])
def test_python_and_numpy_are_as_their_own_functions_seed_them(seed: int) -> None:
    def normals() -> tuple[float, ...]:
        return random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()

    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    state, expected = random.getstate(), normals()
    assert random.getstate()[2] is not None, "of two normals drawn at once, the second is kept"
    reseed(seed)
    assert random.getstate() == state
    assert normals() == expected


@pytest.mark.parametrize("seed", [0, 5, 2**32, 2**64 - 1])
def test_a_seed_puts_all_three_generators_to_one_place(seed: int) -> None:
    reseed(seed)
    first = draw()
    draw()
    reseed(seed)
    assert draw() == first


def test_generators_that_are_given_are_seeded_too() -> None:
    generator = torch.Generator()
    reseed(9, [generator])
    first = torch.rand(2, generator=generator)
    reseed(9, [generator])
    assert torch.equal(torch.rand(2, generator=generator), first)


def test_streams_are_entered_by_key_and_position() -> None:
    streams = RngStreams(3, CPU)
    found = []
    for at in [(0,), (1,), (0, 1), (0,)]:
        streams.enter(MODEL, 2, at=at)
        found.append(draw())
    assert found[0] == found[3]
    assert len(set(found)) == 3
    streams.enter(MODEL, 3, at=(0,))
    assert draw() not in found
    RngStreams(4, CPU).enter(MODEL, 2, at=(0,))
    assert draw() not in found
