"""Stop signals of loader processes, on systems that know a signal's sender and on those that do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

WORKER = """
import signal, sys, time
if sys.argv[1] == "macos":
    del signal.sigwaitinfo, signal.sigtimedwait
from samestep.distributed.signals import outlive_stop_signals
outlive_stop_signals(0)
print("ready", flush=True)
for line in sys.stdin:
    print("alive", flush=True)
time.sleep(60)
"""


@contextmanager
def worker(system: str) -> Iterator[subprocess.Popen[str]]:
    """A loader process; this one is its rank."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, system],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=False,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def is_alive(process: subprocess.Popen[str]) -> bool:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("are you?\n")
    process.stdin.flush()
    return process.stdout.readline() == "alive\n"


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_worker_outlives_the_signals_that_stop_its_rank(system: str) -> None:
    with worker(system) as process:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
            assert is_alive(process)


@pytest.mark.parametrize("system", ["linux", "macos"])
def test_a_worker_ends_when_its_rank_ends_it(system: str) -> None:
    with worker(system) as process:
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def test_a_worker_outlives_a_sigterm_of_another_process() -> None:
    with worker("linux") as process:
        subprocess.run(["sh", "-c", f"kill -TERM {process.pid}"], check=True)
        assert is_alive(process)


def test_without_the_sender_of_a_signal_a_worker_leaves_the_group_that_is_signalled() -> None:
    with worker("macos") as process:
        assert os.getpgid(process.pid) == process.pid
    with worker("linux") as process:
        assert os.getpgid(process.pid) == os.getpgid(0)
