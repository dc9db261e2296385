"""YAML as people mean it, within limits."""

import math
import time
import tracemalloc

import pytest

from samestep.errors import TextError
from samestep.parsing.plain_yaml import LARGEST_YAML, parse_yaml
from tests.fuzz.texts import BOMB, MERGE_BOMB


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:00:00", "12:00:00"), ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"),
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("-.inf", -math.inf),
        ("1_000", 1000), ("0x1f", 31), ("012", "012"), ("0o17", 15), ("-.5", -0.5), ("-3", -3), ("true", True), ("~", None),
        ("1e5x", "1e5x"), ("1.2.3", "1.2.3"), ("[1, 2e3]", [1, 2000.0]),
        ("2024-01-31", "2024-01-31"), ("2024-99-99", "2024-99-99"), ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("0x_", "0x_"), ("0b_", "0b_"), ("0o_", "0o_"), ("0x_1", 1), ("=", "="), ("&a [1]", [1]), ("[&a 1, *a]", [1, 1]),
        ("{a: &a {x: 1}, b: {<<: *a, y: 2}}", {"a": {"x": 1}, "b": {"x": 1, "y": 2}}),
    ],
)  # fmt: skip
def test_numbers_are_numbers_and_times_are_times(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


def test_yaml_runs_no_code():
    with pytest.raises(TextError, match="python/object"):
        parse_yaml("!!python/object/apply:os.getcwd []")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("!!int abc", "'abc' is no int"), ("!!int ''", "'' is no int"), ("!!float x", "'x' is no float"),
        ("!!bool x", "'x' is no bool"), ("9" * 5000, "is no int"), ("!!timestamp x", "timestamp"),
        ("!!binary x", "binary"), ("!!set {a}", "set"), ("!!omap [a]", "omap"), ("!unknown x", "unknown"),
        ('"\\UFFFFFFFF"', "too large"), ('"\\U00110000"', "not in range"), ("\x00", "not allowed"), ("[1", "expected"),
        ("{? [a] : b}", "unhashable"), ("--- 1\n--- 2", "single document"), ("%YAML 9.9\n---\nx", "incompatible"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_one_kind_of_error(text, reason):
    with pytest.raises(TextError, match="is not valid YAML") as caught:
        parse_yaml(text)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("text", ["&a [*a]", "&a {b: *a}", "&a {<<: *a}", "[&a [1, [*a]]]"])
def test_what_contains_itself_is_named_so(text):
    with pytest.raises(TextError, match=r"contains itself by the alias \*a on line 1"):
        parse_yaml(text)


@pytest.mark.parametrize(
    "text", ["[" * 3000 + "]" * 3000, "{a: " * 3000 + "}" * 3000, "- " * 3000 + "x", "[" * 101 + "]" * 101]
)
def test_what_is_nested_too_deep_is_named_so(text):
    with pytest.raises(TextError, match="is nested more than 100 levels deep, on line 1"):
        parse_yaml(text)


def test_a_hundred_levels_are_not_too_deep():
    value = parse_yaml("[" * 100 + "]" * 100)
    for _ in range(99):
        [value] = value
    assert value == []


@pytest.mark.parametrize("text", [BOMB, MERGE_BOMB, f"a: &a {'x' * 1000}\nb: [{'*a, ' * 2000}]"])
def test_aliases_cannot_make_gigabytes(text):
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(TextError, match="is too large: more than 1,000,000 characters"):
            parse_yaml(text)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 60  # without a limit it is hours


def test_a_text_that_is_too_long_is_not_begun():
    with pytest.raises(TextError, match="is too large: it has 1,000,001 characters"):
        parse_yaml("x" * (LARGEST_YAML + 1))
