"""Runs the steps before the first difference again, traced, and names the tensor it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import PlanError
from samestep.launch.run.worlds import World
from samestep.train.trace import read_trace
from samestep.verify.compare import Verification, WorldResult
from samestep.verify.runner import Runner
from samestep.verify.suspect import Suspect, find_suspect
from samestep.words import counted


def ends_of_parts(total: int, parts: int) -> list[int]:
    """After which steps the parts of a run end that is stopped and resumed.

    Raises:
        PlanError: if there are fewer steps than parts.
    """
    if total < parts:
        raise PlanError(f"--resumed: {total} steps cannot be split into {parts} parts")
    return [total * part // parts for part in range(1, parts + 1)]


def explain(runner: Runner, result: Verification, worlds: Sequence[World], folder: Path) -> Suspect | None:
    """Return the first tensor that differs in the first run that broke the promise; None if none does.

    A step's loss differs by what happened in it, or by the update before it: the runs begin with
    a checkpoint from before that. Where nothing differs then, the cause is older, and they begin
    with the first step.
    """
    number = next(n for n, world in enumerate(result.worlds) if not world.kept)
    broken = result.worlds[number]
    step = _first_step(broken)
    if number == len(worlds):
        return _explain_resume(runner, broken, worlds, step, folder)
    passes = _Passes(runner, worlds[0], folder)
    begin = max(0, step - 1)
    found = passes.compare(worlds[number], begin, step)
    if found is None and begin > 0:
        return _Passes(runner, worlds[0], folder / "from-0").compare(worlds[number], 0, step)
    return found


def _first_step(broken: WorldResult) -> int:
    difference, record = broken.difference, broken.record
    known = None if difference is None else difference.step
    return max(0, min(record.steps - 1 if known is None else known, record.steps - 1))


def _explain_resume(
    runner: Runner, broken: WorldResult, worlds: Sequence[World], step: int, folder: Path
) -> Suspect | None:
    """Return what a resumed run does differently in its first steps than one that was not stopped."""
    ends = ends_of_parts(broken.record.steps, len(worlds))
    part = next(n for n, end in enumerate(ends) if step < end)
    begin = ends[part - 1] if part else 0
    passes = _Passes(runner, worlds[0], folder)
    whole = passes.trace(worlds[0], "whole", begin, step, resume=None)
    resumed = passes.trace(worlds[part], "resumed", begin, step, passes.checkpoint(begin))
    label = f"{counted(worlds[part].label, 'rank')}, resumed at step {begin}"
    labels = (f"{counted(worlds[0].label, 'rank')}, not stopped", label)
    return find_suspect(labels, read_trace(whole), read_trace(resumed))


@dataclass(frozen=True)
class _Passes:
    """The runs of one explanation."""

    runner: Runner
    first: World
    """The size that the others are compared with."""
    folder: Path

    def checkpoint(self, step: int) -> Path | None:
        """Return a run of the first size that was stopped and saved after so many steps."""
        if step == 0:
            return None
        run = self.folder / "before"
        self.runner.report(f"explaining: running on {counted(self.first.label, 'rank')} up to step {step}")
        self.runner.run(self.runner.launch(self.first, run, stop_after=step, saves=True))
        return run

    def compare(self, other: World, begin: int, last: int) -> Suspect | None:
        """Return the first tensor that differs between the first size and another, in some steps."""
        resume = self.checkpoint(begin)
        sizes = list(dict.fromkeys((self.first, other)))
        traces = [
            read_trace(self.trace(world, f"world-{number}", begin, last, resume)) for number, world in enumerate(sizes)
        ]
        labels = f"{counted(self.first.label, 'rank')}", f"{counted(other.label, 'rank')}"
        return find_suspect(labels, traces[0], traces[-1])

    def trace(self, world: World, name: str, begin: int, last: int, resume: Path | None) -> Path:
        """Run some steps, traced; returns the folder of the trace."""
        run = self.folder / name
        self.runner.report(f"explaining: tracing steps {begin} to {last} on {counted(world.label, 'rank')}")
        launch = self.runner.launch(world, run, stop_after=last + 1, saves=True, resume=resume, trace_from=begin)
        self.runner.run(launch)
        return run / "trace"
