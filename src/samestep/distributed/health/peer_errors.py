"""Distinguishes a lost peer from an error of this rank itself, and finds users' own collectives in the stacks of ranks."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

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


_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(torch.__file__).parent / "distributed")
_OURS = str(Path(__file__).parents[2])


def own_call(stack: str) -> str | None:
    """Return the collective of torch that somebody else's code called at the end of a stack, and where."""
    frames = [match.groupdict() for match in _FRAME.finditer(stack)]
    last = max((n for n, f in enumerate(frames) if not f["file"].startswith(_TORCH)), default=None)
    if last is None or frames[last]["file"].startswith(_OURS):
        return None
    called = next((f for f in frames[last + 1 :] if f["file"].startswith(_COLLECTIVES)), None)
    # Decorators of torch are called "wrapper": what they call has the name.
    named = [f["name"] for f in frames[last + 1 :] if f["name"] != "wrapper"]
    if called is None or not named:
        return None
    caller = frames[last]
    where = f"{Path(caller['file']).name}:{caller['line']}, in {caller['name']}"
    return f"torch.distributed.{named[0]} ({where})"


def unmatched_calls(stacks: Mapping[int, str], waiting: Collection[int]) -> str | None:
    """Return a message if some ranks are in a collective of the user's that the others do not call.

    Args:
        stacks: Of all ranks that answered.
        waiting: The ranks that wait in a collective of samestep's.
    """
    calls = {rank: own_call(stack) for rank, stack in stacks.items() if rank not in waiting}
    found = {rank: call for rank, call in calls.items() if call is not None}
    if not found or len(found) < len(calls):
        return None  # none; or another rank is busy with something else, and may come
    if not waiting and len(set(found.values())) == 1:
        return None
    lines = [f"rank {rank} is in {call}" for rank, call in sorted(found.items())]
    if waiting:
        lines.append("the others are not in it, but wait in the step")
    return (
        "the ranks called different collectives: "
        + "; ".join(lines)
        + ". Every rank must call the same ones, in the same order; step.sum_over_lanes and the "
        "run's context do it for you"
    )
