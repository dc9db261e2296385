"""Values that cannot be handed on."""

from typing import Any

import pytest

from samestep.errors import TextError
from samestep.parsing.limits import check_shape, check_values, short


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a\x00b", "null character"), ({"a\x00": 1}, "null character"), (["\ud800"], "half of a surrogate"),
        ({"a": ({"b": "\udfff"},)}, "half of a surrogate"), ([10**100], "100 digits"), ([-(10**5000)], "100 digits"),
        (nested(101), "nested more than 100 levels"), (nested(50_000), "nested more than 100 levels"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_refused(value, reason):
    with pytest.raises(TextError, match=reason):
        check_values(value)


@pytest.mark.parametrize("value", ["", "ü𝄞", 10**99, -1.5, None, nested(100), {1: object()}])
def test_other_values_are_not(value):
    check_values(value)


def test_a_mapping_that_holds_itself_ends():
    loop: dict[str, Any] = {}
    loop["a"] = loop
    with pytest.raises(TextError, match="nested more than 100"):
        check_shape(loop, 10**9)


def test_values_are_counted_as_often_as_they_are_used():
    shared: list[Any] = [1]
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(TextError, match="more than 1,000 values"):
        check_shape(shared, 1000)


def test_a_long_text_is_shown_by_its_beginning():
    assert short("x" * 200) == "x" * 200
    assert short("x" * 201).endswith("x... (201 characters)")
