"""The outcome of a run, in its `result.json`. No torch here: whether a run is done is known at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from samestep.checkpoint.files import read_document, write_whole
from samestep.errors import CheckpointError
from samestep.parsing.files import is_file

RESULT = "result.json"

Status = Literal["running", "finished", "stopped_early", "preempted", "unfinished", "failed"]
"""`running` is also what a killed run leaves; `unfinished`: a loop of one's own left its steps."""


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run; one file in its directory."""

    status: Status
    reason: str | None = None
    """Why it ended before its last step; None if it did not."""
    steps: int = 0
    """Completed steps."""
    seconds: float = 0.0
    """From the first step to the end, over all starts that ended by themselves."""
    world: int = 1
    """Ranks of the last start."""
    loss: float | None = None
    """Loss of the last step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    best: Mapping[str, Any] | None = None
    """The best evaluation: its step, metric, value, and all metrics where its checkpoint is kept."""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    """The last and the best, as paths in the run's directory."""

    @property
    def is_done(self) -> bool:
        """Return whether nothing is left to train."""
        return self.status in ("finished", "stopped_early")

    def as_json(self) -> dict[str, Any]:
        """Return it as it is written."""
        return asdict(self)


def write_result(run: Path, result: RunResult) -> None:
    """Write a run's `result.json`: whole, or not at all."""
    write_whole(run / RESULT, json.dumps(result.as_json(), indent=1))


_KINDS: dict[str, tuple[type, ...]] = {
    "status": (str,), "reason": (str, NoneType), "steps": (int,), "seconds": (int, float), "world": (int,),
    "loss": (int, float, NoneType), "metrics": (dict,), "best": (dict, NoneType), "checkpoints": (dict,),
}  # fmt: skip


def read_result(run: Path) -> RunResult | None:
    """Return what a run has come to; None if its directory does not say it.

    Raises:
        CheckpointError: if the file is not what a run writes.
    """
    path = run / RESULT
    document = read_document(path)
    if document is None and not is_file(path):
        return None
    known = isinstance(document, dict) and document.keys() == _KINDS.keys()
    if not known or not all(isinstance(document[k], kind) for k, kind in _KINDS.items()):
        raise CheckpointError(f"{path} is not what a run writes: start the run again")
    if document["status"] not in get_args(Status):
        raise CheckpointError(f"{path} has a status that is not known: {document['status']!r}")
    return RunResult(**document)
