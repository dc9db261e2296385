"""What wakes a sweep's process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from samestep.environment.variables import exporting
from samestep.sweep.children import Events
from samestep.train.requests import _wake_sweep

LONG = 60.0


def test_a_question_and_the_end_of_a_process_wake_it_and_nothing_else_does() -> None:
    events = Events()
    began = time.monotonic()
    events.wait(0.01)
    with exporting(events.variables):
        _wake_sweep()
        _wake_sweep()
    events.wait(LONG)
    events.wait(0.01)  # what was sent twice is read at once
    process = subprocess.Popen([sys.executable, "-c", ""])
    events.watch(process.pid)
    events.wait(LONG)
    process.wait()
    events.forget(process.pid)
    events.forget(process.pid)
    assert time.monotonic() - began < LONG
    events.close()
    with exporting(events.variables):
        _wake_sweep()  # nobody waits there any more


@pytest.mark.parametrize("variables", [{}, {"SAMESTEP_WAKE": "/nowhere/at/all"}])
def test_runs_of_other_machines_wake_nobody(variables: dict[str, str]) -> None:
    with exporting(variables):
        _wake_sweep()
