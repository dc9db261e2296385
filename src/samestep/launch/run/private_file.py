"""Scripts with a run's environment: no other user reads them."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, text: str, mode: int, *, new: bool = False) -> None:
    """Write a file that only its owner can read, from its first byte on.

    Args:
        new: whether an existing file, or a link in its place, is an error and stays as it is.
    """
    how = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
    data = text.encode("utf-8")
    with os.fdopen(os.open(path, how, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # also of a file that was there, and whatever the umask is
        file.write(data)
