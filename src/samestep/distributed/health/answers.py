"""Answers of ranks to one that asks where they all are: their stacks, and their last collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.distributed.health.hang_report import Beat, Calls, different_calls
from samestep.distributed.health.own_calls import unmatched_calls

Answers = Mapping[int, Mapping[str, Any]]
"""By rank."""


def calls_of(answers: Answers) -> dict[int, Calls]:
    """Return the last collectives of each rank."""
    return {rank: [tuple(call) for call in answer["calls"]] for rank, answer in answers.items()}


def stacks_of(answers: Answers) -> dict[int, str]:
    """Return the Python stack of each rank."""
    return {rank: answer["stack"] for rank, answer in answers.items()}


def unmatched(beats: Sequence[Beat], answers: Answers) -> str | None:
    """Return a message if ranks wait in a collective of the user's own that others do not call."""
    waiting = [beat.rank for beat in beats if not beat.is_awaited]
    stacks = stacks_of(answers)
    return unmatched_calls({b.rank: stacks.get(b.rank, "") for b in beats}, waiting)


def parted(answers: Answers) -> str | None:
    """Return a message, with all stacks, if ranks have called different collectives under one number."""
    found = different_calls(calls_of(answers))
    if found is None:
        return None
    advice = "Every rank must make the same calls: none of them behind `if run.is_main:`"
    stacks = [f"rank {rank}'s Python stack:\n{text}" for rank, text in stacks_of(answers).items()]
    return "\n".join([f"{found}. {advice}", *stacks])
