"""Slurm's shorthand for hosts and counts."""

from __future__ import annotations

import pytest

from samestep.environment.node_lists import expand_counts, expand_hosts
from samestep.errors import LaunchError


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-04,07]", ["n01", "n02", "n03", "n04", "n07"]),
        ("n[1-2],m2", ["n1", "n2", "m2"]),
        ("m2,n[01-02]", ["m2", "n01", "n02"]),
        ("tux[3]", ["tux3"]),
        ("gpu-a100-[007,009]", ["gpu-a100-007", "gpu-a100-009"]),
        ("n1,,n2", ["n1", "n2"]),
        ("a[9-11]-ib", ["a9-ib", "a10-ib", "a11-ib"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ],
)
def test_a_node_list_in_full(nodelist: str, hosts: list[str]) -> None:
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["n[a-b]", "n[]", "n[1-x]"])
def test_a_node_list_with_odd_brackets_is_refused(nodelist: str) -> None:
    with pytest.raises(LaunchError, match="no range of hosts"):
        expand_hosts(nodelist)


@pytest.mark.parametrize("nodelist", ["", ",", " "])
def test_a_node_list_without_hosts_requests_a_master_address(nodelist: str) -> None:
    with pytest.raises(LaunchError, match="names no host: set MASTER_ADDR"):
        expand_hosts(nodelist)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("1,2", [1, 2]), ("1(x2),3(x1)", [1, 1, 3]), ("2(x3),1", [2, 2, 2, 1]), ("", [])]
)
def test_counts_are_repeated_by_their_number_of_nodes(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts
