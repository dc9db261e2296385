"""The names of measured values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samestep.errors import TaskError
from samestep.evaluation.metrics import SHOWN, console_text, flatten, refuse_double


def test_a_value_inside_another_has_both_names() -> None:
    values = {"f1": {"per_entity": {"ORG": {"f1": torch.tensor(0.5)}, 7: {"f1": 1.0}}, "f1": 2}}
    assert flatten(values) == {"f1/per_entity/ORG/f1": 0.5, "f1/per_entity/7/f1": 1.0, "f1/f1": 2}


def test_numbers_of_all_kinds_are_taken_and_lists_stay_lists() -> None:
    values = {
        "int": 3,
        "numpy": np.float32(0.5),
        "array": np.arange(2),
        "matrix": torch.eye(2),
        "pair": (torch.tensor(1.0), [2.0]),
    }
    assert flatten(values) == {
        "int": 3,
        "numpy": 0.5,
        "array": [0, 1],
        "matrix": [[1.0, 0.0], [0.0, 1.0]],
        "pair": [1.0, [2.0]],
    }


@pytest.mark.parametrize(
    "values",
    [{"a/b": 1.0, "a": {"b": 2.0}}, {"a": {"b": {"c": 1.0}, "b/c": 2.0}}, {"a": {"b": {1: 1.0, "1": 2.0}, "c": 0.0}}],
)
def test_a_name_is_never_given_twice(values: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match="two values of the evaluation are called a/b"):
        flatten(values)


def test_values_of_two_evaluations_share_no_name() -> None:
    refuse_double({"a": 1}, {"b": 1})
    with pytest.raises(TaskError, match="two values of the evaluation are called ema_a: rename"):
        refuse_double({"ema_a": 1, "a": 1}, {"ema_a": 2})


@pytest.mark.parametrize("value", ["text", None, {"inner": object()}])
def test_what_is_no_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TaskError, match=r"metric m(/inner)? computes a .*: it must give numbers"):
        flatten({"m": value})


def test_the_console_shows_the_loss_the_monitored_and_few_others() -> None:
    values = {"a": 1.0, "f1/x": 2.0, "f1/y": 3.0, "list": [1.0], "val_loss": 4.0}
    assert console_text({"val_loss": 0.5, "a": 1}, "val_loss") == "val_loss 0.5000  a 1.0000"
    assert console_text(values, "f1/y") == ("f1/y 3.0000  val_loss 4.0000  a 1.0000  (and 2 in metrics.jsonl)")
    many = {f"m{number}": 0.0 for number in range(20)} | {"val_loss": 1.0, "last": 2.0}
    assert console_text(many, "last").startswith("val_loss 1.0000  last 2.0000  m0 0.0000")
    assert console_text(many, "last").endswith(f"m{SHOWN - 3} 0.0000  (and {22 - SHOWN} in metrics.jsonl)")
