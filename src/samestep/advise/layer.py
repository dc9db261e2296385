"""The recommendation as a config of its own, which includes the one that it is about. No torch here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.advise.advice import Advice
from samestep.checkpoint.files import write_whole
from samestep.errors import OutputError


def refuse_layer(path: Path) -> None:
    """Refuse a file that is there, or no config; before the work of a command.

    Raises:
        OutputError: if so.
    """
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise OutputError(f"{path}: a config is written there: end its name in .yaml")
    if path.exists() or path.is_symlink():
        raise OutputError(f"{path} exists already, and is kept: name another file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no directory {path.parent}")


def write_layer(path: Path, config: Path, advice: Sequence[Advice]) -> None:
    """Write it.

    Args:
        path: The file, which must not exist.
        config: The config that it includes.
        advice: What it sets.
    """
    refuse_layer(path)
    try:
        write_whole(path, layer_text(path, config, advice))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def layer_text(path: Path, config: Path, advice: Sequence[Advice]) -> str:
    """A config that includes another, and sets what was recommended, with the figures behind it."""
    below = os.path.relpath(config.resolve(), path.parent.resolve())
    lines = [
        f"# Recommended by samestep advise, {time.strftime('%Y-%m-%d')}. Measure again on other machines.",
        f"include: {json.dumps(below)}",
    ]
    for one in advice:
        for key, value in one.overrides.items():
            lines += ["", f"# {one.topic}: {' '.join(one.says.split())}"]
            if one.another_run:
                lines.append("# This changes what the training computes: it is another run.")
            lines.append(_line(key, value))
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    section, _, name = key.rpartition(".")
    text = f"{name}: {json.dumps(value)}"
    return f"{section}: {{{text}}}" if section else text
