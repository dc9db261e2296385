"""What is sent to a server: a command, and the files that are its standard streams."""

from __future__ import annotations

import json
import signal
import socket
import struct
from typing import NamedTuple

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!q")
_MOST_FILES = 64


class Request(NamedTuple):
    """A command for a new process.

    Attributes:
        argv: The command, starting with the interpreter.
        environment: All variables of the process.
        folder: Its working directory.
        files: The numbers that the files which travel with the request have in the process.
        new_session: Whether it leads a session of its own.
        ignored: Signals that it ignores, as its parent does.
    """

    argv: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]
    new_session: bool
    ignored: list[int]


def ignored_signals() -> list[int]:
    """What a process started from here would ignore; Python itself ignores two more."""
    numbers = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    return [int(number) for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def send(channel: socket.socket, request: Request, descriptors: list[int]) -> None:
    payload = json.dumps(request).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(payload))], descriptors)
    channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """A request and its files; None when the other end is closed."""
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_FILES)
    if len(head) < _LENGTH.size:
        return None
    payload = _receive_exactly(channel, *_LENGTH.unpack(head))
    return Request(*json.loads(payload)), descriptors


def send_number(channel: socket.socket, number: int) -> None:
    channel.sendall(_NUMBER.pack(number))


def receive_number(channel: socket.socket) -> int:
    return int(_NUMBER.unpack(_receive_exactly(channel, _NUMBER.size))[0])


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    payload = b""
    while len(payload) < size:
        piece = channel.recv(size - len(payload))
        if not piece:
            raise EOFError("the other end of the channel was closed")
        payload += piece
    return payload
