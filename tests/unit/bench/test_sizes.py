"""Sizes of messages from the command line."""

from __future__ import annotations

import pytest

from samestep.bench.sizes import sizes_between
from samestep.errors import PlanError


def test_each_has_four_times_the_bytes_and_both_ends_are_there() -> None:
    assert sizes_between("1KB", "16KB") == [1024, 4096, 16384]
    assert sizes_between("1kb", "6 KB") == [1024, 4096, 6144]
    assert sizes_between("1MB", "1MB") == [1 << 20]
    assert sizes_between("64KB", "1GB")[-2:] == [1 << 28, 1 << 30]


@pytest.mark.parametrize(
    ("smallest", "largest", "message"),
    [
        ("1", "1MB", "--smallest is '1': give a size from 1KB to 4GB"),
        ("1KB", "8GB", "--largest is '8GB': give a size"),
        ("2MB", "1MB", "--smallest is 2MB and --largest 1MB: the wrong way round"),
        ("1025B", "1MB", "--smallest is '1025B'"),
        ("1KB", "lots", "--largest is 'lots'"),
    ],
)
def test_anything_else_is_refused(smallest: str, largest: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        sizes_between(smallest, largest)
    assert message in str(caught.value)
