"""Samples, lanes and ranks: nothing lost, nothing twice."""

import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from samestep.errors import PlanError
from samestep.lanes.plan import BatchPlan, EpochPlan, deal_lanes


@st.composite
def worlds(draw):
    lanes = draw(st.integers(1, 16))
    return lanes, draw(st.integers(1, lanes))


@st.composite
def weighted_worlds(draw):
    lanes, world = draw(worlds())
    weight = st.floats(0.01, 100.0)
    return lanes, draw(st.lists(weight, min_size=world, max_size=world))


def visited(plan, assignment):
    """Every position in the order of steps, ranks and lanes."""
    return [
        position
        for step in range(plan.steps)
        for lanes in assignment
        for lane in lanes
        for position in plan.positions(step, range(lane, lane + 1))
    ]


@pytest.mark.requirement("000-P5-2", "002-C-5", "004-KR-5", "004-5.1-3")
@given(worlds(), st.integers(1, 6), st.integers(1, 300))
def test_every_sample_is_visited_exactly_once_per_epoch(world, lane_batch, samples):
    lanes, ranks = world
    plan = EpochPlan(samples, BatchPlan(lanes * lane_batch, lanes))
    assert visited(plan, deal_lanes(lanes, ranks)) == list(range(samples))


@given(worlds(), st.integers(1, 6), st.integers(1, 300))
def test_drop_last_visits_exactly_the_whole_batches(world, lane_batch, samples):
    lanes, ranks = world
    batch = BatchPlan(lanes * lane_batch, lanes)
    assume(samples >= batch.global_batch)
    plan = EpochPlan(samples, batch, drop_last=True)
    whole = samples // batch.global_batch * batch.global_batch
    assert visited(plan, deal_lanes(lanes, ranks)) == list(range(whole))


@given(worlds(), st.integers(1, 6), st.integers(1, 300))
def test_lanes_together_get_what_each_gets_by_itself(world, lane_batch, samples):
    lanes, ranks = world
    plan = EpochPlan(samples, BatchPlan(lanes * lane_batch, lanes))
    for step in range(plan.steps):
        for mine in deal_lanes(lanes, ranks):
            each = [p for lane in mine for p in plan.positions(step, range(lane, lane + 1))]
            assert list(plan.positions(step, mine)) == each


@given(st.integers(1, 16), st.integers(1, 6), st.integers(1, 300))
def test_the_tail_leaves_at_most_one_lane_partly_filled(lanes, lane_batch, samples):
    plan = EpochPlan(samples, BatchPlan(lanes * lane_batch, lanes))
    sizes = [len(plan.positions(plan.steps - 1, range(n, n + 1))) for n in range(lanes)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(0 < size < lane_batch for size in sizes) <= 1


@pytest.mark.parametrize(
    ("drop_last", "places"), [(False, [(0, 0), (0, 1), (0, 2), (1, 0)]), (True, [(0, 0), (0, 1), (1, 0), (1, 1)])]
)
def test_a_step_of_the_run_is_located_in_its_epoch(drop_last, places):
    plan = EpochPlan(10, BatchPlan(4, 2), drop_last)
    assert [plan.locate(step) for step in range(4)] == places


@given(worlds())
def test_lanes_without_weights_are_dealt_evenly(world):
    lanes, ranks = world
    dealt = deal_lanes(lanes, ranks)
    counts = [len(part) for part in dealt]
    assert [lane for part in dealt for lane in part] == list(range(lanes))
    assert len(counts) == ranks
    assert max(counts) - min(counts) <= 1


@given(weighted_worlds())
def test_weighted_lanes_are_contiguous_complete_and_at_least_one_each(world):
    lanes, weights = world
    dealt = deal_lanes(lanes, len(weights), weights)
    assert len(dealt) == len(weights)
    assert all(len(part) >= 1 for part in dealt)
    assert [lane for part in dealt for lane in part] == list(range(lanes))


@given(weighted_worlds())
def test_a_heavier_rank_never_gets_fewer_lanes(world):
    lanes, weights = world
    counts = [len(part) for part in deal_lanes(lanes, len(weights), weights)]
    by_weight = sorted(zip(weights, counts, strict=True))
    for (lighter, fewer), (heavier, more) in pairwise(by_weight):
        assert lighter == heavier or fewer <= more


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_weights_that_sum_to_the_lanes_are_the_counts(weights):
    dealt = deal_lanes(sum(weights), len(weights), weights)
    assert [len(part) for part in dealt] == weights


@pytest.mark.parametrize(
    ("lanes", "weights", "counts"),
    [
        (8, [3, 1], [6, 2]),
        (8, [0.3, 0.1], [6, 2]),
        (8, [1, 3], [2, 6]),
        (8, [1000, 1], [7, 1]),
        (4, [5, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_lanes_follow_the_weights(lanes, weights, counts):
    assert [len(part) for part in deal_lanes(lanes, len(weights), weights)] == counts


def numbers_after(words, message):
    listed = re.search(words + r": (\d+)(?: or (\d+))?", message)
    return [int(number) for number in listed.groups() if number]


@pytest.mark.requirement("004-BS-1")
@given(st.integers(1, 200), st.integers(1, 200))
def test_a_batch_that_cannot_be_cut_names_the_nearest_that_can(global_batch, lanes):
    assume(lanes <= global_batch and global_batch % lanes)
    with pytest.raises(PlanError) as caught:
        BatchPlan(global_batch, lanes)
    message = str(caught.value)
    below, above = numbers_after("Nearest batches", message)
    assert below < global_batch < above == below + lanes
    assert BatchPlan(below, lanes).lane_batch + 1 == BatchPlan(above, lanes).lane_batch
    fewer, more = numbers_after("nearest lanes", message)
    assert fewer < lanes < more
    assert [n for n in range(fewer, more + 1) if global_batch % n == 0] == [fewer, more]


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: BatchPlan(4, 8), "Set lanes to 4 or fewer, or global_batch to 8 or more"),
        (lambda: BatchPlan(0, 1), "must both be at least 1"),
        (lambda: BatchPlan(8, 0), "must both be at least 1"),
        (lambda: BatchPlan(100, 8), "Nearest batches: 96 or 104; nearest lanes: 5 or 10"),
        (lambda: EpochPlan(0, BatchPlan(8, 8)), "0 samples give no step at global_batch 8. Use"),
        (
            lambda: EpochPlan(7, BatchPlan(8, 8), drop_last=True),
            "with drop_last: true. Use a smaller global_batch, more data, or drop_last: false",
        ),
        (lambda: deal_lanes(8, 9), "Start 8 ranks or fewer, or set lanes to 9 or more"),
        (lambda: deal_lanes(8, 2, [1, 1, 1]), "has 3 entries but the run has 2 ranks"),
        (lambda: deal_lanes(10**12, 2), "1000000000000 lanes are more than 1000000"),
        (lambda: BatchPlan(999_999_937, 8), "nearest lanes: 1 or 999999937"),
        (lambda: deal_lanes(8, 2, [1, 0]), "lane_weights [1, 0] must all be above zero"),
    ],
)
def test_an_impossible_plan_says_what_to_do(make, advice):
    with pytest.raises(PlanError, match=re.escape(advice)):
        make()


def test_a_million_ranks_are_dealt_at_once():
    dealt = deal_lanes(1_000_000, 999_999)
    assert [len(dealt[0]), len(dealt[1]), dealt[-1]] == [2, 1, range(999_999, 1_000_000)]
