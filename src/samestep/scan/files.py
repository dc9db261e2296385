"""Which files of a code base are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from samestep.errors import OutputError

SUFFIXES = (".py", ".ipynb")
_NOT_OURS = frozenset({"node_modules", "site-packages", "__pycache__", "venv"})


def code_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Python files and notebooks below some paths, each once, in the order of their names.

    Left out are folders with a dot, virtual environments, and links to folders, which may lead in circles.

    Raises:
        OutputError: A path is not there, or no such file.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path):
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file


def _below(path: Path) -> Iterator[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise OutputError(f"{path} is no Python file or notebook ({', '.join(SUFFIXES)})")
        yield path
        return
    if not path.is_dir():
        raise OutputError(f"{path} is not there: give a folder, a Python file or a notebook")
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_left_out(here / name))
        yield from (here / n for n in sorted(names) if n.endswith(SUFFIXES) and _is_plain(here / n))


def _is_left_out(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _NOT_OURS or (folder / "pyvenv.cfg").exists()


def _is_plain(file: Path) -> bool:
    """Whether it is a file, and no pipe or device, of which a read may never end."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError:  # a link that leads nowhere, or in a circle
        return False
