"""Requests of a command to a run besides its config; a script's run gets them in `samestep.start`.

A script decides itself when and with which config it opens its run. `samestep train SCRIPT`
runs it in its own process and leaves the request where `start` finds it: not in the environment,
which the script's own child processes would inherit.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from samestep.config import Config, override_config
from samestep.errors import StepError, TaskError
from samestep.run.run import Run
from samestep.run.saved_files import SavedFiles
from samestep.train.pruning import PruningListener
from samestep.train.record import Recorder
from samestep.train.trace import Tracer


@dataclass(frozen=True)
class Observation:
    """Settings to observe a run, and where it is to stop."""

    record: Path | None = None
    """Where its exact record goes."""
    stop_after: int | None = None
    """Save and raise `Stopped` after so many steps."""
    trace: Path | None = None
    """Where every tensor of some steps goes."""
    trace_from: int = 0
    """The first of these steps."""
    prune_dir: Path | None = None
    """Where it asks after each evaluation whether to continue."""

    def attach(self, run: Run) -> None:
        """Before the run prepares anything."""
        if self.stop_after is not None:
            run.pause_after(self.stop_after)
        if self.record is not None:
            Recorder(run, self.record)
            SavedFiles(self.record, run.run_dir, run.context.rank)
        if self.trace is not None:
            Tracer(run, self.trace, self.trace_from)
        if self.prune_dir is not None:
            run.add_listener(PruningListener(run, self.prune_dir))


@dataclass
class ScriptRequest:
    """The request of a command to the run that a script opens."""

    overrides: Sequence[str] = ()
    """Replace values of whatever config the script opens its run with."""
    observation: Observation = Observation()
    describe: Path | None = None
    """Write the config here and end, where the run would begin."""
    opened: list[Path] = field(default_factory=list)
    """The directories of the runs that the script has opened."""
    runs: ExitStack = field(default_factory=ExitStack)
    """Closes these runs with the script: it need not open them with `with`."""

    def configure(self, config: Config) -> Config:
        """Return the config of the run that the script opens."""
        if self.overrides:
            config = override_config(config, self.overrides)
        if self.describe is not None:
            self.describe.write_text(config.model_dump_json(), encoding="utf-8")
            raise SystemExit(0)
        return config

    def observe(self, run: Run) -> None:
        """Take the run that the script has opened."""
        if self.opened and self.observation != Observation():
            raise StepError(
                f"the script opens a second run, in {run.run_dir}, after that in {self.opened[0]}: a "
                "command can record or stop one run. Give each its own script, or arguments"
            )
        self.opened.append(run.run_dir)
        self.runs.push(run)
        self.observation.attach(run)


_REQUEST: ContextVar[ScriptRequest | None] = ContextVar("samestep_request", default=None)


def requested() -> ScriptRequest:
    """Return what the command that runs this script wants of its run; nothing if none does."""
    return _REQUEST.get() or ScriptRequest()


def run_script(script: Path, arguments: Sequence[str], request: ScriptRequest) -> None:
    """Run a script as `python script.py` would, and hand the request to its `samestep.start`.

    Raises:
        TaskError: The script does not exist, or has ended without opening a run.
    """
    if not script.is_file():
        raise TaskError(f"{script}: no such file. Give a config, or a script that trains")
    token = _REQUEST.set(request)
    try:
        with _as_main(script, arguments), request.runs:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        _REQUEST.reset(token)
    if not request.opened:
        raise TaskError(
            f"{script} has ended without calling samestep.start in its main thread: there is no run in it. "
            f"docs/own-loop.md shows the lines of a run, and samestep check {script} what else to change"
        )


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys` to what a script finds when the interpreter was started with it."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path
