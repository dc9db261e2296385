"""Files to start a project from: they train and verify as they are."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from samestep.errors import LaunchError

_FILES = {"config.yaml": "config.yaml", "task.py": "task.py.txt"}


def write_starter(folder: Path) -> list[Path]:
    """Write the files; refuses to overwrite any, and then writes none."""
    paths = [folder / name for name in _FILES]
    taken = [path for path in paths if path.exists() or path.is_symlink()]
    if taken:
        raise LaunchError(
            f"{', '.join(map(str, taken))} already exist: nothing was written. Name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for name, resource in _FILES.items():
            text = files(__package__).joinpath(resource).read_text(encoding="utf-8")
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written: {error.strerror or error}") from None
    return written
