"""Marks directories as ours. A marker is the first thing that is written into one; where it is
missing and there are other files, nothing is written and nothing removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from samestep.errors import OutputError, RunDirError
from samestep.parsing.limits import short

Purpose = Literal["run", "verify", "record", "cv", "sweep", "recipe", "demo"]

_NOTE = "samestep made this directory ({purpose}), and may replace or move its own files in it.\n"


def claim(folder: Path, *inside: str, purpose: Purpose = "run") -> Path:
    """Make a directory ours, with its marker first; one that is ours already stays as it is.

    Whoever writes into a run's directory before the run has opened it, as a launcher does, calls this.

    Returns:
        The directory, or the folder in it.

    Raises:
        RunDirError: if it holds other files and no marker, or cannot be written.
    """
    with reraise_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_other_owner(folder)
        if not _is_marked(folder, purpose):
            _refuse_foreign(folder, purpose)
            # Appending: another process may be writing the same marker.
            with marker_of(folder, purpose).open("a", encoding="utf-8") as file:
                file.write(_NOTE.format(purpose=purpose))
        found = folder.joinpath(*inside)
        found.mkdir(parents=True, exist_ok=True)
    return found


def _refuse_other_owner(folder: Path) -> None:
    """Refuse the directory of another user, who could put links and files of any kind into it."""
    if not hasattr(os, "geteuid") or os.geteuid() == 0:  # root owns what it finds, in containers too
        return
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise RunDirError(
            f"{folder} belongs to another user (number {owner}), who could change a run in it: set another name "
            "or run_dir, or have it given to you (chown)"
        )


def _is_marked(folder: Path, purpose: Purpose) -> bool:
    marker = marker_of(folder, purpose)
    if marker.is_symlink() or (marker.exists() and not marker.is_file()):
        raise RunDirError(f"{marker} is not a file that samestep has written: remove it")
    return marker.is_file()


def clear(folder: Path, purpose: Purpose) -> None:
    """Remove everything in a directory of ours but its marker, so that a half-removed one stays ours.

    Raises:
        RunDirError: if it is not ours, or cannot be removed.
    """
    if not folder.exists() and not folder.is_symlink():
        return
    claim(folder, purpose=purpose)
    marker = marker_of(folder, purpose)
    with reraise_os_errors(folder):
        for path in folder.iterdir():
            if path == marker:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def claim_empty(folder: Path, purpose: Purpose, force: bool) -> None:
    """Make a directory ours that nothing is in: a new one, or one of ours whose files are removed first.

    Args:
        force: whether the files of an earlier one may be removed.

    Raises:
        RunDirError: if it holds files and is not ours, whatever `force` is, or cannot be written.
        OutputError: if it is ours, holds files, and may not be overwritten.
    """
    claim(folder, purpose=purpose)
    if force:
        clear(folder, purpose)
    elif any(path != marker_of(folder, purpose) for path in folder.iterdir()):
        raise OutputError(f"{folder} is not empty: --force replaces it")


def marker_of(folder: Path, purpose: Purpose = "run") -> Path:
    """Return the file that says that a directory is ours. Another purpose has another name: existence is
    atomic, content is not."""
    return folder / f".samestep-{purpose}"


@contextmanager
def reraise_os_errors(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into an error that names the directory."""
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"run directory {short(str(folder))} cannot be written: {short(_reason(folder, error))}. Set run_dir to a "
            "directory that you can write to"
        ) from None


def _reason(folder: Path, error: OSError) -> str:
    # Not the methods of paths, which raise for a name that is too long.
    if os.path.islink(folder) and not os.path.exists(folder):  # noqa: PTH114, PTH110
        return f"it is a link to {folder.readlink()}, which does not exist"
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError):
        return f"{error.filename} is a file, not a directory"
    where = error.filename
    inside = isinstance(where, str) and Path(where) != folder
    return f"{reason} ({where})" if inside else reason


def _refuse_foreign(folder: Path, purpose: Purpose) -> None:
    # The marker comes first: who sees other files sees it too, also on a network file system.
    found = sorted(path.name for path in folder.iterdir())
    if not found or marker_of(folder, purpose).name in found:
        return
    shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    named = {"run": "a run's directory", "recipe": "what a recipe has made"}
    what = named.get(purpose, f"a directory of samestep {purpose}")
    raise RunDirError(
        f"{folder} holds files ({shown}) and is not {what}: nothing was written there. Set another "
        "name or run_dir, or give an empty directory"
    )
