"""What saving does to the disk, call by call. A class, so that a test can make any call fail."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO


class Files:
    """Plain file operations; `sync` is what makes them outlast a crash of the machine."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True)

    def open_new(self, path: Path) -> IO[bytes]:
        return path.open("wb", buffering=0)  # what is written is on its way, not in a buffer

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or a folder's entries, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def copy(self, source: Path, target: Path) -> None:
        """Not a second name: what a user does to the copy must not reach the checkpoint."""
        shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder, if it is there."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class DigestedFile:
    """A new file that knows the checksum and the size of what was written to it."""

    def __init__(self, files: Files, path: Path) -> None:
        self._file = files.open_new(path)
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None
        """What went wrong in a write, for callers whose writer replaces it by its own error."""

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        written = len(rest)
        self._digest.update(rest)
        try:
            while rest:  # one call may write less than it was given
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        self.size += written
        return written

    def flush(self) -> None:
        """Nothing is buffered here; zip writers ask anyway."""

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
