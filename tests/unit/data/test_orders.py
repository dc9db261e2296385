"""Orders are functions of (seed, epoch), and of nothing else."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.orders import by_lane, class_balanced, grouped, lane_part, sequential, shuffled, weighted
from samestep.errors import TaskError

seeds = st.integers(0, 2**63 - 1)

RANDOM_ORDERS = {
    "shuffled": lambda: shuffled(64),
    "weighted": lambda: weighted(range(1, 65)),
    "class_balanced": lambda: class_balanced([i % 3 for i in range(64)]),
    "grouped": lambda: grouped([i // 4 for i in range(64)]),
    "by_lane": lambda: by_lane(64, 16, 4),
}
random_orders = pytest.mark.parametrize("make", RANDOM_ORDERS.values(), ids=RANDOM_ORDERS)


def test_the_order_of_existing_runs_does_not_change():
    assert list(shuffled(10)(0, 0)) == [4, 8, 2, 7, 6, 5, 3, 9, 1, 0]
    assert list(by_lane(13, 6, 3)(5, 2)) == [0, 1, 5, 7, 9, 10, 3, 2, 6, 4, 8, 11]


@given(st.integers(1, 200), seeds, st.integers(0, 1000))
def test_shuffled_gives_every_sample_once(samples, seed, epoch):
    assert sorted(shuffled(samples)(seed, epoch)) == list(range(samples))


def test_sequential_gives_the_samples_as_they_lie_in_every_epoch():
    assert [list(sequential(4)(9, epoch)) for epoch in (0, 5)] == [[0, 1, 2, 3]] * 2


@random_orders
def test_an_order_depends_on_seed_and_epoch_alone(make):
    expected = list(make()(7, 3))
    order = make()
    order(7, 2)
    random.seed(1)
    np.random.seed(1)
    assert list(order(7, 3)) == expected


@random_orders
def test_drawing_an_order_leaves_the_global_generator_alone(make):
    np.random.seed(5)
    expected = np.random.random_sample()
    np.random.seed(5)
    make()(0, 0)
    assert np.random.random_sample() == expected


@random_orders
def test_epochs_and_seeds_all_differ(make):
    order = make()
    assert len({tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_weighted_draws_in_proportion():
    counts = np.bincount(weighted([1, 2, 3, 4], samples=20_000)(0, 0), minlength=4)
    assert counts / 20_000 == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.015)


def test_weighted_never_draws_a_sample_of_weight_zero():
    assert set(weighted([0, 1, 0, 1, 0], samples=2_000)(0, 0)) == {1, 3}


def test_weighted_draws_as_many_as_there_are_samples_unless_told():
    assert len(weighted([1, 1, 1])(0, 0)) == 3
    assert len(weighted([1, 1, 1], samples=8)(0, 0)) == 8


@pytest.mark.parametrize("weights", [[1, -1], [0, 0], [], [[1, 2], [3, 4]], [float("nan"), 1]])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(TaskError, match="one weight per sample, none negative, not all zero"):
        weighted(weights)


def test_class_balanced_draws_every_class_equally_often():
    labels = ["rare"] * 10 + ["some"] * 90 + ["many"] * 900
    drawn = [labels[i] for i in class_balanced(labels, samples=12_000)(0, 0)]
    shares = [drawn.count(label) / 12_000 for label in ("rare", "some", "many")]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.02)


def test_class_balanced_draws_each_member_of_a_class_equally_often():
    counts = np.bincount(class_balanced([0, 0, 1], samples=12_000)(0, 0), minlength=3)
    assert counts / 12_000 == pytest.approx([0.25, 0.25, 0.5], abs=0.02)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=60), seeds)
def test_grouped_gives_every_sample_once_and_keeps_groups_together(groups, seed):
    order = list(grouped(groups)(seed, 0))
    assert sorted(order) == list(range(len(groups)))
    visited = [groups[i] for i in order]
    entered = sum(a != b for a, b in zip([None, *visited], visited, strict=False))
    assert entered == len(set(groups))


def test_grouped_shuffles_the_groups_and_their_insides():
    order = grouped([0] * 8 + [1] * 8)
    drawn = [list(order(0, epoch)) for epoch in range(20)]
    assert {row[0] < 8 for row in drawn} == {True, False}
    assert len({tuple(i for i in row if i < 8) for row in drawn}) > 10


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40), seeds)
def test_by_lane_gives_each_lane_samples_of_its_own_part(lanes, lane_batch, more, seed):
    samples = lanes * lane_batch + more
    order = by_lane(samples, lanes * lane_batch, lanes)(seed, 3)
    assert len(order) == samples // lanes // lane_batch * lanes * lane_batch
    assert len(set(order)) == len(order), "no sample comes twice"
    for position, sample in enumerate(order):
        lane = position // lane_batch % lanes
        assert sample in lane_part(samples, lanes, lane)


def test_by_lane_leaves_out_other_samples_in_every_epoch():
    order = by_lane(7, 4, 2)
    assert {len(order(0, epoch)) for epoch in range(9)} == {4}
    assert set().union(*(set(order(0, epoch)) for epoch in range(9))) == set(range(7))


def test_by_lane_refuses_lanes_without_a_whole_batch():
    with pytest.raises(TaskError, match="each of 4 lanes has 2 of them, fewer than its 3"):
        by_lane(11, 12, 4)
