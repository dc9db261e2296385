"""A changed script is a new run: which name it gets beside the run that it was before."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from itertools import count
from pathlib import Path

from samestep.checkpoint.run_result import read_result
from samestep.config import Config
from samestep.errors import CheckpointError
from samestep.run.origin import Origin

CODE = "code"
"""In `resume.allow`: the code of a run may have changed since."""


def name_for(config: Config, report: Callable[[str], None]) -> str:
    """Return the name of the run that this start belongs to: the config's, or that with a number.

    A run that was interrupted resumes, also with changed code: most often an error was corrected. One
    that is complete would have nothing to train; then changed code is a new run. Other arguments of a
    script are another run in any case.
    """
    decided = config.run_dir is not None or config.resume.checkpoint != "auto"
    if decided or CODE in config.resume.allow:
        return config.name
    now = Origin.of(config)
    why = ""
    for number in count(1):
        name = config.name if number == 1 else f"{config.name}-{number}"
        path = config.model_copy(update={"name": name}).run_path
        reason = _why_another(path, now)
        if not reason:
            if why:
                report(f"{why}: this is another run, {path}. resume.allow=[{CODE}] keeps to the earlier one")
            return name
        why = why or reason
    raise AssertionError("there is always another number")


def _why_another(run: Path, now: Origin) -> str:
    """Return why a start is another run than the one in a directory; empty if it is that run, or there is none."""
    before = Origin.read(run)
    if before is None or now.code is None:
        return ""
    name = Path(now.code).name
    if before.command is not None and now.command is not None and before.code == now.code:
        earlier, arguments = before.command.arguments, now.command.arguments
        if earlier != arguments:
            return f"{run} was trained by {shlex.join([name, *earlier])}, not {shlex.join([name, *arguments])}"
    if (before.code, before.sha256) == (now.code, now.sha256) or not _is_complete(run):
        return ""
    if before.code != now.code:
        return f"{run} is complete, and was trained by {before.code}"
    return f"{run} is complete, and {name} has changed since"


def _is_complete(run: Path) -> bool:
    try:
        result = read_result(run)
    except CheckpointError:
        return False
    return result is not None and result.is_done
