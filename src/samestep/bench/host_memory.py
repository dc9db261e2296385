"""What this process holds of its host's memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import psutil

_SMALL_OBJECT = 64
"""About what one of Python's own small objects takes: their allocator counts them, not their bytes."""

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def resident() -> int:
    """Bytes that the system has given to the process.

    They move by themselves: the allocator keeps pages that are free, and returns some.
    """
    return int(psutil.Process().memory_info().rss)


def in_use() -> int | None:
    """Bytes that the process has asked for and not freed: of malloc, of Python, and shared ones.

    None where the C library does not tell, which is any but glibc 2.33 or later. What other allocators
    take from the system is not in it, such as mimalloc, which torch has for tensors on ARM.
    """
    malloc = _malloc_info()
    if malloc is None:
        return None
    told = malloc()
    shared = int(getattr(psutil.Process().memory_info(), "shared", 0))
    small = sys.getallocatedblocks() * _SMALL_OBJECT
    return int(told.uordblks) + int(told.hblkhd) + shared + small


@cache
def _malloc_info() -> Callable[[], _MallocInfo] | None:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    found.restype, found.argtypes = _MallocInfo, []
    return found
