"""A wire that delays: `python delay_wire.py HOST_NAMESPACE SWITCH_NAMESPACE NAME MILLISECONDS`, until it is ended.

Replaces a host's eth0 by a pair of TAP devices, between which frames wait: not every kernel has netem. Prints
`up` when it carries frames; the host's network is gone when it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

_SET_INTERFACE = 0x400454CA
_TAP_WITHOUT_HEADERS = 0x0002 | 0x1000
_NETWORK = 0x40000000
_MTU = "9000"
_FRAMES_AT_ONCE = 64


def tap(namespace: str, name: str) -> int:
    with Path("/run/netns", namespace).open(encoding="ascii") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADERS)
    fcntl.ioctl(descriptor, _SET_INTERFACE, request)
    return descriptor


def ip(namespace: str, *words: str) -> str:
    argv = ["ip", "-n", namespace, *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def connect(host: str, switch: str, name: str) -> tuple[int, int]:
    address = ip(host, "-4", "-br", "addr", "show", "eth0").split()[2]
    ip(host, "link", "del", "eth0")
    ends = tap(host, "eth0"), tap(switch, name)
    ip(host, "addr", "add", address, "dev", "eth0")
    ip(host, "link", "set", "eth0", "mtu", _MTU, "up")
    ip(switch, "link", "set", name, "mtu", _MTU, "master", "br0", "up")
    return ends


def carry(ends: tuple[int, int], delay: float) -> None:
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        due = min((frames[0][0] for frames in waiting.values() if frames), default=None)
        ready = poll.poll(None if due is None else max(0.0, due - time.monotonic()))
        for end, _ in ready:
            read_frames(end, waiting[ends[0] if end == ends[1] else ends[1]], delay)
        now = time.monotonic()
        for end, frames in waiting.items():
            while frames and frames[0][0] <= now:
                os.write(end, frames.popleft()[1])


def read_frames(end: int, frames: deque[tuple[float, bytes]], delay: float) -> None:
    for _ in range(_FRAMES_AT_ONCE):
        try:
            frames.append((time.monotonic() + delay, os.read(end, 1 << 17)))
        except BlockingIOError:
            return


if __name__ == "__main__":
    found = connect(*sys.argv[1:4])
    print("up", flush=True)
    carry(found, float(sys.argv[4]) / 1e3)
