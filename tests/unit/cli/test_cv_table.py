"""What samestep cv shows of many values."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.cli.cv import _show


def test_values_of_single_classes_are_counted_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"val_loss": 0.5, "f1": 0.25, **{f"per_class/{n}/f1": 0.125 for n in range(40)}}
    found: dict[str, Any] = {
        "folds": [{"fold": 0, "steps": 2, "metrics": values}],
        "mean": values,
        "std": values,
        "out_of_fold": None,
    }
    _show(found)
    printed = capsys.readouterr().out
    assert "0.25" in printed
    assert "per_class" not in printed
    assert "and 40 more values in cv.json" in printed
