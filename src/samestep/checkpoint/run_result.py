"""The outcome of a run, in its `result.json`. No torch here: whether a run is done is known at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from samestep.checkpoint.files import read_typed, write_whole

RESULT = "result.json"

Status = Literal["running", "finished", "stopped_early", "preempted", "unfinished", "failed"]
"""`running` is also what a killed run leaves; `unfinished`: a loop of one's own left its steps."""


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run; one file in its directory."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
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


_ADAPTER = TypeAdapter(RunResult)


def read_result(run: Path) -> RunResult | None:
    """Return what a run has come to; None if its directory does not say it.

    Raises:
        CheckpointError: if the file is not what a run writes.
    """
    return read_typed(run / RESULT, _ADAPTER, "start the run again")
