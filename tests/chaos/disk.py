"""A disk that can be full: a small tmpfs where we may mount one, else a limit on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

from tests.chaos.family import members

_MEGABYTES = 64
_LARGEST_FILE = 8192


class SmallDisk:
    """The disk that runs are on.

    Args:
        folder: Where it is mounted, if that is allowed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_MEGABYTES}m", "samestep-chaos", str(folder)]
        done = subprocess.run(mount, capture_output=True, check=False) if os.geteuid() == 0 else None
        self.is_mounted = done is not None and done.returncode == 0

    @property
    def words(self) -> str:
        """What a program is told that writes to it when it is full."""
        return "No space left on device" if self.is_mounted else "File too large"

    def fill(self, before: dict[int, str]) -> None:
        """Leave no space on it; without a mount, for all processes but those that were there before."""
        if not self.is_mounted:
            for pid in members().keys() - before.keys():
                try:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
                except ProcessLookupError:
                    continue
            return
        piece = bytes(1 << 20)
        with self._filler.open("wb", buffering=0) as file:
            while piece:
                try:
                    file.write(piece)
                except OSError:
                    piece = piece[: len(piece) // 2]  # down to the last byte

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"
