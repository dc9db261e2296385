"""Write a recommendation as a config that includes the one it is about. No torch here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import OutputError


@dataclass(frozen=True)
class Setting:
    """A key that a layer sets."""

    key: str
    value: Any
    remarks: Sequence[str] = ()
    """Lines above it."""


def refuse_layer(path: Path) -> None:
    """Refuse a file that is there, or no config; before the work of a command."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise OutputError(f"{path}: a config is written there: end its name in .yaml")
    if path.exists() or path.is_symlink():
        raise OutputError(f"{path} exists already, and is kept: name another file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no directory {path.parent}")


def write_layer(path: Path, config: Path, command: str, settings: Sequence[Setting]) -> None:
    """Write it."""
    from samestep.checkpoint.files import write_whole

    refuse_layer(path)
    below = os.path.relpath(config.resolve(), path.parent.resolve())
    lines = [
        f"# Recommended by {command}, {time.strftime('%Y-%m-%d')}. Measure again on other machines.",
        f"include: {json.dumps(below)}",
    ]
    for one in settings:
        lines += ["", *(f"# {' '.join(remark.split())}" for remark in one.remarks), _line(one)]
    try:
        write_whole(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def _line(setting: Setting) -> str:
    first, *inside = setting.key.split(".")
    value = setting.value
    for name in reversed(inside):
        value = {name: value}
    return f"{first}: {json.dumps(value)}"
