"""The value that a run reports to its sweep after an evaluation, and the sweep's decision. No torch here.

Two files, which are replaced as a whole: they need no port, work wherever a run's directory does, and
are still there after a crash.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import read_document, write_whole
from samestep.errors import CheckpointError

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


def read_value(folder: Path) -> IntermediateValue | None:
    """Return what the run of this directory has asked last."""
    document = _read(folder / _QUESTION)
    return None if document is None else IntermediateValue(int(document["step"]), float(document["value"]))


def write_value(folder: Path, question: IntermediateValue) -> None:
    """Ask."""
    _write(folder / _QUESTION, asdict(question))


def write_decision(folder: Path, answer: PruneDecision) -> None:
    """Decide what the run has asked."""
    _write(folder / _ANSWER, asdict(answer))


def read_decision(folder: Path) -> PruneDecision | None:
    """Return the last answer that was given."""
    document = _read(folder / _ANSWER)
    if document is None:
        return None
    return PruneDecision(int(document["step"]), bool(document["stop"]), str(document["reason"]))


def _write(path: Path, document: dict[str, Any]) -> None:
    write_whole(path, json.dumps(document))


def _read(path: Path) -> dict[str, Any] | None:
    document = read_document(path)
    if document is not None and not isinstance(document, dict):
        raise CheckpointError(f"{path} is not what a run of a sweep writes")
    return document
