"""Learning rates that follow the global batch."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.optim.schedules import describe_scaling, lr_factor


def config(**values: Any) -> Config:
    return load_config({"global_batch": 64, "epochs": 1, **values})


@pytest.mark.requirement("002-K-2")
@pytest.mark.parametrize(
    ("values", "factor"),
    [
        ({}, 1.0),
        ({"base_batch": 16}, 1.0),
        ({"base_batch": 16, "lr_scaling": "linear"}, 4.0),
        ({"base_batch": 16, "lr_scaling": "sqrt"}, 2.0),
        ({"base_batch": 256, "lr_scaling": "linear"}, 0.25),
        ({"base_batch": 256, "lr_scaling": "sqrt"}, 0.5),
        ({"base_batch": 64, "lr_scaling": "linear"}, 1.0),
    ],
)
def test_the_factor_follows_the_rule(values: dict[str, Any], factor: float) -> None:
    assert lr_factor(config(**values), 64) == factor


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, None),
        ({"base_batch": 64, "lr_scaling": "linear"}, None),
        (
            {"base_batch": 16, "lr_scaling": "sqrt"},
            "Learning rates are multiplied by 2 (lr_scaling sqrt: global batch 64, base_batch 16)",
        ),
        (
            {"base_batch": 16},
            "Learning rates are as they were set (global batch 64, base_batch 16): lr_scaling "
            "sqrt would multiply them by 2, linear by 4",
        ),
    ],
)
def test_what_was_scaled_or_could_be_is_described(values: dict[str, Any], line: str | None) -> None:
    assert describe_scaling(config(**values), 64) == line
