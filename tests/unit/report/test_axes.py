"""Curves by step, epoch, seconds and samples, and names of curves that share a panel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.errors import RunDirError
from samestep.report.curves.history import Series
from samestep.report.curves.panels import axes_of, panels_of
from tests.unit.report.runs import history


def test_every_axis_is_interpolated_from_what_the_run_wrote() -> None:
    steps = list(range(10))
    run = replace(history("r", loss=[1.0] * 10), global_batch=32)
    metrics = {
        **run.metrics,
        "epoch": Series(steps, [step // 4 for step in steps]),
        "seconds": Series(steps, [0.5] * 10),
    }
    axes = axes_of(replace(run, metrics=metrics))
    assert list(axes) == ["step", "epoch", "seconds", "samples"]
    assert [axes["epoch"](step) for step in (0, 2, 4, 9)] == [0, 0.5, 1, 2.25]
    assert axes["seconds"](4) == 2.0
    assert axes["seconds"](5.5) == 2.75  # a mean of several steps
    assert axes["samples"](3) == 96


def test_numbers_that_are_not_finite_give_no_axis() -> None:
    run = history("r", loss=[1.0, 2.0])
    broken = {**run.metrics, "epoch": Series([0, 1], [0, float("nan")]), "seconds": Series([0, 1], [1, float("inf")])}
    run = replace(run, metrics=broken)
    assert list(axes_of(run)) == ["step"]
    with pytest.raises(RunDirError, match="no numbers by epoch: there are step"):
        panels_of([run], ["loss"], x="epoch")


def test_training_and_validation_share_a_panel_and_lists_keep_their_numbers() -> None:
    names = ("loss", "val_loss", "val_recall[0]", "val_recall[1]", "f1[0]", "val_f1[0]")
    run = history("r", **{name: [1.0, 0.5] for name in names})
    panels = {panel.title: [line.name for line in panel.lines] for panel in panels_of([run], list(names))}
    assert panels == {
        "loss": ["r", "r validation"],
        "val_recall": ["r [0]", "r [1]"],
        "f1": ["r [0]", "r validation [0]"],
    }
