"""Every error samestep raises on purpose.

    SamestepError                 exit code 1
    ├── UserError                 exit code 2: something the user set, and can fix
    │   ├── TextError             text from elsewhere that holds no usable value
    │   ├── ConfigError           every mistake of one config, at once
    │   ├── PlanError             numbers that cannot be split: batch, lanes, ranks
    │   ├── LaunchError           the launch contradicts itself, the config or the machine
    │   ├── TaskError             the task file, or what it returned, breaks the contract
    │   ├── StepError             the step's calls came in an order that means nothing
    │   ├── CheckpointError       a checkpoint that cannot be read or written
    │   ├── NotTrusted            code that a run's directory names, and may come from anyone
    │   ├── RunDirError           a run directory that is in use, or cannot be written
    │   ├── StorageError          a sweep's database that cannot be used, or keeps another's trials
    │   ├── PrecisionError        a number format that the device cannot compute in
    │   ├── GraphError            a step that cannot be recorded as a CUDA graph
    │   ├── NotDeterministic      an operation that gives other bits each time it runs
    │   ├── OutOfMemory           a lane that does not fit into the device's memory
    │   ├── ExportError           a model that cannot be written in a format
    │   ├── OutputError           a file to write that is there already, or cannot be written
    │   ├── RangeTestError        a search for a learning rate that cannot be made as requested
    │   └── MissingExtraError     a feature whose optional packages are not installed
    ├── InitError                 exit code 3: the process group could not be opened
    │   └── NotAuthentic          somebody without the launch's secret took part
    ├── RankFailed                a rank ended the run, with that rank's exit code
    ├── PeerLost                  exit code 1: another rank went away in a collective
    ├── CollectiveMismatch        exit code 1: the ranks called different collectives
    ├── NonFiniteLoss             exit code 1: a loss was NaN or infinite
    ├── RanksDiffer               exit code 4: the ranks' weights or states are not the same
    ├── ExportDiffers             exit code 4: a file and the model compute different outputs
    ├── RankHung                  exit code 7: a collective waited for a rank in vain, or a run alone hangs
    └── Stopped                   exit code 75: a signal requested a stop, and the run is saved

A message names what was set, what was found and what to do. A `UserError` is shown on
the command line without a traceback. An exception from the user's own code is never
wrapped: they see their own traceback.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

PROMISE_NOT_KEPT = 4
"""Exit code of `samestep verify` when the runs were not the same, of ranks that differ, and of
`samestep export` when the file and the model do."""


NO_SUGGESTION = 8
"""Exit code of `samestep tune lr` when the losses suggest no learning rate."""


class SamestepError(Exception):
    """The root: catch this to catch everything samestep raises on purpose."""

    exit_code = 1


class UserError(SamestepError):
    """Something the user set, and can fix."""

    exit_code = 2


class TextError(UserError):
    """Text from elsewhere that holds no usable value; what it was read from is the caller's to name."""


@dataclass(frozen=True)
class Mistake:
    """One thing wrong in a config: where it is and what to do about it."""

    path: str
    message: str
    origin: str = ""

    def __str__(self) -> str:
        where = f"{self.path} ({self.origin})" if self.origin else self.path
        return f"{where}: {self.message}" if where else self.message


class ConfigError(UserError):
    """Every mistake of one config, at once."""

    def __init__(self, source: str, mistakes: Sequence[Mistake]) -> None:
        self.source = source
        self.mistakes = tuple(mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(f"{source} has {count}:\n{lines}")


class PlanError(UserError):
    """Numbers that cannot be split."""


class LaunchError(UserError):
    """The launch contradicts itself, the config or the machine."""


class TaskError(UserError):
    """The task file, or what it returned, breaks the contract."""


class StepError(UserError):
    """The step's calls came in an order that means nothing."""


class CheckpointError(UserError):
    """A checkpoint that cannot be read or written."""


class RunDirError(UserError):
    """A run directory that is in use by another run, or cannot be written."""


class StorageError(UserError):
    """The database of a sweep's trials, which cannot be used or keeps those of another sweep."""


class NotTrusted(UserError):
    """Code that a run's directory names and its user has not vouched for."""


class PrecisionError(UserError, RuntimeError):
    """A number format that the device cannot compute in."""


class GraphError(UserError):
    """A step that cannot be recorded as a CUDA graph."""


class NotDeterministic(UserError):
    """An operation that gives other bits each time it runs."""


class OutOfMemory(UserError):
    """A lane that does not fit into the device's memory."""

    WORDS = "has too little memory"
    """In the message of a launcher whose rank ended with this."""


class ExportError(UserError):
    """A model that cannot be written in a format."""


class OutputError(UserError):
    """A file to write that is there already, or cannot be written."""


class RangeTestError(UserError):
    """A search for a learning rate that cannot be made as requested."""


class MissingExtraError(UserError):
    """A feature whose optional packages are not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        # The packages themselves: an extra can only be named where samestep is installed from.
        packages = _packages_of(extra)
        command = shlex.join(["pip", "install", *packages]) if packages else ""
        clone = f"in a clone of samestep, pip install '.[{extra}]'"
        hint = f"{command}, or {clone}" if command else clone
        super().__init__(f"{feature} needs packages that are not installed: {hint}")


def _packages_of(extra: str) -> list[str]:
    """Return what an extra adds, as this package's own metadata states it; nothing if it has none."""
    from importlib import metadata  # here: every start would wait for it

    try:
        stated = metadata.requires("samestep") or []
    except metadata.PackageNotFoundError:
        return []
    parts = [text.partition(";") for text in stated]
    wanted = f'extra=="{extra}"'
    return [package.strip() for package, _, marker in parts if wanted in marker.replace("'", '"').replace(" ", "")]


class InitError(SamestepError):
    """The process group could not be opened."""

    exit_code = 3


class NotAuthentic(InitError):
    """Something arrived from a process that does not have the launch's secret."""


class RankFailed(SamestepError):
    """A rank ended the run; the message holds its own traceback first."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerLost(SamestepError):
    """Another rank went away while this one waited for it in a collective."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        """Whether nothing broke, but waiting took too long: no rank is known to be gone."""


class CollectiveMismatch(SamestepError):
    """The ranks called different collectives."""


class NonFiniteLoss(SamestepError):
    """A loss was NaN or infinite."""


class RanksDiffer(SamestepError):
    """Weights, buffers or optimizer states that must be the same on all ranks are not."""

    exit_code = PROMISE_NOT_KEPT


class ExportDiffers(SamestepError):
    """An exported file and its model compute different outputs."""

    exit_code = PROMISE_NOT_KEPT


class RankHung(SamestepError):
    """A collective waited longer than distributed.timeout; the message lists where every rank is."""

    exit_code = 7

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        """The ones that the others waited for."""


def code_of_ranks(code: int) -> int:
    """Return the exit code for a launch whose ranks ended with this one: theirs if it means something."""
    return code if code in (2, 3, 4, 7) else 1


class Stopped(SamestepError, SystemExit):
    """A signal requested a stop; the run is saved and resumes when it is started again.

    A script that does not catch it ends with its exit code, and without a traceback.
    """

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_code
