"""The loop of a sweep, with runs that only pretend: rounds, pruning, failures, limits."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.prune_decision import read_decision
from samestep.checkpoint.run_result import RunResult, read_result, write_result
from samestep.errors import RunDirError, Stopped
from samestep.parsing.plain_yaml import parse_yaml
from samestep.sweep import coordinator as coordinator_module
from samestep.sweep.coordinator import Coordinator
from samestep.sweep.loading import load_sweep
from samestep.sweep.optuna_parts import trial_count
from samestep.sweep.placing import pack
from samestep.sweep.storage import Storage, TrialRecord
from samestep.sweep.study_folder import is_full_disk
from tests.unit.sweep.test_resource_plan import machine
from tests.variations import variations

BASE = "task: task.py:Mine\nglobal_batch: 64\nepochs: 2\n"
EVALUATIONS = 3


class Run:
    """A run that asks three times, and is then done; or does what it is told."""

    def __init__(self, words: Sequence[str], behave: Callable[[Run], int | None]) -> None:
        given = dict(word.partition("=")[::2] for word in words if "=" in word)
        self.values = {key: parse_yaml(text) for key, text in given.items()}
        self.folder = Path(self.values["run_dir"])
        self.prune_dir = Path(words[words.index("--prune-dir") + 1])
        self.behave, self.evaluations, self.waits = behave, 0, 0
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def value(self) -> float:
        return float((self.values["params.x"] - 0.3) ** 2)

    def turn(self) -> int | None:
        """One look at it; its exit code when it has ended."""
        told = self.behave(self)
        if told is not None:
            return told
        answer = read_decision(self.prune_dir)
        if answer is not None and answer.stop:
            return self.end("stopped_early")
        if self.evaluations and (answer is None or answer.step != self.evaluations):
            return None
        if self.evaluations == EVALUATIONS:
            return self.end("finished")
        self.evaluations += 1
        question = {"step": self.evaluations, "value": self.value + 1.0 / self.evaluations}
        (self.prune_dir / "value.json").write_text(json.dumps(question))
        return None

    def end(self, status: Any) -> int:
        metrics = {"cost": 1 - self.values["params.x"]}
        best = {"step": 3, "metric": "val_loss", "value": self.value, "metrics": metrics}
        write_result(self.folder, RunResult(status, best=best))
        return 0


class PretendedChild:
    def __init__(self, run: Run) -> None:
        self.run, self.code = run, None

    def ending(self) -> str:
        return f"ended with {self.code}"


class PretendedChildren:
    """In place of processes: every look lets each run do a little, in any order."""

    stopped_by = None

    def __init__(self, behave: Callable[[Run], int | None], order: int) -> None:
        self._behave, self._random = behave, random.Random(order)
        self.running: list[PretendedChild] = []
        self.most, self.starts, self.variables = 0, 0, list[Mapping[str, str]]()

    def start(self, name: str, words: Sequence[str], output: Path, variables: Any = None) -> Any:
        child = PretendedChild(Run(words, self._behave))
        self.running.append(child)
        self.starts += 1
        self.variables.append(variables)
        self.most = max(self.most, len(self.running))
        return child

    def poll(self) -> list[Any]:
        ended = []
        for child in self._random.sample(self.running, len(self.running)):
            if child.code is None:
                child.code = child.run.turn()
            if child.code is not None:
                self.running.remove(child)
                ended.append(child)
        return ended

    def end(self, child: Any) -> None:
        child.code = -9

    def refuse_stopped(self) -> None:
        pass

    def pause(self) -> None:
        """Every look is an event."""

    def stop(self) -> None:
        self.running.clear()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_SECONDS_BETWEEN_LOOKS", 0.0)


def coordinated(
    folder: Path, behave: Any = lambda run: None, order: int = 0, watch: Any = None, **values: Any
) -> tuple[list[TrialRecord], PretendedChildren, list[str]]:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(BASE)
    document = {
        "base": "config.yaml", "name": "same", "directory": str(folder), "trials": 6, "round": 2, "parallel": 1,
        "space": {"params.x": {"uniform": [0, 1]}}, "objective": {"metric": "val_loss"},
        **values,
    }  # fmt: skip
    (folder / "logs").mkdir(exist_ok=True)
    loaded = load_sweep(document, folder=folder)
    children, lines = PretendedChildren(behave, order), list[str]()
    packing = pack(loaded.sweep, loaded.base, trial_count(loaded.sweep), os.environ)
    storage = Storage(loaded.sweep, folder)
    try:
        found = Coordinator(loaded, folder, storage, children, packing, lines.append, watch).run()  # type: ignore[arg-type]
    finally:
        storage.close()
    return found, children, lines


def study(trials: list[TrialRecord]) -> list[dict[str, Any]]:
    return [trial.as_json() for trial in trials]


MEDIAN = {"pruner": "median", "pruner_args": {"n_startup_trials": 1}, "sampler": "random", "seed": 3}


def test_the_study_is_the_same_at_any_parallelism_and_timing(tmp_path: Path) -> None:
    alone, children, _ = coordinated(tmp_path / "1", trials=6, **MEDIAN)
    assert children.most == 1
    assert {trial.state for trial in alone} == {"complete", "pruned"}
    assert all(("pruned (median): val_loss " in trial.remark) == (trial.state == "pruned") for trial in alone)
    some, children, _ = coordinated(tmp_path / "other", order=1, trials=6, parallel=4, **MEDIAN)
    assert children.most == 2, "a round waits for the one before"
    assert study(some) == study(alone)
    learning = {"sampler_args": {"n_startup_trials": 2}, "trials": 5}
    guided, _, _ = coordinated(tmp_path / "g", **learning)
    assert study(guided) == study(coordinated(tmp_path / "h", order=3, parallel=2, **learning)[0])
    free, children, _ = coordinated(tmp_path / "f", trials=4, parallel=4, deterministic=False)
    assert children.most == 4
    assert len(free) == 4


def test_a_sweep_that_broke_off_is_continued_to_the_same_study(tmp_path: Path) -> None:
    whole, _, _ = coordinated(tmp_path / "whole", **MEDIAN)
    assert {trial.state for trial in whole} == {"complete", "pruned"}

    class Broken(Exception):
        pass

    turns = 0

    def breaking(run: Run) -> int | None:
        nonlocal turns
        turns += 1
        if turns in (1, 5, 8, 20, 31, 44):
            raise Broken
        return None

    starts = 0
    for _ in range(10):
        try:
            found, _, _ = coordinated(tmp_path / "b", breaking, parallel=2, **MEDIAN)
        except Broken:
            starts += 1
            continue
        assert starts > 2
        assert study(found) == study(whole)
        return
    pytest.fail("it did not come to its end")


def test_a_full_disk_ends_the_sweep_and_no_trial(tmp_path: Path) -> None:
    is_full = True

    def writing(run: Run) -> int | None:
        if not is_full or run.evaluations < 2:
            return None
        reason = f"{run.folder}/metrics.jsonl could not be written: {os.strerror(errno.ENOSPC)}"
        write_result(run.folder, RunResult("failed", reason=reason))
        return 2

    with pytest.raises(RunDirError, match=r"is full, and trial 0000 has ended: .*No space left"):
        coordinated(tmp_path / "full", writing, trials=2)
    is_full = False
    found, _, lines = coordinated(tmp_path / "full", writing, trials=2)
    assert lines[0] == "trial 0 is continued"
    assert study(found) == study(coordinated(tmp_path / "whole", trials=2)[0])


def test_a_disk_elsewhere_is_the_trials_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"/scratch/cache: {os.strerror(errno.ENOSPC)}"
    assert not is_full_disk(tmp_path, tmp_path / "run", reason)
    assert is_full_disk(tmp_path, tmp_path / "run", f"{tmp_path / 'run'}{reason}")

    def full(**options: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert is_full_disk(tmp_path, tmp_path / "run", "ended with exit code 2")


def test_a_failed_run_is_resumed_as_often_as_allowed(tmp_path: Path) -> None:
    failed: dict[str, int] = {}

    def twice(run: Run) -> int | None:
        failed[run.folder.name] = failed.get(run.folder.name, 0) + 1
        return -9 if failed[run.folder.name] <= 2 else None

    found, _, lines = coordinated(tmp_path / "a", twice, trials=2, retries=2)
    assert [trial.state for trial in found] == ["complete"] * 2
    assert sum("failed and is resumed: ended with -9" in line for line in lines) == 4
    failed.clear()
    found, _, _ = coordinated(tmp_path / "b", twice, trials=2, retries=1)
    assert [trial.as_json()["reason"] for trial in found] == ["ended with -9"] * 2
    found, children, _ = coordinated(tmp_path / "c", lambda run: 2, trials=1, retries=5)
    assert children.starts == 1, "what the user must fix fails at once"


def test_a_run_that_stops_by_itself_is_resumed_while_it_gets_further(tmp_path: Path) -> None:
    def stopping(run: Run) -> int | None:
        before = read_result(run.folder)
        steps = 0 if before is None else before.steps
        if run.values["name"].endswith("0000") and steps >= 3:
            return None
        stuck = run.values["name"].endswith("0001") and steps >= 2
        write_result(run.folder, RunResult("preempted", "SIGUSR1", steps + (not stuck)))
        return Stopped.exit_code

    found, children, lines = coordinated(tmp_path / "a", stopping, trials=2)
    assert [trial.state for trial in found] == ["complete", "failed"]
    assert sum("trial 0000 has stopped, and is resumed" in line for line in lines) == 3
    assert children.starts == 4 + 3


def test_a_run_that_takes_too_long_fails_and_the_others_go_on(tmp_path: Path) -> None:
    def silent(run: Run) -> int | None:
        if not run.values["name"].endswith("0001"):
            return run.end("finished")
        run.evaluations = 99  # waits for an answer to a question that it never asks
        return None

    found, _, _ = coordinated(tmp_path / "b", silent, trials=3, trial_timeout="0.2s")
    assert [trial.state for trial in found] == ["complete", "failed", "complete"]
    assert "took longer than trial_timeout, 0.2s" in found[1].as_json()["reason"]


def test_after_its_time_no_trial_begins(tmp_path: Path) -> None:
    found, _, _ = coordinated(tmp_path / "a", timeout="0s")
    assert found == []


def test_a_stop_file_stops_it(tmp_path: Path) -> None:
    def stop(run: Run) -> int | None:
        (tmp_path / "a" / "stop").touch()
        return None

    with pytest.raises(Stopped, match="sweep run"):
        coordinated(tmp_path / "a", stop)
    assert not (tmp_path / "a" / "stop").exists()


def test_folds_follow_each_other_and_are_pruned_by_their_mean(tmp_path: Path) -> None:
    found, children, _ = coordinated(tmp_path / "a", trials=4, folds={"k": 3}, parallel=2, **MEDIAN)
    done = [trial for trial in found if trial.state == "complete"]
    pruned = [trial for trial in found if trial.state == "pruned"]
    assert done
    assert pruned
    for trial in done:
        values = trial.as_json()["folds"]
        assert len(values) == 3
        assert trial.value == pytest.approx(sum(values) / 3)
    runs = {path.relative_to(tmp_path / "a" / "trials") for path in tmp_path.glob("a/trials/*/*")}
    assert Path("trial-0000/fold-2") in runs
    assert children.starts == 10


def test_each_trial_sees_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.sweep.placing.quick_hardware", lambda environ: machine(gpus=2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _, children, _ = coordinated(tmp_path / "a", parallel="auto")
    assert {v["CUDA_VISIBLE_DEVICES"] for v in children.variables} == {"0", "1"}


def test_a_sweep_that_is_resumed_with_less_space_continues_its_trials_one_by_one(tmp_path: Path) -> None:
    class Broken(Exception):
        pass

    def breaking(run: Run) -> int | None:
        if run.evaluations == 2:
            raise Broken
        return None

    with pytest.raises(Broken):
        coordinated(tmp_path / "a", breaking, parallel=2)
    found, children, lines = coordinated(tmp_path / "a", parallel=1)
    assert lines[:2] == ["trial 0 is continued", "trial 1 is continued"]
    assert children.most == 1
    assert [trial.state for trial in found] == ["complete"] * 6


def test_who_watches_sees_every_trial_run_and_end(tmp_path: Path) -> None:
    running, over = set[int](), set[int]()

    def watch(ended: Mapping[int, TrialRecord], live: Mapping[int, Any], count: int) -> None:
        assert count == 6
        running.update(live)
        over.update(ended)

    coordinated(tmp_path, watch=watch)
    assert running == set(range(6))
    assert over >= set(range(5))


@pytest.mark.parametrize("folds", variations([None, {"k": 2, "file": "folds.json"}], kept=[None]))
def test_several_objectives_are_the_same_study_at_any_parallelism(tmp_path: Path, folds: Any) -> None:
    given = {
        "objective": [{"metric": "val_loss"}, {"metric": "cost", "mode": "min"}],
        "sampler": "nsga2", "sampler_args": {"population_size": 2}, "folds": folds,
    }  # fmt: skip
    alone, _, lines = coordinated(tmp_path / "alone", **given)
    beside, _, _ = coordinated(tmp_path / "beside", order=3, parallel=2, **given)
    assert study(alone) == study(beside)
    for trial in alone:
        x = trial.values["params.x"]
        assert trial.objectives == ((x - 0.3) ** 2, 1 - x)
        assert trial.as_json()["values"] == trial.objectives
    assert "Pareto front: " in lines[-1]
    # A sweep that is resumed draws what it would have drawn.
    coordinated(tmp_path / "resumed", **{**given, "trials": 3})
    assert study(coordinated(tmp_path / "resumed", **given)[0]) == study(alone)


def test_cmaes_is_the_same_study_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("cmaes", reason="needs the extra sweeps")
    space = {"params.x": {"uniform": [0, 1]}, "params.y": {"uniform": [0, 1]}}
    given = {"sampler": "cmaes", "sampler_args": {"popsize": 4}, "trials": 9, "space": space}
    whole = study(coordinated(tmp_path / "whole", **given)[0])
    coordinated(tmp_path / "resumed", **{**given, "trials": 5})
    assert study(coordinated(tmp_path / "resumed", **given)[0]) == whole
    assert len({trial["params"]["params.x"] for trial in whole}) == 9


def test_an_objective_without_a_number_fails_the_trial_alone(tmp_path: Path) -> None:
    given = {"objective": [{"metric": "val_loss"}, {"metric": "absent"}], "trials": 1}
    [trial], _, _ = coordinated(tmp_path, **given)
    assert (trial.state, trial.as_json()["reason"]) == ("failed", "absent is not measured: a trial needs a number")
