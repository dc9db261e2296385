"""Slurm's shorthand for hosts and counts: `n[01-04,07],m2` and `2(x3),1`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from samestep.errors import LaunchError
from samestep.parsing.limits import short
from samestep.parsing.numbers import whole_number

_MOST_HOSTS = 100_000


def expand_hosts(nodelist: str) -> list[str]:
    """Return the hosts of a node list such as `n[01-04,07]-ib,m2`, in its order."""
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
        low, high = whole_number(first), whole_number(last or first)
        if low is None or high is None or high - low >= _MOST_HOSTS:
            raise LaunchError(f"the Slurm node list has {short(repr(part))}, which is no range of hosts")
        numbers += (str(number).zfill(len(first)) for number in range(low, high + 1))
    return [f"{before}{number}{tail}" for number in numbers for tail in _expand(after)]


def expand_counts(text: str) -> list[int]:
    """Return the counts of `2(x3),1`: one for each node."""
    counts: list[int] = []
    for count, times in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", text):
        number, again = whole_number(count), whole_number(times or "1")
        if number is None or again is None or again > _MOST_HOSTS:
            raise LaunchError(f"Slurm gives {short(repr(text))} as the tasks of its nodes")
        counts += [number] * again
    return counts


_FIRST_PORT, _PORTS, _TRIES = 20000, 12000, 8
"""Below the ports that Linux uses for outgoing connections."""


def rendezvous_ports(job: str) -> tuple[int, ...]:
    """Return the ports at which a job's ranks may meet: the same in every process that knows its name."""
    start = zlib.crc32(job.encode())
    return tuple(_FIRST_PORT + (start + 997 * again) % _PORTS for again in range(_TRIES))


def job_rendezvous(environ: Mapping[str, str]) -> str:
    """HOST:PORT where the agents of a Slurm job meet: on its first node; empty outside of a job."""
    nodes, job = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_JOB_ID")
    if nodes is None or job is None:
        return ""
    step = f"agents of step {job}.{environ.get('SLURM_STEP_ID')}"
    return f"{expand_hosts(nodes)[0]}:{rendezvous_ports(step)[0]}"
