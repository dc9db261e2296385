"""How many ranks or nodes to start: a number, or a range."""

from __future__ import annotations

import pytest

from samestep.errors import LaunchError
from samestep.launch.commands.size import Size, check_endpoint, parse_hosts


@pytest.mark.parametrize(
    ("text", "fewest", "most", "shown"), [("4", 4, 4, "4"), ("2:4", 2, 4, "2:4"), ("3:3", 3, 3, "3")]
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


@pytest.mark.parametrize(
    "text", ["n1:29500", "10.0.0.1:1", "node-1.local:65535", "[fe80::1]:29500", "fe80::1:29500", "[fe80::1%eth0]:1"]
)
def test_a_meeting_point_is_a_host_and_a_port(text: str) -> None:
    check_endpoint(text, "--rendezvous")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n1:99999", "ports run from 1 to 65535"), ("n1:0", "ports run from"), ("n1:" + "9" * 30, "ports run from"),
        ("n1", "give HOST:PORT"), ("n1:", "give HOST:PORT"), (":1", "give HOST:PORT"), ("n1:²", "give HOST:PORT"),
        ("n1:1:2", "give HOST:PORT"), ("n 1:2", "give HOST:PORT"), ("-n:1", "give HOST:PORT"), ("n1:http", "give HOST:PORT"),
        ("http://n1:1", "give HOST:PORT"), ("\x00:1", "give HOST:PORT"), ("n1:-1", "give HOST:PORT"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check_endpoint(text, "--rendezvous")


@pytest.mark.parametrize("text", ["²", "1_0", "9" * 30, "1000001", "1:1000001", "٣"])
def test_a_number_that_is_none_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"--nproc is .*(give a number|at most 1000000)"):
        Size.parse(text, "--nproc")


@pytest.mark.parametrize("text", ["a:²", "a:" + "9" * 30, "a:1000001"])
def test_ranks_of_a_host_are_a_number_within_reason(text: str) -> None:
    with pytest.raises(LaunchError, match="--hosts has"):
        parse_hosts(text, None)
