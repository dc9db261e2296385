"""What lanes cost, which number of them is recommended, and how that is shown."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import OutputError, PlanError, TextError
from samestep.lane_tuning.report import conclusion, heading, rows, write_html
from samestep.lane_tuning.result import LaneCosts, Measured


def one(lanes: int, *ms: float, world: int = 1, **more: Any) -> Measured:
    seconds = tuple(value / 1e3 for value in ms)
    return Measured(world, lanes, 64 // lanes, "cpu, 1 thread", seconds=seconds, **more)


def costs(*measured: Measured, now: int = 8) -> LaneCosts:
    return LaneCosts(64, now, measured)


def test_the_cost_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was twice as slow in the second round, for all.
    found = costs(one(1, 10, 20, 10), one(2, 11, 23, 10.5))
    assert [found.cost(m) for m in found.measured] == [1.0, pytest.approx(1.1)]


def test_the_most_lanes_within_the_limit_are_recommended() -> None:
    found = costs(one(1, 10), one(2, 10.2), one(4, 10.9), one(8, 11.2), one(16, 14)).recommend()
    assert (found.lanes, found.parallel) == (4, None)
    assert found.cost == pytest.approx(1.09)
    assert found.why == (
        "it is the most whose steps take at most 1.1 times those of the fastest choice (1.09), and the "
        "run can use any number of ranks up to 4"
    )


def test_more_lanes_may_be_the_fastest() -> None:
    found = costs(one(1, 20), one(8, 10), one(16, 10.5))
    assert found.recommend().lanes == 16
    assert found.cost(found.measured[0]) == 2.0


def test_one_lane_is_said_to_allow_one_rank() -> None:
    assert "but the run can use one rank only" in costs(one(1, 1), one(2, 2)).recommend().why


def test_a_choice_must_run_in_every_world_and_is_compared_with_those_that_do() -> None:
    found = costs(
        one(1, 10), one(2, 20), one(4, 21), one(8, 40),
        one(2, 12, world=2), one(4, 12.5, world=2), one(8, 12, world=2),
    )  # fmt: skip
    assert found.recommend().lanes == 4
    assert found.recommend().cost == pytest.approx(1.05)
    assert "fastest choice that runs on 1 and 2 ranks" in found.recommend().why
    assert found.cost(found.measured[2]) == pytest.approx(2.1), "the table compares within a world"


def test_without_a_choice_within_the_limit_the_nearest_is_recommended() -> None:
    found = costs(
        one(4, 10), one(8, 12), one(16, 20), one(4, 15, world=4), one(8, 11, world=4),
        one(16, 10, world=4),
    ).recommend()  # fmt: skip
    assert (found.lanes, found.cost) == (8, pytest.approx(1.2))
    assert "no choice takes at most 1.1 times" in found.why
    assert "1 and 4 ranks, and this one comes nearest (1.20)" in found.why


def test_the_width_comes_with_the_lanes() -> None:
    found = costs(
        one(8, 20, parallel=1), one(8, 10, parallel=8), one(8, 10.4, parallel=4),
        one(8, 9, parallel=1, world=2), one(8, 9.1, parallel=4, world=2),
    ).recommend()  # fmt: skip
    assert (found.lanes, found.parallel) == (8, 8), "where ranks have 4 lanes, 8 at once are 4"


def test_what_failed_is_not_recommended() -> None:
    failed = one(16, failed="a lane has 1 sample")
    found = costs(one(1, 10), one(2, 10), failed)
    assert found.recommend().lanes == 2
    assert found.cost(failed) is None
    with pytest.raises(PlanError, match="could be measured: 16 lanes: a lane has 1 sample"):
        costs(failed)
    with pytest.raises(PlanError, match="could be measured on 1 and 2 ranks"):
        costs(one(1, 10), one(4, failed="x", world=2)).recommend()


def test_json_has_every_number() -> None:
    found = costs(one(1, 10, 12), one(2, 11, 11, peak_bytes=5), one(4, failed="no memory"))
    document = json.loads(json.dumps(found.as_json()))
    assert document["recommended"] == asdict(found.recommend())
    assert (document["now"], document["global_batch"], document["limit"]) == (8, 64, 1.1)
    first, second, third = document["measured"]
    assert (first["ms"], first["ms_of_rounds"], first["lane_batch"]) == (11, [10, 12], 64)
    assert (second["peak_bytes"], second["most_ranks"]) == (5, 2)
    assert (third["ms"], third["cost"], third["failed"]) == (None, None, "no memory")


def test_ranks_hand_over_what_they_measured() -> None:
    given = one(2, 10, 11, parallel=2, notes=("speed.graph: replayed",), peak_bytes=1)
    assert Measured.read(json.loads(json.dumps(asdict(given)))) == given
    for wrong in (None, [], {}, {"seconds": 1, "notes": []}, {**asdict(given), "more": 1}):
        with pytest.raises(TextError):
            Measured.read(wrong)


def test_the_table_leaves_out_columns_that_say_nothing() -> None:
    found = costs(one(1, 10, 12, 9), one(2, 11.5, 11, 12))
    header, body = rows(found)
    assert header == ["lanes x samples", "ms per step", "spread", "cost", "worlds"]
    assert body[1] == ["2 x 32", "11.5", "11.0-12.0", "1.15", "1-2"]
    assert heading(found) == "global batch 64 on cpu, 1 thread; medians of 3 round(s)"
    on_gpu = costs(one(4, 1.5, world=2, parallel=2, peak_bytes=3 * 2**29))
    header, body = rows(on_gpu)
    assert dict(zip(header, body[0], strict=True)) == {
        "ranks": "2", "lanes x samples": "4 x 16", "at once": "2", "ms per step": "1.500",
        "spread": "1.500-1.500", "cost": "1.00", "GPU memory": "1.50 GB", "worlds": "1-4",
    }  # fmt: skip


def test_the_conclusion_compares_with_the_config() -> None:
    found = costs(one(1, 10), one(2, 10, parallel=2))
    assert "Recommended: lanes: 2, speed.parallel_lanes: 2: it is the most" in conclusion(found)
    assert conclusion(found).endswith("The config has 8; other lanes are another run.")
    assert conclusion(replace(found, now=2)).endswith("up to 2. The config has it.")


def test_the_page_is_self_contained_and_replaces_no_other_file(tmp_path: Path) -> None:
    found = costs(
        one(1, 10), one(8, 10.5), one(16, failed="<no> memory"), one(8, 6, world=2, notes=("a < b",))
    )  # fmt: skip
    page = tmp_path / "pages" / "lanes.html"
    write_html(found, "<mine>: what lanes cost", page)
    text = page.read_text()
    assert "<title>&lt;mine&gt;: what lanes cost</title>" in text
    assert "16 lanes: left out: &lt;no&gt; memory" in text
    assert "8 lanes: a &lt; b" in text
    assert "8 x 8" in text
    assert "recommended: 8" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    write_html(found, "again", page)
    page.write_text("mine")
    with pytest.raises(OutputError, match="is no page of samestep"):
        write_html(found, "again", page)


def test_a_recommendation_that_noise_may_have_made_says_so() -> None:
    noisy = costs(one(16, 10.0, 12.0), one(8, 11.0, 13.0))
    assert noisy.overlap(16, 8)
    assert "noise may decide between them" in conclusion(noisy)
    clear = costs(one(16, 10.0, 10.1), one(8, 12.0, 12.1))
    assert not clear.overlap(16, 8)
    assert "noise" not in conclusion(clear)
