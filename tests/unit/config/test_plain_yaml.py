"""YAML as people mean it."""

import math

import pytest
import yaml

from samestep.config.plain_yaml import parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:00:00", "12:00:00"), ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"),
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("-.inf", -math.inf),
        ("1_000", 1000), ("0x1f", 31), ("012", "012"), ("0o17", 15), ("-.5", -0.5), ("-3", -3), ("true", True), ("~", None),
        ("1e5x", "1e5x"), ("1.2.3", "1.2.3"), ("[1, 2e3]", [1, 2000.0]),
    ],
)  # fmt: skip
def test_numbers_are_numbers_and_times_are_times(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


def test_yaml_runs_no_code():
    with pytest.raises(yaml.YAMLError):
        parse_yaml("!!python/object/apply:os.getcwd []")
