"""What got slower, by rounds that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.bench.report.against import Comparison, compare
from samestep.bench.report.results import Result
from tests.unit.bench.results import comm, document, leak, memory, scaling, timed

NOISY = (0.8, 0.9, 1.0, 1.1, 1.2)


def placed(rows: list[dict[str, Any]], kind: str = "scaling", **facts: Any) -> list[Result]:
    return [Result(Path("any.json"), document(kind, rows, **facts))]


def verdicts(found: Comparison) -> list[str]:
    return [change.verdict for change in found.changes]


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.2, (0.99, 1.0, 1.0, 1.0, 1.01), "slower"),
        (1 / 1.2, (0.99, 1.0, 1.0, 1.0, 1.01), "faster"),
        (1.03, (0.999, 1.0, 1.0, 1.0, 1.001), "no difference"),  # certain, and too little to count
        (1.1, NOISY, "no difference"),  # enough to count, but not certain
        (1.2, (0.99, 1.0, 1.01), "too few rounds"),
    ],
)
def test_a_change_counts_if_it_is_certain_and_large_enough(
    factor: float, noise: tuple[float, ...], verdict: str
) -> None:
    before, now = scaling(2, 1.0) | timed(1.0, noise), scaling(2, 1.0) | timed(factor, noise)
    found = compare(placed([now]), placed([before]))
    assert verdicts(found) == [verdict]
    assert len(found.worse) == (verdict == "slower")
    assert ("without --quick" in found.summary) is (verdict == "too few rounds")
    assert len(found.changed + found.unchanged + found.undecided) == len(found.changes)


def test_the_ratio_has_a_range() -> None:
    (change,) = compare(placed([scaling(1, 1.2)]), placed([scaling(1, 1.0)])).changes
    assert change.what == "scaling: strong, mlp-small, samestep, fp32, 1 rank, gloo"
    assert change.ratio is not None
    assert change.ratio.median == pytest.approx(1.2)
    assert 1.2 * 0.99 / 1.01 <= change.ratio.low < 1.2 < change.ratio.high <= 1.2 * 1.01 / 0.99


def test_what_is_measured_beside_samestep_is_a_caution_and_no_failure() -> None:
    rows = [scaling(1, 1.0), scaling(1, 1.0, variant="ddp")]
    slower = [scaling(1, 1.0), scaling(1, 1.5, variant="ddp")]
    found = compare(placed(slower), placed(rows))
    assert verdicts(found) == ["no difference", "slower"]
    assert not found.worse
    assert "the machine may have changed" in found.cautions[0]


def test_other_machines_versions_and_configs_are_compared_with_a_caution() -> None:
    before = placed([scaling(1, 1.0)], torch="2.10.0", config="abc", hosts=["old"])
    found = compare(placed([scaling(1, 1.0)]), before)
    assert verdicts(found) == ["no difference"]
    assert list(found.cautions) == [
        "hosts: old before, node1 now",
        "torch: 2.10.0 before, 2.11.0 now",
        "config: abc before, built-in now",
    ]


def test_rows_of_the_same_config_find_each_other_first() -> None:
    before = [*placed([scaling(1, 1.0)], config="a"), *placed([scaling(1, 2.0)], config="b")]
    now = [*placed([scaling(1, 2.0)], config="b"), *placed([scaling(1, 1.0)], config="a")]
    assert verdicts(compare(now, before)) == ["no difference"] * 2


def test_only_what_both_have_is_compared() -> None:
    before = placed([comm("broadcast", 2, 1024, 1e-3), comm("broadcast", 2, 4096, 1e-3)], "comm")
    now = placed([comm("broadcast", 2, 1024, 1e-3), comm("all-gather", 2, 1024, 1e-3)], "comm")
    found = compare(now, before)
    assert [change.what for change in found.changes] == ["comm: broadcast, 1 KB, 2 ranks, gloo"]
    assert found.cautions[-1] == ("1 figure(s) are only in the earlier results, 1 only in the later ones")


def test_memory_is_compared_by_its_range() -> None:
    before = [memory("total", 0, 1_000_000), leak(0.0, -1.0, 1.0, False)]
    now = [memory("total", 0, 1_200_000), leak(9.0, 8.0, 10.0, True)]
    found = compare(placed(now, "memory"), placed(before, "memory"))
    assert verdicts(found) == ["larger"]
    assert found.worse[0].cells()[1:3] == ("977 KB", "1.14 MB")
    assert verdicts(compare(placed(before, "memory"), placed(now, "memory"))) == ["smaller"]
