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

_VALUE_FILE, _DECISION_FILE = "value.json", "decision.json"


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
    """Return the value that the run has reported last."""
    return read_typed(folder / _VALUE_FILE, _VALUE, _ADVICE)


def write_value(folder: Path, value: IntermediateValue) -> None:
    """Report a value, and so ask for a decision."""
    write_whole(folder / _VALUE_FILE, json.dumps(asdict(value)))


def read_decision(folder: Path) -> PruneDecision | None:
    """Return the last decision."""
    return read_typed(folder / _DECISION_FILE, _DECISION, _ADVICE)


def write_decision(folder: Path, decision: PruneDecision) -> None:
    """Answer the value that was reported last."""
    write_whole(folder / _DECISION_FILE, json.dumps(asdict(decision)))
