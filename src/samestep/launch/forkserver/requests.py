"""Messages between a forkserver and its clients: texts, and open files."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LENGTH = struct.Struct("!I")
_MOST_FILES = 16


@dataclass(frozen=True)
class ForkRequest:
    """A process to fork; the files that it gets are sent along."""

    words: Sequence[str]
    """Its command and arguments, as after `samestep`."""
    numbers: Sequence[int]
    """What the files are called in it: 0, 1 and 2 are its standard streams."""
    environment: Mapping[str, str]

    def texts(self) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [str(len(self.words)), *self.words, " ".join(map(str, self.numbers)), *variables]

    @classmethod
    def of(cls, texts: Sequence[str]) -> ForkRequest:
        count = 1 + int(texts[0])
        numbers = [int(number) for number in texts[count].split()]
        environment = dict(text.split("=", 1) for text in texts[count + 1 :])
        return cls(texts[1:count], numbers, environment)


def send(channel: socket.socket, texts: Sequence[str], files: Sequence[int] = ()) -> None:
    """Send texts as the system has words and variables: of any bytes but null."""
    payload = b"\0".join(map(os.fsencode, texts))
    socket.send_fds(channel, [_LENGTH.pack(len(payload))], files)
    channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[list[str], list[int]]:
    """Texts, and the files that came with them.

    Raises:
        EOFError: if the other end is closed.
    """
    head, files, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_FILES)
    head += _exactly(channel, _LENGTH.size - len(head))
    payload = _exactly(channel, *_LENGTH.unpack(head))
    return [os.fsdecode(text) for text in payload.split(b"\0")], files


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = channel.recv(size - len(found))
        if not piece:
            raise EOFError("the other end of the channel is closed")
        found += piece
    return found


PADDING = "." * 4096
"""An argument of a server, over which the processes that it forks write their own words."""

_ARG_START, _ARG_END = 47, 48
"""Entries of /proc/self/stat, of which the second may hold blanks."""


def set_process_title(words: Sequence[str]) -> None:
    """Show these words as this process's command line, as far as there is space."""
    entries = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(entries[place - 2]) for place in (_ARG_START, _ARG_END))
    line = os.fsencode("\0".join(words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))
