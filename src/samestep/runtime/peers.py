"""Telling a lost peer from a mistake of this rank's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import PeerLost

_SIGNS = ("gloo", "Connection", "NCCL", "ncclUnhandled", "Socket", "Timed out", "timed out")


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turn a broken connection inside a collective into a `PeerLost` of one line.

    Gloo and NCCL raise plain RuntimeErrors; only their words tell what happened.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if not any(sign in text for sign in _SIGNS):
            raise
        raise PeerLost(f"lost another rank: {text.splitlines()[0][:200]}") from error
