"""What lanes cost, which number of them is recommended, and how that is shown."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from samestep.bench.document import Document
from samestep.bench.presentation import write_html
from samestep.bench.tuning.lanes import LaneCosts
from samestep.bench.tuning.timed import Timed
from samestep.errors import OutputError, PlanError
from samestep.words import counted


def one(lanes: int, *ms: float, world: int = 1, width: int | None = None, **more: Any) -> Timed:
    """Times of two rounds or more; of a single number, four rounds of it."""
    seconds = tuple(value / 1e3 for value in (ms if len(ms) != 1 else ms * 4))
    label = counted(lanes, "lane") + (f", {width} at once" if width else "")
    return Timed(label, world, lanes=lanes, global_batch=64, seconds=seconds, **more)


def costs(*measured: Timed, now: int = 8) -> LaneCosts:
    return LaneCosts(now, measured)


def test_the_cost_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was twice as slow in the second round, for all.
    found = costs(one(1, 10, 20, 10), one(2, 11, 23, 10.5))
    assert [found.cost(m) for m in found.measured] == [1.0, pytest.approx(1.1)]


def test_the_most_lanes_that_nothing_is_clearly_faster_than_are_recommended() -> None:
    found = costs(one(1, 10), one(2, 10.2), one(4, 10.9), one(8, 11.2), one(16, 14)).best
    assert (found.lanes, found.label) == (4, "4 lanes")
    assert found.cost == pytest.approx(1.09)
    assert found.why == (
        "no other choice is 1.1 times as fast (1.09 of the fastest), and the run can use any number of ranks up to 4"
    )


def test_noise_does_not_decide() -> None:
    noisy = costs(one(8, 10.0, 12.0, 13.0, 9.0), one(16, 11.0, 13.0, 14.0, 10.0))
    assert noisy.best.lanes == 16
    clear = costs(one(8, 10.0, 10.1, 10.0, 10.1), one(16, 12.0, 12.1, 12.0, 12.1))
    assert clear.best.lanes == 8


def test_more_lanes_may_be_the_fastest() -> None:
    found = costs(one(1, 20), one(8, 10), one(16, 10.3))
    assert found.best.lanes == 16
    assert found.cost(found.measured[0]) == 2.0


def test_one_lane_is_said_to_allow_one_rank() -> None:
    assert "but the run can use one rank only" in costs(one(1, 1), one(2, 2)).best.why


def test_a_choice_must_run_in_every_world_and_is_compared_with_those_that_do() -> None:
    found = costs(
        one(1, 10), one(2, 20), one(4, 20.6), one(8, 40),
        one(2, 12, world=2), one(4, 12.4, world=2), one(8, 12, world=2),
    )  # fmt: skip
    assert found.best.lanes == 4
    assert found.best.cost == pytest.approx(12.4 / 12)
    assert "times as fast on 1 and 2 ranks" in found.best.why
    assert found.cost(found.measured[2]) == pytest.approx(2.06), "the table compares within a world"


def test_where_worlds_disagree_the_nearest_is_recommended() -> None:
    found = costs(
        one(4, 10), one(8, 12), one(16, 20), one(4, 15, world=4), one(8, 11, world=4), one(16, 10, world=4)
    ).best
    assert (found.lanes, found.cost) == (8, pytest.approx(1.2))
    assert "fastest on each of 1 and 4 ranks, and this one comes nearest (1.20)" in found.why


def test_the_width_comes_with_the_lanes() -> None:
    found = costs(one(8, 20, width=1), one(8, 10, width=8), one(8, 10.4, width=4), one(4, 10))
    assert found.best.label == "8 lanes, 8 at once"


def test_what_failed_is_not_recommended() -> None:
    failed = Timed("16 lanes", failed="a lane has 1 sample")
    found = costs(one(1, 10), one(2, 10), failed)
    assert found.best.lanes == 2
    assert found.cost(failed) is None
    with pytest.raises(PlanError, match="could be measured: 16 lanes: a lane has 1 sample"):
        costs(failed)
    with pytest.raises(PlanError, match="could be measured on 1 and 2 ranks"):
        _ = costs(one(1, 10), Timed("4 lanes", 2, failed="x")).best


def test_json_has_every_number() -> None:
    found = costs(one(1, 10, 12), one(2, 11, 11, peak_bytes=5), Timed("4 lanes", failed="no memory"))
    document = json.loads(json.dumps(found.as_json()))
    assert document["recommended"] == asdict(found.best)
    first, second, third = document["measured"]
    assert (document["now"], first["seconds"], first["cost"]) == (8, [0.01, 0.012], 1.0)
    assert (second["peak_bytes"], third["cost"], third["failed"]) == (5, None, "no memory")


def test_the_table_and_the_conclusion_compare_with_the_config() -> None:
    measured = (one(1, 10, 12, 9), one(2, 9.5, 9, 10), Timed("64 lanes", failed="one sample"))
    shown = costs(*measured).present("mine", "cpu")
    assert shown.heading == "global batch 64 on cpu; medians of 3 rounds"
    [table] = shown.tables
    assert table.rows[1][:6] == ("2 lanes", "1", "32", "9.5 ms", "9 ms - 10 ms", "1.00")
    assert [row[-1] for row in table.rows] == ["", "recommended", "left out"]
    assert shown.verdicts[0].endswith("The config has 8; other lanes are another run.")
    assert shown.verdicts[1] == "64 lanes: left out: one sample"
    assert costs(*measured, now=2).conclusion.endswith("up to 2. The config has it.")


def test_the_page_is_self_contained_and_replaces_no_other_file(tmp_path: Path) -> None:
    found = costs(
        one(1, 10), one(8, 10.2), Timed("16 lanes", failed="<no> memory"), one(8, 6, world=2, notes=("a < b",))
    )
    page, document = tmp_path / "lanes.html", Document("tune", {"device": "cpu"}, [])
    write_html(document, found.present("<mine>: what lanes cost", "cpu"), page)
    text = page.read_text()
    assert "<title>&lt;mine&gt;: what lanes cost</title>" in text
    assert "16 lanes: left out: &lt;no&gt; memory" in text
    assert "8 lanes: a &lt; b" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    page.write_text("mine")
    with pytest.raises(OutputError, match="is no page of samestep"):
        write_html(document, found.present("again", "cpu"), page)


def test_the_plot_has_a_band_around_each_choice() -> None:
    [panel] = costs(one(1, 10, 11, 10, 12), one(2, 15, 14, 16, 15)).present("mine", "cpu").panels
    [line] = panel.lines
    assert line.low is not None
    assert line.high is not None
    assert (line.low[0], line.high[0]) == (1, 1), "the fastest, by itself"
    assert line.low[1] < line.y[1] < line.high[1]
