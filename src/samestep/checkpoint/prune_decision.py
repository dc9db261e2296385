"""The value that a run reports to its sweep after an evaluation, and the sweep's decision. No torch here.

Two files, which are replaced as a whole: they need no port, work wherever a run's directory does, and
are still there after a crash.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from samestep.checkpoint.files import read_typed, write_whole

_QUESTION, _ANSWER = "asked.json", "answer.json"


@dataclass(frozen=True)
class IntermediateValue:
    """The value of `best.metric` after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class PruneDecision:
    """The decision whether the run that asked after this step ends with it."""

    step: int
    stop: bool
    reason: str = ""


_VALUE, _DECISION = TypeAdapter(IntermediateValue), TypeAdapter(PruneDecision)
_ADVICE = "remove it"


def read_value(folder: Path) -> IntermediateValue | None:
    """Return what the run of this directory has asked last."""
    return read_typed(folder / _QUESTION, _VALUE, _ADVICE)


def write_value(folder: Path, question: IntermediateValue) -> None:
    """Ask."""
    write_whole(folder / _QUESTION, json.dumps(asdict(question)))


def read_decision(folder: Path) -> PruneDecision | None:
    """Return the last answer that was given."""
    return read_typed(folder / _ANSWER, _DECISION, _ADVICE)


def write_decision(folder: Path, answer: PruneDecision) -> None:
    """Decide what the run has asked."""
    write_whole(folder / _ANSWER, json.dumps(asdict(answer)))
