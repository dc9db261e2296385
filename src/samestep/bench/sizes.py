"""Sizes and operations of the messages that are measured. No torch here."""

from __future__ import annotations

import re

from samestep.errors import PlanError
from samestep.parsing.limits import short

TREE_SUM = "tree-sum"
OPERATIONS = ("all-reduce", TREE_SUM, "all-gather", "broadcast", "point-to-point")

_SIZE = re.compile(r"([0-9]{1,9})\s*(B|KB|MB|GB)", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LEAST, _MOST = 1 << 10, 4 << 30
_STEP = 4
"""Each message has so many times the bytes of the one before."""


def sizes_between(smallest: str, largest: str) -> list[int]:
    """Bytes of messages from the one size to the other, both included.

    Raises:
        PlanError: They are no sizes, too small or large, or the wrong way round.
    """
    first, last = _bytes("--smallest", smallest), _bytes("--largest", largest)
    if first > last:
        raise PlanError(f"--smallest is {smallest} and --largest {largest}: the wrong way round")
    sizes = [first]
    while sizes[-1] * _STEP < last:
        sizes.append(sizes[-1] * _STEP)
    return sizes if first == last else [*sizes, last]


def _bytes(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    size = 0 if found is None else int(found[1]) * _UNITS[found[2].upper()]
    if not _LEAST <= size <= _MOST or size % 4:
        raise PlanError(f"{option} is {short(repr(text))}: give a size from 1KB to 4GB, such as 64KB or 1MB")
    return size
