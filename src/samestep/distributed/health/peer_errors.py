"""Distinguishing a lost peer from an error of this rank itself."""

from __future__ import annotations

import traceback

from samestep.distributed.health.own_calls import own_call
from samestep.errors import PeerLost

_TIMED_OUT = ("timed out", "timeout")
_SIGNS = ("gloo", "connection", "nccl", "socket", *_TIMED_OUT)


def lost_peer(error: BaseException | None) -> PeerLost | None:
    """Return what an error inside a collective means, if it means a broken connection.

    Gloo and NCCL raise plain RuntimeErrors; only their messages show what happened.
    """
    if not isinstance(error, RuntimeError):
        return None
    text = next(iter(str(error).strip().splitlines()), "")
    words = str(error).lower()
    if not any(sign in words for sign in _SIGNS):
        return None
    timed_out = any(sign in text.lower() for sign in _TIMED_OUT)
    return PeerLost(f"lost another rank: {text[:200]}", timed_out)


def broken_collective(error: BaseException) -> tuple[PeerLost | None, str]:
    """Return a collective that broke, and where it was called: one of ours, or one that the user called.

    The user's own breaks in their own code, where an error of any other kind is theirs.
    """
    trace = "".join(traceback.format_tb(error.__traceback__))
    if isinstance(error, PeerLost):
        return error, trace
    return (lost_peer(error) if own_call(trace) is not None else None), trace
