"""Collectives that users call themselves, found in the stacks of ranks that wait in one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

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
    said = [f"rank {rank} is in {call}" for rank, call in sorted(found.items())]
    if waiting:
        said.append("the others are not in it, but wait in the step")
    return (
        "the ranks called different collectives: "
        + "; ".join(said)
        + ". Every rank must call the same ones, in the same order; step.sum_over_lanes and the "
        "run's context do it for you"
    )
