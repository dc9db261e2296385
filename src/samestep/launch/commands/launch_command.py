"""The command of any launcher, as text: nothing here starts a process."""

from __future__ import annotations

from typing import Protocol

from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.summary import Rows


class LaunchCommand(Protocol):
    """The way in which one launcher starts the ranks of a config, as plain values."""

    @property
    def rank_command(self) -> RankCommand: ...

    @property
    def world(self) -> int | None:
        """The number of ranks; None where the machines decide it themselves."""

    def script(self) -> str:
        """Return a shell script that does the same."""

    def summary(self) -> Rows:
        """Return what it amounts to, for a person to read before it starts."""
