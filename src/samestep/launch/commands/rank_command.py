"""The command of every rank of a launch, and text that a shell cannot misread. No torch here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.config import Config, override_config
from samestep.config.secrets import referred
from samestep.environment.interpreter import interpreter_words
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError
from samestep.lanes.plan import deal_lanes

MODULE = ("-m", "samestep")
"""What torch's own launchers run."""


def is_script(file: Path) -> bool:
    """Return whether a run is named by a script that calls `samestep.start`, not by a config."""
    return file.suffix == ".py"


def argv_for(file: Path, overrides: Sequence[str], options: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command: a script's own arguments are last, after `--`."""
    name = str(file)
    words = [f"./{name}" if name.startswith("-") else name, *overrides, *options]
    return (*words, "--", *arguments) if arguments else tuple(words)


@dataclass(frozen=True)
class RankCommand:
    """The training of a config or a script, however its ranks are started."""

    config: Config
    """With the overrides; a script decides the rest of it when it opens its run."""
    file: Path
    """The config, or a script that calls `samestep.start`."""
    overrides: tuple[str, ...] = ()
    record: Path | None = None
    """Where the ranks write their exact record."""
    stop_after: int | None = None
    arguments: tuple[str, ...] = ()
    """A script's own."""
    trace: Path | None = None
    """Where the ranks write every tensor of their steps."""
    trace_from: int = 0
    """The first of these steps."""
    prune_dir: Path | None = None
    """Where rank 0 asks after each evaluation whether to continue."""
    folder: Path | None = None
    """Where the command runs; by default the working directory."""
    command: str = "train"
    """What a rank is: `samestep train`, or another command that runs as a rank, as `bench comm`."""
    options: tuple[str, ...] = ()
    """That command's own."""

    def with_overrides(self, *overrides: str) -> RankCommand:
        """Return the same with more overrides, for its ranks and in what we know of its config."""
        config = override_config(self.config, overrides)
        return replace(self, config=config, overrides=(*self.overrides, *overrides))

    @property
    def python(self) -> str:
        return self.config.launch.python or sys.executable

    def variables(self) -> dict[str, str]:
        """Return what launch.environment sets for every rank, with this process's values of what it refers to."""
        return self.config.launch.variables(process_environment())

    @property
    def working_folder(self) -> Path:
        return self.folder or Path.cwd()

    def train(self, *options: str) -> tuple[str, ...]:
        """Return the arguments of the interpreter for one rank."""
        return (*interpreter_words(), *self.rank_words(*options))

    def rank_words(self, *options: str) -> tuple[str, ...]:
        """Return the arguments of our own command for one rank."""
        return (*self.command.split(), *self._words([*self.options, *options]))

    def launch(self, *options: str) -> tuple[str, ...]:
        """Return the arguments of the interpreter for what starts ranks on another machine."""
        other: list[str] = []
        if self.command != "train":
            # As one word each, so that its options are not taken for those of the launch.
            other = ["--rank-command", self.command, *(f"--rank-arg={word}" for word in self.options)]
        return (*interpreter_words(), "launch", *self._words([*other, *options]))

    def _words(self, options: Sequence[str]) -> tuple[str, ...]:
        ours = [] if self.record is None else ["--record", str(self.record)]
        ours += [] if self.stop_after is None else ["--stop-after", str(self.stop_after)]
        if self.trace is not None:
            ours += ["--trace", str(self.trace), "--trace-from", str(self.trace_from)]
        ours += [] if self.prune_dir is None else ["--prune-dir", str(self.prune_dir)]
        return argv_for(self.file, self.overrides, [*ours, *options], self.arguments)


def check_world(config: Config, world: int, source: str) -> None:
    """Refuse a number of ranks that contradicts the config; `source` is where it comes from."""
    section = config.distributed
    if section.world_size not in ("auto", world):
        raise LaunchError(
            f"distributed.world_size is {section.world_size} but {source}: make them the same, or set world_size: auto"
        )
    if section.enabled is False and world > 1:
        raise LaunchError(f"distributed.enabled is false but {source}: set enabled: auto, or start one rank")
    deal_lanes(config.lane_count(world), world, section.lane_weights)


def quoted(words: Iterable[str]) -> str:
    """Return a command as one line of shell, in which no word can become another command."""
    words = list(words)
    for word in words:
        if "\x00" in word:
            raise LaunchError(f"{word!r} holds a null character, which no command can")
    return shlex.join(words)


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines of shell that set variables; one that refers to another must find it set."""
    return [f"export {name}={_shell_value(value)}" for name, value in variables.items()]


def _shell_value(value: str) -> str:
    source = referred(value)
    return shlex.quote(value) if source is None else f'"${{{source}:?set it for this launch}}"'


def shell_script(comment: str, rank_command: RankCommand, variables: Mapping[str, str], command: str) -> str:
    """Return a script that does what a launch does."""
    lines = ["#!/bin/bash", f"# {comment}", "set -eo pipefail", *surroundings(rank_command, variables)]
    return "\n".join([*lines, command]) + "\n"


def surroundings(rank_command: RankCommand, variables: Mapping[str, str], *, references: bool = True) -> list[str]:
    """Return what goes before the command in every script: folder, modules, variables, commands.

    Args:
        references: whether variables that refer to others are set from them; whoever runs the
            script has these in the environment.
    """
    launch = rank_command.config.launch
    named = {k: v for k, v in launch.environment.items() if references or referred(v) is None}
    return [
        quoted(["cd", str(rank_command.working_folder)]),
        *(quoted(["module", "load", name]) for name in launch.modules),
        *exports({**named, **variables}),
        *launch.before,
    ]


def exec_line(words: Sequence[str]) -> str:
    return f"exec {quoted(words)}"
