"""Whole numbers from text."""

import pytest

from samestep.parsing.numbers import signed_number, whole_number


@pytest.mark.parametrize("text", ["", "²", "٣", "1_0", " 1", "1 ", "+1", "-1", "1.0", "1e3", "x", "9" * 19, "1\n"])
def test_only_plain_digits_are_a_number(text):
    assert whole_number(text) is None


@pytest.mark.parametrize("text", ["0", "007", "9" * 18])
def test_digits_are(text):
    assert whole_number(text) == int(text)


@pytest.mark.parametrize(("text", "number"), [("-1", -1), (" 4 ", 4), ("--1", None), ("- 1", None)])
def test_a_sign_is_taken_where_it_is_to_be_named(text, number):
    assert signed_number(text) == number
