"""The file operations of a save. A class, so that a test can make any of them fail."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from pydantic import TypeAdapter, ValidationError

from samestep.errors import CheckpointError, OutputError, TextError
from samestep.parsing.files import is_file, open_regular
from samestep.parsing.json_text import read_json

T = TypeVar("T")


def read_typed(path: Path, adapter: TypeAdapter[T], advice: str) -> T | None:
    """Return what a JSON file of a run holds; None if there is no such file.

    Raises:
        CheckpointError: if it is no JSON, or not what a run writes.
    """
    if not is_file(path):
        return None
    try:
        return adapter.validate_python(read_json(path))
    except TextError as error:
        raise CheckpointError(f"{path} {error}") from None
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"]))
        raise CheckpointError(f"{path} is not what a run writes ({where}: {wrong['msg']}): {advice}") from None


class Files:
    """Plain file operations; `sync` makes them survive a crash of the machine."""

    def make_folder(self, path: Path) -> None:
        """Create a directory, which must not exist yet, and its parent, but nothing above that.

        A run directory that was removed must not come back with a single checkpoint in it.
        """
        path.parent.mkdir(exist_ok=True)
        path.mkdir()

    def open_new(self, path: Path) -> IO[bytes]:
        """Return a new unbuffered file: what is written has left this process."""
        return path.open("wb", buffering=0)

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or a directory's entries, are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Rename atomically; an existing target is replaced."""
        os.replace(source, target)

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file, and not as a hard link: a change to the copy must not reach the checkpoint."""
        shutil.copyfile(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory, if it exists."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def refuse_existing(*paths: Path) -> None:
    """Refuse to replace files that a user has named; for commands that have a --force."""
    taken = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if taken:
        raise OutputError(f"{', '.join(taken)} exists already: --force replaces it, or name another file")


def partial_of(path: Path) -> Path:
    """Return a name beside a file that a user has named, for writing it: nobody has such a file."""
    return path.with_name(f".{path.name[:100]}-{secrets.token_hex(8)}.partial")


@contextmanager
def replacing(path: Path, synced: bool = True) -> Iterator[Path]:
    """Yield a name to write a file under; it takes the file's place at the end, or nothing remains of it."""
    files, partial = Files(), partial_of(path)
    try:
        yield partial
        if synced:
            files.sync(partial)
        files.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str, private: bool = False, synced: bool = True) -> None:
    """Write a text file, on the disk when this returns if it is `synced`: whole, or not at all.

    Args:
        path: The file; an existing one is replaced, and a link in its place is not followed.
    """
    how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with replacing(path, synced) as partial:
        number = os.open(partial, how, 0o600 if private else 0o666)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)


class DigestedFile:
    """A new file that computes the checksum and size of what is written to it."""

    def __init__(self, files: Files, path: Path) -> None:
        self._file = files.open_new(path)
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None
        """The error of a write, for callers whose writer replaces it by another one."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data; returns its size in bytes."""
        rest = memoryview(data).cast("B")
        written = len(rest)
        self._digest.update(rest)
        try:
            while rest:  # one call may write only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        self.size += written
        return written

    def flush(self) -> None:
        """Nothing is buffered; zip writers call it anyway."""

    @property
    def sha256(self) -> str:
        """The checksum of what was written so far."""
        return self._digest.hexdigest()

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
