"""The command line that a process shows to others, as in ps. Linux only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

PADDING = "." * 4096
"""An argument of a server, over which the processes that it forks write their own words."""

_ARG_START, _ARG_END = 47, 48
"""Entries of /proc/self/stat, of which the second may hold blanks."""


def show_words(words: Sequence[str]) -> None:
    """Show these words as this process's command line, as far as there is space."""
    entries = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(entries[place - 2]) for place in (_ARG_START, _ARG_END))
    line = os.fsencode("\0".join(words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))
