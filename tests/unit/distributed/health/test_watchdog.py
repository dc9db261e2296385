"""A process that is alone and hangs is ended, with what it was doing; one that moves is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from samestep.errors import RankHung
from tests.variations import variations

PROGRAM = """
import sys, time
from samestep.distributed.health.activity import Activity
from samestep.distributed.health.watchdog import Watchdog

activity, seconds = Activity(), 1.0
def stuck():
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)

with Watchdog(activity, seconds, seconds if {how!r} == "hangs at its start" else None):
    if {how!r} == "hangs at its start":
        stuck()
    if {how!r} == "moves":
        time.sleep(2 * seconds)  # while it starts
    activity.begin_step(3)
    if {how!r} == "moves":
        until = time.monotonic() + 2 * seconds
        while time.monotonic() < until:
            activity.moved()
            time.sleep(0.01)
    if {how!r} == "hangs":
        stuck()
    if {how!r} == "holds the interpreter":
        sum(range(10**12))
print("ended by itself")
"""


@pytest.mark.parametrize(
    "how",
    variations(
        ["moves", "hangs", "hangs at its start", "holds the interpreter"],
        kept=["hangs", "hangs at its start", "holds the interpreter"],
    ),
)
def test_only_a_run_in_which_nothing_moves_is_ended(how: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(how=how)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if how == "moves":
        assert (done.returncode, done.stdout) == (0, "ended by itself\n"), done.stderr
    elif how == "hangs at its start":
        assert done.returncode == RankHung.exit_code
        assert "in stuck" in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("samestep: the run hangs: it has not come to its first step for ")
    elif how == "hangs":
        assert done.returncode == RankHung.exit_code
        assert "in stuck" in done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("samestep: the run hangs: it is in compute at step 3 for ")
    else:
        assert done.returncode == 1
        assert "most recent call first" in done.stderr
