"""Curves in numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from samestep.report.curves.history import Series
from samestep.report.curves.summary import as_json, sparkline, summarize, table
from tests.unit.report.runs import history


def test_last_best_and_mean_of_what_is_finite() -> None:
    one = summarize(history(loss=[3.0, 1.0, 1.0, math.nan, 2.0]), "loss")
    assert (one.points, one.last, one.last_step, one.nonfinite) == (5, 2.0, 4, 1)
    assert (one.best, one.best_step) == (1.0, 1), "the earliest of equals"
    assert (one.mean, one.min, one.max) == (1.75, 1.0, 3.0)


def test_the_best_follows_the_config_and_is_none_where_nobody_knows() -> None:
    run = replace(history(f1=[0.1, 0.9, 0.5], depth=[1.0, 2.0]), best=("f1", "max"))
    assert summarize(run, "f1").best_step == 1
    assert summarize(run, "depth").best is None


def test_a_metric_that_is_never_finite_has_no_numbers() -> None:
    one = summarize(history(loss=[math.nan, math.inf]), "loss")
    assert (one.last, one.best, one.mean, one.nonfinite) == (None, None, None, 2)


def test_the_table_has_a_row_for_each_metric_and_run_that_has_it() -> None:
    first = replace(history(loss=[2.0, math.nan], f1=[0.5]), skipped=[1])
    _, rows = table([first, history("other", loss=[1.0])], ["loss", "f1"])
    assert [row[:2] for row in rows] == [("loss", "mine"), ("loss", "other"), ("f1", "mine")]
    assert rows[0][3] == "-"
    assert rows[0][-1] == "1 not finite, 1 skipped"


def test_scripts_get_every_value_as_strict_json() -> None:
    value = 0.1 + 0.2
    text = json.dumps(as_json([history(loss=[value, math.nan])], ["loss", "f1"]), allow_nan=False)
    metrics = json.loads(text)["runs"]["mine"]["metrics"]
    assert list(metrics) == ["loss"]
    assert metrics["loss"]["values"] == [value, None]


def test_a_curve_in_one_line() -> None:
    assert sparkline(Series(range(4), [0.0, 7.0, math.nan, 3.6])) == "▁█x▅"
    assert sparkline(Series([0], [5.0])) == "▁"
    assert sparkline(Series([0], [math.nan])) == "x"
    assert sparkline(Series(range(2), [-1.7e308, 1.7e308])) == "▁█"
    assert len(sparkline(Series(range(1000), [1.0] * 1000))) == 15
