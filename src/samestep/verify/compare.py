"""The result of a verification: each run compared with the first, and whether the promise held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from samestep.run.saved_files import Saved
from samestep.train.record import RunRecord, read_state
from samestep.verify.differences import (
    Difference,
    different_tensors,
    file_difference,
    first_loss_difference,
    first_sample_difference,
    furthest_tensor,
    model_distance,
    saved_difference,
    thread_difference,
)
from samestep.verify.suspect import Suspect


@dataclass(frozen=True)
class WorldResult:
    """The run at one world size, and where it first differs from the first one."""

    record: RunRecord
    difference: Difference | None
    """The first difference in bits, whether or not the promise allows it."""
    kept: bool
    label: str
    """Its number of ranks; for a resumed run all of them, in order."""
    note: str = ""
    """What was not equal about the conditions of both runs."""

    def __str__(self) -> str:
        words = "identical" if self.difference is None else str(self.difference)
        return f"{words} ({self.note})" if self.note else words


@dataclass(frozen=True)
class Verification:
    """The result of every run, and whether the promise held."""

    same: str
    worlds: tuple[WorldResult, ...]
    rtol: float
    against: tuple[float, ...] = ()
    against_difference: Difference | None = None
    suspect: Suspect | None = None
    """The first tensor that differs, where that was traced and found."""
    tensors: int = 0
    """The number of tensors in the final states."""
    different_tensors: int = 0
    """The number of those that differ in any run."""

    @property
    def kept(self) -> bool:
        """Return whether the promise held in every run, and the given curve matches."""
        return all(world.kept for world in self.worlds) and self.against_difference is None

    @property
    def runs_differ(self) -> bool:
        """Return whether our own runs broke the promise, of which tensors can be traced."""
        return not all(world.kept for world in self.worlds)

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        document: dict[str, Any] = {
            "kept": self.kept,
            "same": self.same,
            "rtol": self.rtol if self.same == "rounding" or self.against else None,
            "worlds": {
                world.label: {
                    "kept": world.kept,
                    "steps": world.record.steps,
                    "state_hash": world.record.state_hash,
                    "losses": world.record.losses,
                    "seconds_per_step": world.record.seconds_per_step,
                    "threads_per_rank": world.record.threads,
                    "first_difference": _as_json(world.difference),
                    "note": world.note or None,
                }
                for world in self.worlds
            },
            "tensors": self.tensors,
            "different_tensors": self.different_tensors,
            "suspect": None if self.suspect is None else asdict(self.suspect),
        }
        if self.against:
            document["against"] = {"steps": len(self.against), "first_difference": _as_json(self.against_difference)}
        return document


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else asdict(difference)


def compare_runs(same: str, records: Mapping[str, Path], curve: Sequence[float], rtol: float) -> Verification:
    """Compare the records of runs with the first of them."""
    runs = {
        label: _Recorded(RunRecord.read(path), read_state(path), Saved.read(path)) for label, path in records.items()
    }
    first = next(iter(runs.values()))
    worlds = tuple(_compare_with_first(same, first, run, rtol, label) for label, run in runs.items())
    length = min(len(curve), first.record.steps)
    losses = first.record.losses[:length]
    against_difference = first_loss_difference(curve[:length], losses, rtol)
    others = list(runs.values())[1:]
    names = {name for run in runs.values() for name in run.state}
    differ = {name for run in others for name in different_tensors(first.state, run.state)}
    return Verification(
        same, worlds, rtol, tuple(curve), against_difference, tensors=len(names), different_tensors=len(differ)
    )


class _Recorded(NamedTuple):
    """A run as it was recorded: its losses and samples, and its final state."""

    record: RunRecord
    state: dict[str, Tensor]
    saved: Saved


def _compare_with_first(same: str, first: _Recorded, run: _Recorded, rtol: float, label: str) -> WorldResult:
    record = run.record
    notes = [thread_difference(first.record, record), file_difference(first.saved, run.saved)]
    note = "; ".join(filter(None, notes))
    samples = first_sample_difference(first.record, record)
    losses = first_loss_difference(first.record.losses, record.losses)
    worst = furthest_tensor(first.state, run.state)
    difference = samples or losses or worst or saved_difference(first.saved, run.saved)
    if difference is not None and worst is not None:
        difference = replace(worst, what=difference.what, step=difference.step)
    if len(set(record.rank_hashes)) > 1:
        step = None if difference is None else difference.step
        difference = Difference("states of the ranks", step, tensor=record.rank_difference)
        kept = same == "samples" and samples is None
        return WorldResult(record, difference, kept, label, note)
    if same == "bits":
        kept = difference is None
    elif same == "samples":
        kept = samples is None
    else:
        losses_near = first_loss_difference(first.record.losses, record.losses, rtol) is None
        kept = samples is None and losses_near and model_distance(first.state, run.state) <= rtol
    return WorldResult(record, difference, kept, label, note)
