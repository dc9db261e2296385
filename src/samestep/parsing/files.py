"""Text files from elsewhere."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import TextError
from samestep.parsing.limits import check_text

LARGEST_FILE = 64_000_000
"""Bytes of a file that is read as a whole."""
LONGEST_LINE = 1_000_000


def read_text(path: Path, most: int = LARGEST_FILE) -> str:
    """Return the text of a UTF-8 file of at most so many bytes; raises a `TextError` with the reason."""
    with _reading():
        return read_bytes(path, most).decode("utf-8")


def read_bytes(path: Path, most: int = LARGEST_FILE) -> bytes:
    """Return the content of a file of at most so many bytes; raises a `TextError` with the reason."""
    with _reading(), open_regular(path) as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise TextError(f"is larger than {most / 1e6:g} MB, which no such file is")
        return content


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read it; a pipe in its place, which would be waited for forever, is an OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        os.close(number)
        reason = errno.EISDIR if stat.S_ISDIR(mode) else errno.ESPIPE
        text = os.strerror(reason) if reason == errno.EISDIR else "it is a pipe, not a file"
        raise OSError(reason, text, str(path))
    return os.fdopen(number, "rb")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file one by one; bytes that are no text become the character U+FFFD."""
    with _reading(), io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        while line := file.readline(LONGEST_LINE):
            yield line


class NewLines:
    """The lines of a UTF-8 file after a place that was read before.

    Iterating yields them; raises a `TextError` if the file cannot be read. A line without an end is yielded, too, and
    again when more of it is there.

    Args:
        path: The file.
        end: Where the last reading ended.
        file: Which file that was; None if there was none.
    """

    def __init__(self, path: Path, end: int, file: int | None) -> None:
        self._path = path
        with _reading():
            found = path.stat()
        self.file = found.st_ino
        self.is_other_file = self.file != file or found.st_size < end
        """Whether it must be read from the beginning."""
        self.end = 0 if self.is_other_file else end

    def __iter__(self) -> Iterator[str]:
        with _reading(), open_regular(self._path) as file:
            file.seek(self.end)
            while line := file.readline(LONGEST_LINE):
                if line.endswith(b"\n"):
                    self.end = file.tell()
                yield line.decode("utf-8", "replace")


def is_file(path: Path) -> bool:
    """Return whether there is such a file; no, if there cannot be one of such a name."""
    return os.path.isfile(path)  # noqa: PTH113 - the method raises for a name that is too long


def is_folder(path: Path) -> bool:
    """Return whether there is such a directory; no, if there cannot be one of such a name."""
    return os.path.isdir(path)  # noqa: PTH112 - the method raises for a name that is too long


def unusable_path(path: Path) -> str:
    """Return why nothing can be of this name; empty if something can."""
    try:
        check_text(str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        path.lstat()
    except (TextError, UnicodeError, ValueError) as error:
        return str(error)
    except OSError as error:
        return str(error.strerror) if error.errno == errno.ENAMETOOLONG else ""
    return ""


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TextError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TextError("is not UTF-8 text") from None
    except ValueError:  # of open
        raise TextError("cannot be read: a path holds no null character") from None
