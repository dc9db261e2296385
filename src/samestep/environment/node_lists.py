"""Slurm's shorthand for hosts and counts: `n[01-04,07],m2` and `2(x3),1`."""

from __future__ import annotations

import re

from samestep.errors import LaunchError


def expand_hosts(nodelist: str) -> list[str]:
    """The hosts of a node list such as `n[01-04,07]-ib,m2`, in its order."""
    parts = re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", nodelist)
    hosts = [host for part in parts for host in _expand(part.strip())]
    if not hosts or not all(hosts):
        raise LaunchError(f"the Slurm node list {nodelist!r} names no host: set MASTER_ADDR")
    return hosts


def _expand(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    numbers: list[str] = []
    for span in inside.split(","):
        first, _, last = span.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise LaunchError(f"the Slurm node list has {part!r}, which is no range of hosts")
        for number in range(int(first), int(last or first) + 1):
            numbers.append(str(number).zfill(len(first)))
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]


def expand_counts(text: str) -> list[int]:
    """The counts of `2(x3),1`: one for each node."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
