"""Runs the cells of one row and compares each with the row's run on one rank."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.train.record import RunRecord, read_state
from samestep.verify.compare import compare_runs
from tests.preloaded.client import ROOT
from tests.sameness.case import Case
from tests.sameness.ways import TRAINED, Ended, Way, is_in_parts, parts, run_in_parts, run_once, steps_of

IDENTICAL, REFUSED, DIFFERENT = "identical", "refused", "DIFFERENT"
FAILED, FOUND, NOT_FOUND = "FAILED", "found", "NOT FOUND"
BAD = (DIFFERENT, FAILED, NOT_FOUND)


@dataclass(frozen=True)
class Cell:
    """One training, and how it compares."""

    case: str
    way: str
    world: str
    """A number of ranks; for a resumed run all of them, in order."""
    verdict: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What is run of every row."""

    ways: Sequence[Way]
    worlds: Sequence[int] | None
    """Only these numbers of ranks; None for all."""
    device: str
    folder: Path
    keep: bool = False

    def ways_of(self, case: Case) -> list[Way]:
        return [way for way in self.ways if case.ways is None or way.name in case.ways]

    def worlds_of(self, case: Case, way: Way) -> list[int]:
        if self.worlds is not None:
            return [world for world in case.worlds if world in self.worlds]
        return list(case.worlds if way.worlds is None else way.worlds)

    def count(self, case: Case) -> int:
        """How many cells a row has."""
        return sum(len(_sizes(self, case, way)) for way in self.ways_of(case))


def _sizes(plan: Plan, case: Case, way: Way) -> list[int]:
    """A number of ranks for each cell."""
    worlds = plan.worlds_of(case, way)
    return worlds[:1] if is_in_parts(way) else worlds


def run_row(plan: Plan, case: Case, done: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """Run all cells of a row, one after the other."""
    cells = []
    for cell in _Row(plan, case).cells():
        cells.append(cell)
        done(cell)
    if not plan.keep:
        shutil.rmtree(plan.folder / case.name, ignore_errors=True)
    return _without_expected(case, cells)


def _without_expected(case: Case, cells: list[Cell]) -> list[Cell]:
    """A mistake must show somewhere: then it has been found."""
    if not case.mistake:
        return cells
    if all(cell.verdict == IDENTICAL for cell in cells):
        text = f"it is a mistake, and no run showed it: {case.mistake}"
        return [replace(cell, verdict=NOT_FOUND, reason=text) for cell in cells]
    return [replace(cell, verdict=FOUND, reason=case.mistake) if cell.verdict == DIFFERENT else cell for cell in cells]


class _Row:
    """The runs of one case."""

    def __init__(self, plan: Plan, case: Case) -> None:
        self._plan, self._case = plan, case
        self._folder = plan.folder / case.name
        self._references: dict[str, tuple[Ended, float]] = {}

    def cells(self) -> Iterator[Cell]:
        for way in self._plan.ways_of(self._case):
            for world in _sizes(self._plan, self._case, way):
                yield self._cell(way, world)

    def _cell(self, way: Way, world: int) -> Cell:
        label = str(world)
        reference, seconds = self._reference(way.compared_with)
        started = time.monotonic()
        if way.name == way.compared_with and world == 1:
            ended = reference
        elif is_in_parts(way):
            worlds = parts(self._plan.worlds_of(self._case, way), steps_of(reference) or 1)
            label, seconds = "→".join(map(str, worlds)), 0.0
            ended = run_in_parts(
                self._case, way, worlds, steps_of(reference), self._folder / way.name, self._plan.device
            )
        else:
            ended, seconds = self._run(way, world), 0.0
        verdict, reason = self._compare(reference, ended)
        seconds += time.monotonic() - started
        return Cell(self._case.name, way.name, label, verdict, reason, round(seconds, 2))

    def _reference(self, name: str) -> tuple[Ended, float]:
        """The run on one rank, and how long it took."""
        if name not in self._references:
            way = next(way for way in self._plan.ways if way.name == name)
            started = time.monotonic()
            self._references[name] = self._run(way, 1), time.monotonic() - started
        return self._references[name]

    def _run(self, way: Way, world: int) -> Ended:
        folder = self._folder / f"{way.name}-{world}"
        return run_once(self._case, way, world, folder, self._plan.device)

    def _compare(self, reference: Ended, ended: Ended) -> tuple[str, str]:
        if ended.end == "refused":
            late = ended.reason.startswith(TRAINED)
            return (FAILED if late else REFUSED), self._readable(ended.reason)
        if ended.record is None:
            return FAILED, self._readable(ended.reason)
        if reference.record is None:
            return DIFFERENT, f"trains, but one rank is {reference.end}"
        if still := self._not_moved(ended.record):
            return FAILED, still
        records = {"one rank": reference.record, "this": ended.record}
        difference = compare_runs("bits", records, (), 0.0).worlds[1].difference
        return (IDENTICAL, "") if difference is None else (DIFFERENT, str(difference))

    def _not_moved(self, record: Path) -> str:
        """What makes a comparison worthless: nothing was trained, or what it is about is zero."""
        losses, state = RunRecord.read(record).losses, read_state(record)
        if len(set(losses)) < 2:
            return f"the loss never changes: {losses}"
        for name, tensor in state.items():
            if tensor.isnan().any():
                return f"{name} is not a number after the training"
        for end in self._case.moves:
            found = [state[name] for name in state if name.rpartition(".")[2] == end]
            if not any(bool(tensor.any()) for tensor in found):
                return f"{end} is zero after the training: it never changed, or was lost"
        return ""

    def _readable(self, text: str) -> str:
        """Without the paths of this machine."""
        return text.replace(f"{self._folder}", "RUN").replace(f"{ROOT}/", "").strip()
