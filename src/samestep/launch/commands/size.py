"""Numbers of ranks and nodes: 4, or a range such as 2:4; and hosts with their ranks: a:4,b:4."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import LaunchError
from samestep.lanes.plan import MOST_LANES
from samestep.parsing.limits import short
from samestep.parsing.numbers import signed_number, whole_number


@dataclass(frozen=True)
class Size:
    """A number, or the fewest and the most of a range."""

    fewest: int
    most: int

    @classmethod
    def parse(cls, text: str, option: str) -> Size:
        """Parse `4` or `2:4`."""
        parts = [signed_number(part) for part in text.split(":")]
        fewest, most = parts[0], parts[-1]
        if len(parts) > 2 or fewest is None or most is None:
            shown = short(repr(text))
            raise LaunchError(f"{option} is {shown}: give a number, or a range such as 2:4")
        if fewest < 1:
            raise LaunchError(f"{option} is {text}: it must be at least 1")
        if most > MOST_LANES:
            raise LaunchError(f"{option} is {text}: it must be at most {MOST_LANES}, each a process of its own")
        if most < fewest:
            raise LaunchError(f"{option} is {text}: the first number of a range is the smaller one")
        return cls(fewest, most)

    @property
    def is_range(self) -> bool:
        return self.fewest != self.most

    def one(self, option: str, why: str) -> int:
        """Return the number; a range is refused with the reason."""
        if self.is_range:
            raise LaunchError(f"{option} is {self}: {why}, so give one number")
        return self.most

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}" if self.is_range else str(self.most)


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks it takes."""

    name: str
    ranks: int | None
    """None: one for each of its GPUs, which only that machine knows."""

    @property
    def address(self) -> str:
        """The host for other programs than ssh, which also takes a user's name."""
        return self.name.rpartition("@")[2]

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.ranks is None else f"{name}:{self.ranks}"


_HOST = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<name>\w[\w.@-]*))(?P<colon>:(?P<ranks>\d+))?"
    r"|(?P<address>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)",
    re.ASCII,
)
"""A name or an address; an IPv6 address with a number needs brackets, as in [fe80::1]:4."""


_ENDPOINT = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?|\w[\w.-]*)"
    r":(?P<port>[0-9]+)",
    re.ASCII,
)


def check_endpoint(text: str, option: str) -> None:
    """Refuse what is not the HOST:PORT of a machine."""
    found = _ENDPOINT.fullmatch(text)
    if found is None:
        raise LaunchError(f"{option} is {short(repr(text))}: give HOST:PORT, such as node1:29500")
    port = whole_number(found["port"])
    if port is None or not 1 <= port <= 65535:
        raise LaunchError(f"{option} is {short(repr(text))}: ports run from 1 to 65535")


def parse_hosts(text: str, nproc: int | None) -> tuple[Host, ...]:
    """Parse `a:4,b:4`; a host without a number takes its equal share of `nproc` ranks."""
    parts = [part.strip() for part in text.split(",")]
    hosts = []
    for part in parts:
        found = _HOST.fullmatch(part)
        if found is None:
            raise LaunchError(f"--hosts has {part!r}: write a:4,b:4, or a,b beside --nproc")
        name = found["bracketed"] or found["name"] or found["address"]
        colon, ranks = found["colon"], found["ranks"]
        if not colon and nproc is not None and nproc % len(parts):
            raise LaunchError(
                f"--nproc {nproc} cannot be shared evenly by {len(parts)} hosts: give the number of "
                "ranks of each host, as a:4,b:3"
            )
        count = whole_number(ranks) if colon else nproc and nproc // len(parts)
        if (colon and count is None) or (count is not None and not 1 <= count <= MOST_LANES):
            shown = short(repr(part))
            raise LaunchError(f"--hosts has {shown}: a host takes from 1 to {MOST_LANES} ranks")
        hosts.append(Host(name, count))
    if len({host.name for host in hosts}) != len(hosts):
        raise LaunchError(f"--hosts is {text}: a host is named twice")
    total = ranks_of(hosts)
    if nproc is not None and total not in (None, nproc):
        raise LaunchError(f"--nproc is {nproc}, but --hosts {text} take {total} ranks")
    return tuple(hosts)


def ranks_of(hosts: Sequence[Host]) -> int | None:
    """Return all ranks of all hosts; None if some host decides its number itself."""
    counts = [host.ranks for host in hosts if host.ranks is not None]
    return sum(counts) if len(counts) == len(hosts) else None
