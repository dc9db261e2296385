"""The target of a launch: the config of a task, or a script, which decides its config itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from samestep.config import Config, load_config
from samestep.environment.interpreter import interpreter_words
from samestep.errors import LaunchError, RankFailed, code_of_ranks
from samestep.launch.commands.rank_command import argv_for, is_script
from samestep.parsing.json_text import read_json


def read_target(file: Path, overrides: Sequence[str], arguments: Sequence[str] = ()) -> Config:
    """Return the config of a run; a script is run up to its `samestep.start` to learn it.

    Raises:
        RankFailed: if the script fails before it opens its run.
        LaunchError: if there is no such script, or it opens none.
    """
    if not is_script(file):
        return load_config(file, overrides)
    if not file.is_file():
        raise LaunchError(f"there is no {file} here")
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "config.json"
        words = argv_for(file, overrides, ["--describe", str(answer)], arguments)
        asked = subprocess.run(
            [sys.executable, *interpreter_words(), "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        if asked.returncode != 0:
            message = asked.stderr.strip().removeprefix("samestep: ")
            raise RankFailed(
                f"{file} failed before its samestep.start, to which it is run first:\n{message}",
                code_of_ranks(asked.returncode),
            )
        if not answer.exists():
            raise LaunchError(f"{file} has ended without calling samestep.start: there is no run in it")
        return load_config(read_json(answer))
