"""Distinguishing a lost peer from an error of this rank itself."""

from __future__ import annotations

from samestep.errors import PeerLost

_SIGNS = ("gloo", "Connection", "NCCL", "ncclUnhandled", "Socket", "Timed out", "timed out")


def lost_peer(error: BaseException | None) -> PeerLost | None:
    """What an error inside a collective means, if it means a broken connection.

    Gloo and NCCL raise plain RuntimeErrors; only their messages show what happened.
    """
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).strip()
    if not any(sign in text for sign in _SIGNS):
        return None
    return PeerLost(f"lost another rank: {text.splitlines()[0][:200]}")
