"""Which evaluation is the best so far."""

from __future__ import annotations

import math
from typing import Any

import pytest

from samestep.config.schema import BestConfig
from samestep.train.best_so_far import BestSoFar


@pytest.mark.parametrize(
    ("rule", "values", "best"),
    [
        ({}, [3.0, 2.0, 2.0, 1.0], [True, True, False, True]),
        ({"mode": "max"}, [1.0, 2.0, 2.0, 3.0], [True, True, False, True]),
        ({"min_delta": 0.5}, [3.0, 2.75, 2.25], [True, False, True]),
        pytest.param({}, [math.nan, 2.0, 3.0], [True, True, False]),
    ],
)
def test_a_better_value_is_the_best(rule: dict[str, Any], values: list[float], best: list[bool]) -> None:
    so_far = BestSoFar(BestConfig(**rule))
    assert [so_far.offer({"val_loss": value}, step) for step, value in enumerate(values)] == best
