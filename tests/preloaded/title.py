"""The command line that a process shows to others, as in /proc."""

from __future__ import annotations

import ctypes
from pathlib import Path

PADDING = "." * 8192
"""An argument of a server, over which its children write the lines of their own commands."""

_ARG_START, _ARG_END = 47, 48  # in /proc/self/stat, of which the second entry may hold blanks


def set_title(*words: str) -> None:
    """Show these words as this process's command line."""
    entries = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(entries[place - 2]) for place in (_ARG_START, _ARG_END))
    line = "\0".join(words).encode(errors="surrogateescape")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))
