"""Folders of our own in directories of the user's. No torch here."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import PlanError


@contextmanager
def folder_in(directory: Path) -> Iterator[Path]:
    """A folder of our own in a directory of the user's; removed with all that is in it, and nothing else.

    Raises:
        PlanError: if there is no such directory, or nobody may write there.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix="samestep-bench-", dir=directory))
    except OSError as error:
        raise PlanError(
            f"--directory is {directory}, and no folder can be made in it: {error.strerror}. Give a directory "
            "that exists, on the disk to measure"
        ) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
