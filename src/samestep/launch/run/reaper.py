"""Ends what a launcher started if the launcher itself is gone: `python -I -S reaper.py SECONDS`.

A program of its own, since a launcher that is killed can do nothing any more. It reads lines from
its standard input: `PID SIGNAL` for a process that leads a group, `PID` when that has ended. Where
the input ends, so has the launcher: each group that is left gets its signal, which lets ranks save,
and is killed after SECONDS, together with whatever its leader started.

Imports nothing but the standard library: it must start at once, and fit beside any launch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

_PAUSE = 0.05


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the launcher and its ranks
    groups: dict[int, int] = {}
    for line in sys.stdin:
        leader, *how = map(int, line.split())
        if how:
            groups[leader] = how[0]
        else:
            groups.pop(leader, None)
    end_groups(groups, float(sys.argv[1]))


def end_groups(groups: dict[int, int], seconds: float) -> None:
    """Signal every leader, and kill its group once it has ended or the time is over."""
    for leader, number in groups.items():
        with suppress(ProcessLookupError):
            os.kill(leader, number)
    deadline = time.monotonic() + seconds
    while groups:
        for leader in list(groups):
            if not is_running(leader) or time.monotonic() > deadline:
                del groups[leader]
                kill_group(leader)
        time.sleep(_PAUSE)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def kill_group(leader: int) -> None:
    """Kill what is left of a group; its number is no other group's as long as anything is."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    main()
