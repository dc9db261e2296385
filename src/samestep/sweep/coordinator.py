"""Runs a sweep: draws trials, starts their runs, answers their questions, and keeps their results.

The only process that knows Optuna: ranks get a whole config, and an answer at the end of a step.
Whatever it decides is on the disk before anyone acts on it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.checkpoint.prune_decision import (
    IntermediateValue,
    PruneDecision,
    read_decision,
    read_value,
    write_decision,
)
from samestep.environment.variables import process_environment
from samestep.errors import CheckpointError, RunDirError, Stopped, TaskError, UserError
from samestep.sweep.children import Child, Children, warm_server
from samestep.sweep.database import open_database
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.optuna_parts import Known, decide, draw, trial_count
from samestep.sweep.placing import ResourcePlan, allocate
from samestep.sweep.probe_task import probe_task
from samestep.sweep.run_spec import RunSpec, why_failed
from samestep.sweep.schema import SweepConfig, seconds_of
from samestep.sweep.storage import (
    CURVES,
    FOLDS,
    PRUNED,
    Storage,
    TrialRecord,
    best_words,
    refuse_other_storage,
    results_of,
)
from samestep.sweep.study_folder import STOP, SWEEP, is_full_disk, locked, same_study, shape_of, signed, write_document
from samestep.sweep.tracked_study import TrackedStudy
from samestep.sweep.trial import LiveTrial, further_of, objective_of

_SECONDS_BETWEEN_LOOKS = 0.5

Report = Callable[[str], None]
Watch = Callable[[Mapping[int, TrialRecord], Mapping[int, LiveTrial], int], None]
"""Gets the trials that are over, those that run, and how many there will be."""


def run_sweep(loaded: LoadedSweep, report: Report, watch: Watch | None = None) -> list[TrialRecord]:
    """Run a sweep to its end, or resume it; returns all trials.

    Args:
        loaded: The sweep.
        report: Called with a line for whatever happens.
        watch: Called with all trials, again and again.

    Raises:
        RunDirError: if another process runs it, or its directory is of another sweep.
        StorageError: if its storage cannot be used, or is another than it had.
        Stopped: after a stop signal, or `samestep stop`; everything is saved.
    """
    sweep = loaded.sweep
    folder = sweep.path
    packing = allocate(sweep, loaded.base, trial_count(sweep), process_environment())
    with locked(folder, "sweep", report) as lock, Children() as children, ExitStack() as stack:
        refuse_other_storage(sweep, folder)
        database = open_database(sweep.storage, folder)
        stack.callback(database.close)
        (folder / STOP).unlink(missing_ok=True)  # of a process that was killed before it saw it
        for name in ("trials", "pruning", "logs"):
            (folder / name).mkdir(exist_ok=True)
        output, wanted = folder / "logs" / "warm.txt", sweep.may_be_warm
        server = warm_server(loaded.base, packing.threads, output, wanted, report)
        forks = stack.enter_context(server)  # imports while the task is probed
        info = probe_task(loaded, folder, children)
        definition = {"sweep": dict(sweep.definition()), "config": shape_of(loaded.base)}
        same_study(folder / "definition.json", definition)
        document = {**sweep.model_dump(mode="json"), "base": str(sweep.base_path.resolve())}
        write_document(folder / SWEEP, signed(document))
        for line in (*loaded.notes, *([info.folds] if info.folds else []), packing.summary):
            report(line)
        children.fork_from(forks, report)
        storage = Storage(sweep, folder, database)
        coordinator = Coordinator(loaded, folder, storage, children, packing, report, watch, lock.refuse_lost)
        shown = sweep.model_dump(mode="json")
        with database.reraise_os_errors(folder), coordinator.study.started(shown):
            return coordinator.run()


class Coordinator:
    """The loop of a sweep."""

    def __init__(
        self,
        loaded: LoadedSweep,
        folder: Path,
        storage: Storage,
        children: Children,
        packing: ResourcePlan,
        report: Report,
        watch: Watch | None = None,
        refuse_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._refuse_lost = refuse_lost
        self._sweep, self._folder = loaded.sweep, folder
        trackers = loaded.base.trackers
        self.study = TrackedStudy(loaded.sweep.name, "sweep", trackers, folder, report)
        self._storage, self._children, self._report = storage, children, report
        self._watch = watch
        self._packing = packing
        self._live: dict[int, LiveTrial] = {}
        self._over: dict[int, TrialRecord] = {}
        self._count = trial_count(self._sweep)
        self._began = self._looked = time.monotonic()

    def run(self) -> list[TrialRecord]:
        """Until all trials are over."""
        self._continue_earlier()
        while True:
            self._children.refuse_stopped()
            self._look_around()
            self._start_waiting()
            while (number := self._next_number()) is not None:
                self._begin(number)
            if not self._live:
                return self._storage.trials()
            for trial in list(self._live.values()):
                self._answer(trial)
                self._end_slow(trial)
            for child in self._children.poll():
                trial = next(t for t in self._live.values() if t.child is child)
                self._answer(trial)
                self._run_ended(trial, child)
            if self._watch is not None:
                self._watch(self._over, self._live, self._count)
            self._children.pause()

    def _continue_earlier(self) -> None:
        """Take up what an earlier process has left, where it was."""
        self._storage.start_waiting()
        for record in self._storage.trials():
            if record.is_over:
                self._over[record.number] = record
                self.study.write(record.number, _row(self._sweep, record))
                continue
            self._report(f"trial {record.number} is continued")
            trial = LiveTrial.of(record)
            self._live[trial.number] = trial

    # -- which trial, with which values ----------------------------------------------------

    def _next_number(self) -> int | None:
        """Return the trial that may begin now; None if none may."""
        number = len(self._live) + len(self._over)
        limit = seconds_of(self._sweep.timeout)
        if limit is not None and time.monotonic() - self._began >= limit:
            return None
        if number >= self._count or len(self._live) >= self._packing.parallel:
            return None
        waits = self._sweep.deterministic and min(self._live, default=number) < self._round_of(number)
        return None if waits else number

    def _round_of(self, number: int) -> int:
        """Return the first trial of a trial's round."""
        return number - number % self._sweep.round

    def _known(self, number: int) -> Known:
        """Return the finished trials that a trial's values and pruning may follow from."""
        first = self._round_of(number) if self._sweep.deterministic else None
        return {at: r.frozen for at, r in self._over.items() if first is None or at < first}

    def _begin(self, number: int) -> None:
        values, notes = draw(self._sweep, number, self._known(number))
        begun = self._storage.begin(values, notes)
        assert begun == number, "one process writes"
        shown = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items())
        self._report(f"trial {number}: {shown}")
        self._live[number] = LiveTrial(number, values)
        self._start_waiting()

    # -- its runs --------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        """Start trials of an earlier process, of which there may be more than have space now."""
        for trial in list(self._live.values()):
            if trial.slot is None and (slot := self._free_slot()) is not None:
                trial.slot = slot
                self._start_run(trial)

    def _free_slot(self) -> int | None:
        used = {other.slot for other in self._live.values()}
        return next((slot for slot in range(self._packing.parallel) if slot not in used), None)

    def _spec(self, trial: LiveTrial) -> RunSpec:
        spec = trial.spec(self._sweep, self._folder, self._packing.ranks)
        shown = self.study.overrides("trial" if self._sweep.folds is None else "fold")
        spec = replace(spec, overrides=(*spec.overrides, *shown))
        return spec if trial.slot is None else self._packing.placed(spec, trial.slot)

    def _start_run(self, trial: LiveTrial) -> None:
        """Start its present run; not if that is done, or the trial is over."""
        while trial.number in self._live:
            spec = self._spec(trial)
            assert spec.prune_dir is not None, "every run of a sweep asks"
            spec.prune_dir.mkdir(parents=True, exist_ok=True)
            self._answer(trial)  # what it asked last, when nobody was there any more
            if trial.pruned:
                self._prune(trial)
                return
            result = spec.result()
            if result is None or not result.is_done:
                trial.began = time.monotonic()
                trial.child = spec.start(self._children, self._folder / "logs")
                return
            self._take_result(trial, spec)

    def _run_ended(self, trial: LiveTrial, child: Child) -> None:
        spec, trial.child = self._spec(trial), None
        if self._children.stopped_by is not None:
            return  # it was stopped with this process, and is continued with the next
        try:
            result = spec.result()
        except CheckpointError as error:
            self._fail(trial, str(error))
            return
        if trial.is_late:
            limit = self._sweep.trial_timeout
            self._fail(trial, f"{spec.name} took longer than trial_timeout, {limit}")
        elif trial.pruned:
            self._prune(trial)
        elif result is not None and result.is_done and child.code == 0:
            self._take_result(trial, spec)
            self._start_run(trial)
        elif child.code == Stopped.exit_code and trial.got_further(result):
            self._report(f"{spec.name} has stopped, and is resumed")
            self._start_run(trial)
        else:
            self._run_failed(trial, spec, child)

    def _run_failed(self, trial: LiveTrial, spec: RunSpec, child: Child) -> None:
        reason = why_failed(spec, child)
        if is_full_disk(self._folder, spec.folder, reason):
            # The trial is not over: it is continued when there is space again.
            raise RunDirError(
                f"the disk of {self._folder} is full, and {spec.name} has ended: {reason}. All until then is "
                f"kept: once there is space, samestep sweep run {self._folder}"
            )
        if trial.failures < self._sweep.retries and child.code != UserError.exit_code:
            trial.failures += 1
            self._report(f"{spec.name} failed and is resumed: {reason}")
            self._start_run(trial)
        else:
            self._fail(trial, reason)

    def _take_result(self, trial: LiveTrial, spec: RunSpec) -> None:
        """A run is done: the next fold follows, or the trial is complete."""
        result = spec.result()
        assert result is not None, "it is done"
        try:
            trial.folds.append(objective_of(self._sweep, result))
        except TaskError as error:
            self._fail(trial, str(error))
            return
        folds = self._sweep.folds
        if folds is not None:
            self._storage.keep(trial.number, FOLDS, trial.folds)
            self._report(f"{spec.name}: {trial.folds[-1]:.6g}")
        if folds is None or trial.fold >= folds.k:
            self._complete(trial)

    def _complete(self, trial: LiveTrial) -> None:
        sweep = self._sweep
        try:
            further = further_of(sweep, results_of(sweep, self._folder, trial.number))
        except TaskError as error:
            self._fail(trial, str(error))
            return
        values = [trial.mean(), *further]
        self._storage.complete(trial.number, *values)
        info = zip(sweep.metrics, values, strict=True)
        self._end(trial, ", ".join(f"{metric} {value:.6g}" for metric, value in info))

    def _prune(self, trial: LiveTrial) -> None:
        self._storage.prune(trial.number)
        self._end(trial, trial.pruned)

    def _fail(self, trial: LiveTrial, reason: str) -> None:
        self._storage.fail(trial.number, reason)
        self._end(trial, f"failed: {reason.splitlines()[0]}")

    def _end(self, trial: LiveTrial, how: str) -> None:
        del self._live[trial.number]
        self._over[trial.number] = record = self._storage.trials()[trial.number]
        self.study.write(trial.number, _row(self._sweep, record))
        so_far = best_words(self._sweep, list(self._over.values()))
        self._report(f"{trial.name}: {how}{f'; {so_far}' if so_far else ''}")

    def _end_slow(self, trial: LiveTrial) -> None:
        limit = seconds_of(self._sweep.trial_timeout)
        late = limit is not None and time.monotonic() - trial.began > limit
        if late and trial.child is not None and not trial.is_late:
            trial.is_late = True
            if self._sweep.via == "slurm":
                trial.child.process.send_signal(signal.SIGTERM)  # it cancels its job, which Slurm kills
            else:
                self._children.end(trial.child)

    # -- its questions ---------------------------------------------------------------------

    def _answer(self, trial: LiveTrial) -> None:
        """Decide what the trial's present run has asked, if it has; first on the disk, then for it."""
        if trial.number not in self._live:
            return
        folder = self._spec(trial).prune_dir
        assert folder is not None, "every run of a sweep asks"
        question = read_value(folder)
        answered = read_decision(folder)
        if question is None or (answered is not None and answered.step == question.step):
            return
        trial.add(question.step, question.value)
        reported = trial.reports()
        self._storage.keep(trial.number, CURVES, trial.curves)
        self._storage.report(trial.number, *reported[-1])
        reason = self._why_prune(trial, question)
        if reason:
            trial.pruned = reason
            self._storage.keep(trial.number, PRUNED, reason)
        write_decision(folder, PruneDecision(question.step, bool(reason), reason))

    def _why_prune(self, trial: LiveTrial, question: IntermediateValue) -> str:
        sweep, number = self._sweep, trial.number
        if sweep.pruner == "none":
            return ""
        prune, notes = decide(sweep, number, trial.values, trial.reports(), self._known(number))
        self._storage.note(number, notes)
        metric = sweep.objective.metric
        at = f"{metric} {question.value:.6g} after step {question.step + 1}"
        return f"pruned ({sweep.pruner}): {at}" if prune else ""

    def _look_around(self) -> None:
        """Raise if somebody wants this sweep to stop, or runs it in this process's place."""
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        self._refuse_lost()
        if (self._folder / STOP).exists():
            self._children.stop()
            (self._folder / STOP).unlink(missing_ok=True)
            raise Stopped(f"stopped by samestep stop: samestep sweep run {self._folder}")


def _row(sweep: SweepConfig, record: TrialRecord) -> dict[str, Any]:
    """Return what trackers get of a trial that is over."""
    return {"state": record.state, **dict(zip(sweep.metrics, record.results, strict=False))}
