"""Predictions of steps that are known by hand."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.scaling_prediction import predicted_rows, simulated_rows
from samestep.bench.statistics import Link
from samestep.bench.step_advice import advise, best_bucket, exposed_seconds, parse_link
from samestep.bench.step_model import BUCKET_BYTES, exchange_seconds, fit_step, link_of, straggling
from samestep.errors import PlanError
from samestep.reduce import tree_sum
from tests.unit.bench.scaling_rows import row_of

LINK = Link(latency=0.001, bandwidth=1e6)
SIZE = 1_000_000
"""Bytes of gradients: a second over this link."""


def test_buckets_are_as_the_exchange_cuts_them() -> None:
    assert BUCKET_BYTES == tree_sum.BUCKET_BYTES


def test_an_exchange_sends_slices_to_all_others_twice() -> None:
    """Four ranks: 6 messages of a quarter each, 0.25 s and 1 ms; in two buckets, 2 ms."""
    assert exchange_seconds(LINK, 4, SIZE) == pytest.approx(6 * 0.251)
    assert exchange_seconds(LINK, 4, SIZE, bucket=SIZE / 2) == pytest.approx(6 * 0.252)
    assert exchange_seconds(LINK, 1, SIZE) == 0.0


def test_a_line_through_sums_is_made_of_messages() -> None:
    """The line of four ranks: what `exchange_seconds` says, whatever the size."""
    line = Link(latency=6 * 0.001, bandwidth=1e6 * 4 / 6)
    found = link_of(4, line.latency, line.bandwidth)
    assert (found.latency, found.bandwidth) == pytest.approx((0.001, 1e6))
    assert exchange_seconds(found, 4, SIZE) == pytest.approx(line.seconds(SIZE))


def one(value: float) -> dict[str, float]:
    return {"median": value, "low": value, "high": value}


def made(mode: str, world: int, crowded: bool = False) -> dict[str, Any]:
    """A step of lanes of 2 s, an update of 1 s, an exchange of which half is hidden, and a wait."""
    mine = 1 if mode == "weak" else 8 // world
    exchange = 0.5 * exchange_seconds(LINK, world, SIZE)
    wait = 0.1 * straggling(world)
    messages = 2 * (world - 1)
    link = {"latency": messages * 0.001, "bandwidth": 1e6 * world / messages} if messages else None
    phases = {
        "data": 0.5 * mine,
        "compute": 1.5 * mine,
        "exchange": exchange,
        "update": 1.0,
        "wait": wait,
    }
    row = row_of(mode, world, sum(phases.values()))
    row |= {"phases": {name: one(value) for name, value in phases.items()}, "link": link}
    return {**row, "gradient_bytes": SIZE, "shares_cores": crowded}


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_a_model_that_made_the_measurements_predicts_the_rest(mode: str) -> None:
    rows = [made(mode, world) for world in (1, 2, 4)]
    found = predicted_rows(rows, [8], validate=False)
    assert [row["predicted_from"] for row in found] == [[1, 2, 4]]
    expected = made(mode, 8)
    assert found[0]["median"] == pytest.approx(expected["median"])
    assert found[0]["lanes"] == expected["lanes"]
    for name in ("exchange", "update", "wait"):
        assert found[0]["phases"][name]["median"] == pytest.approx(
            expected["phases"][name]["median"]
        )


def test_what_the_phases_leave_out_is_a_factor_and_a_range() -> None:
    rows = [made("weak", 1), made("weak", 2)]
    for row, factor in zip(rows, (1.1, 1.3), strict=True):
        row["median"] *= factor
    model = fit_step(rows)
    assert (model.correction.median, model.correction.low, model.correction.high) == pytest.approx(
        (1.2, 1.1, 1.3)
    )
    (found,) = predicted_rows(rows, [4], validate=False)
    plain = made("weak", 4)["median"]
    assert (found["median"], found["low"], found["high"]) == pytest.approx(
        (1.2 * plain, 1.1 * plain, 1.3 * plain)
    )


def test_a_prediction_is_made_without_the_world_that_it_is_compared_with() -> None:
    rows = [made("weak", world) for world in (1, 2, 4)]
    rows[2]["median"] *= 1.25
    (found,) = predicted_rows(rows, [4], validate=True)
    assert found["predicted_from"] == [1, 2]
    assert found["error"] == pytest.approx(1 / 1.25 - 1)
    assert found["inside"] is False


def test_ranks_that_share_cores_are_not_compared_and_predict_nothing() -> None:
    rows = [made("weak", 1), made("weak", 2), made("weak", 4, crowded=True)]
    (found,) = predicted_rows(rows, [4], validate=True)
    assert "error" not in found
    assert found["incomparable"].startswith("its 4 ranks shared cores")
    with pytest.raises(PlanError, match="two ranks or more with cores of their own"):
        predicted_rows([made("weak", 1), made("weak", 2, crowded=True)], [4], validate=False)


def test_strong_scaling_ends_where_lanes_do() -> None:
    rows = [made("strong", 1), made("strong", 2)]
    assert [row["world"] for row in predicted_rows(rows, [8, 16], validate=False)] == [8]


def test_what_cannot_be_asked_is_named() -> None:
    rows = [made("weak", 1), made("weak", 2)]
    with pytest.raises(PlanError, match="--predict has 2, which is measured"):
        predicted_rows(rows, [2], validate=False)
    with pytest.raises(PlanError, match="--predict has none of those"):
        predicted_rows(rows, [4], validate=True)
    with pytest.raises(PlanError, match="a measured world of two ranks or more,"):
        predicted_rows(rows[:1], [4], validate=False)


def test_a_link_is_a_bandwidth_and_a_latency() -> None:
    found = parse_link("25GB/s, 5us")
    assert (found.latency, found.bandwidth) == pytest.approx((5e-6, 25e9))
    found = parse_link("100MB/s,0.2ms")
    assert (found.latency, found.bandwidth) == pytest.approx((0.2e-3, 1e8))
    for text in ("25", "25GB/s", "0GB/s,5us", "1.2.3GB/s,5us", "nanGB/s,5us"):
        with pytest.raises(PlanError, match="give a bandwidth and a latency"):
            parse_link(text)


def test_lanes_are_added_until_the_exchange_is_a_tenth() -> None:
    """8 ranks, 1 MB in one bucket: 14 * (1 ms + 0.125 s) = 1.764 s, of which a lane hides nothing."""
    found = advise(LINK, 8, lane=1.0, update=0.5, size=SIZE)
    assert found.exchange == pytest.approx(1.764)
    assert found.exposed.median == pytest.approx(1.764)
    # (9 * 1.764 - 0.5) / 1 = 15.376
    assert found.lanes_of_rank == 16
    assert found.efficiency.median == pytest.approx(16.5 / (16.5 + 1.764))
    assert found.reaches_goal


def test_a_backward_pass_hides_all_but_the_last_bucket() -> None:
    size = 4 * BUCKET_BYTES
    link = Link(latency=0.0, bandwidth=BUCKET_BYTES)
    whole = 2 * 4 / 2
    assert exchange_seconds(link, 2, size) == pytest.approx(whole)
    assert exposed_seconds(link, 2, lane=3.0, size=size) == pytest.approx(whole - 2.0)
    assert exposed_seconds(link, 2, lane=30.0, size=size) == pytest.approx(1.0), "one of four"


def test_the_best_bucket_costs_least() -> None:
    """sqrt(1e8 * 1e-5 * 8 * 1e9) = sqrt(8e12)."""
    link = Link(latency=1e-5, bandwidth=1e9)
    best = best_bucket(link, 8, 100_000_000)
    assert best == pytest.approx(2_828_427, abs=1)

    def cost(bucket: float) -> float:
        return link.latency * 1e8 / bucket + bucket / 8 / link.bandwidth

    assert cost(best) < min(cost(best * 1.1), cost(best / 1.1))
    assert best_bucket(link, 8, 1000) == 1000, "no smaller than what there is"


def test_simulated_rows_are_marked_and_never_strong() -> None:
    rows = [made("strong", 1), made("weak", 1)]
    found = simulated_rows(rows, [8, 64], LINK, "1MB/s,1ms")
    assert [(row["world"], row["mode"], row["simulated"]) for row in found] == [
        (8, "weak", "1MB/s,1ms"), (64, "weak", "1MB/s,1ms"),
    ]  # fmt: skip
    assert all(row["predicted"] for row in found)
    assert found[0]["lanes"] == 8 * found[0]["advice"]["lanes_of_rank"]
    with pytest.raises(PlanError, match="shared cores"):
        simulated_rows([made("weak", 2, crowded=True)], [8], LINK, "")
