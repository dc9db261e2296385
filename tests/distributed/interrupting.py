"""Trainings that end in the middle, in ways that a test chooses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.running import Recorded, settings, train_rank
from tests.ranks import answers_of_ranks


def _raise() -> None:
    raise ZeroDivisionError("a failure on purpose")


HOW: dict[str, Callable[[], None]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": _raise,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}


def train_and_end(config: dict[str, Any], record: str, at: int, rank: int, how: str) -> int:
    """Train; on one rank, something happens in the middle of one step. Returns the steps."""
    from samestep.step.lane_passes import LanePasses

    if int(os.environ.get("RANK", "0")) == rank and how:
        end_forward, close = LanePasses.end_forward, LanePasses.close
        ways = [HOW[how]]

        def end_at(self: LanePasses) -> None:
            if self.data.index == at and ways:
                ways.pop()()

        def end_in_lane(self: LanePasses) -> None:
            end_at(self)
            end_forward(self)

        def end_in_replay(self: LanePasses, *args: Any) -> None:
            end_at(self)
            close(self, *args)

        LanePasses.end_forward = end_in_lane  # type: ignore[method-assign]
        LanePasses.close = end_in_replay  # type: ignore[method-assign]
    return train_rank(config, record)


def go_on(
    folder: Path, world: int, task: str = "Everything", *, at: int = -1, rank: int = 0, how: str = "", **values: Any
) -> list[tuple[bool, Any]]:
    """Start the run of this folder, or let it go on, on `world` ranks; by rank what they said."""
    config = settings(task, folder, **values)
    return answers_of_ranks(train_and_end, world, config, str(folder / "record"), at, rank, how)


def finish(folder: Path, world: int, task: str = "Everything", **values: Any) -> Recorded:
    """Let the run go on to its end."""
    said = go_on(folder, world, task, **values)
    assert all(ok for ok, _ in said), said
    return Recorded(folder)
