"""How many ranks or nodes to start: a number, or a range."""

from __future__ import annotations

import pytest

from samestep.errors import LaunchError
from samestep.launch.commands.size import Size


@pytest.mark.parametrize(
    ("text", "fewest", "most", "shown"),
    [("4", 4, 4, "4"), ("2:4", 2, 4, "2:4"), ("3:3", 3, 3, "3")],
)
def test_a_size_is_a_number_or_a_range(text: str, fewest: int, most: int, shown: str) -> None:
    size = Size.parse(text, "--nproc")
    assert (size.fewest, size.most, str(size)) == (fewest, most, shown)
    assert size.is_range is (fewest != most)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--nproc is '': give a number, or a range such as 2:4"),
        ("four", "--nproc is 'four': give a number"),
        ("2.5", "give a number, or a range"),
        ("2:", "give a number, or a range"),
        (":4", "give a number, or a range"),
        ("1:2:3", "give a number, or a range"),
        ("2-4", "give a number, or a range"),
        ("0", "--nproc is 0: it must be at least 1"),
        ("0:4", "--nproc is 0:4: it must be at least 1"),
        ("-1", "--nproc is -1: it must be at least 1"),
        ("4:2", "--nproc is 4:2: the first number of a range is the smaller one"),
    ],
)
def test_a_text_that_is_no_size_is_refused(text: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        Size.parse(text, "--nproc")
    assert words in str(caught.value)
