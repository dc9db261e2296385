"""The launcher's side of the reaper, which ends what a launcher started that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from samestep.launch.run import reaper


class Reaper:
    """A process that outlives this one, for as long as anything that it watches does.

    Args:
        seconds: How long processes get to end by themselves once the launcher is gone.
    """

    def __init__(self, seconds: float) -> None:
        program = Path(reaper.__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), f"{seconds:g}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            start_new_session=True,  # what ends the launcher's group must not end this
        )

    def watch(self, leader: int, number: signal.Signals = signal.SIGTERM) -> None:
        """A process that leads a group, and the signal that lets it end by itself."""
        self._tell(f"{leader} {number:d}\n")

    def forget(self, leader: int) -> None:
        """A process that has ended: its number may soon be another's."""
        self._tell(f"{leader}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it: the launch itself continues
            self._process.stdin.write(line)

    def close(self) -> None:
        """End it; whatever it still watches is ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
