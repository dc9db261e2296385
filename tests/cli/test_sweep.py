"""samestep sweep, with real processes: the same study again, whatever happens to them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import on_a_terminal, processes_of, samestep, started, wait_for
from tests.cli.tiny_sweep import write_sweep

SAVED = 75


def trials(name: str, cwd: Path) -> list[dict[str, Any]]:
    done = samestep("show", name, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["trials"]
    return found


def coordinator(name: str, cwd: Path) -> Any:
    done = samestep("show", name, "--json", cwd=cwd)
    return json.loads(done.stdout)["coordinator"]


def test_a_killed_sweep_comes_to_the_same_study_at_another_parallelism(tmp_path: Path) -> None:
    path = write_sweep(
        tmp_path, trials=6, round=2, pruner="median", pruner_args={"n_startup_trials": 1},
        sampler_args={"n_startup_trials": 2},
    )  # fmt: skip
    whole = samestep("sweep", "run", path, "name=whole", "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)["trials"]
    assert {trial["state"] for trial in expected} == {"complete", "pruned"}, expected
    assert len({trial["params"]["params.lr"] for trial in expected}) == 6, "no draw comes twice"
    # The same name, in which hyperband and others have a say, in another directory.
    other = ["name=whole", "directory=other", "parallel=2", "storage=journal"]
    with started("sweep", "run", path, *other, cwd=tmp_path) as process:
        wait_for(lambda: len(list(tmp_path.glob("other/trials/*/result.json"))) >= 3)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_for(lambda: not processes_of(tmp_path / "base.yaml"))
    assert coordinator("other", tmp_path)["alive"] is False
    again = samestep("sweep", "run", "other", "ranks_per_trial=2", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert f"taken over from process {process.pid} on " in again.stderr
    assert json.loads(again.stdout)["trials"] == expected
    assert trials("other", tmp_path) == expected, "from the journal"
    moved = samestep("sweep", "run", "other", "storage=sqlite", cwd=tmp_path)
    assert moved.returncode == 2
    assert "are in journal (other/study.journal), and storage is now sqlite" in moved.stderr


@pytest.mark.requirement("001-D-11", "001-S4-1")
def test_a_failing_trial_fails_alone_and_the_best_trains_again(tmp_path: Path) -> None:
    kinds = ["raise", "no", "nan", "memory", "killed", "hang"]
    path = write_sweep(
        tmp_path, sampler="grid", trials=9, hang_timeout="10s", round=6,
        space={"params.fail": {"choice": kinds}, "params.lr": {"choice": [0.1]}},
        storage=f"sqlite:///{tmp_path}/shared.db",
    )  # fmt: skip
    done = samestep("sweep", "run", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = trials("tiny", tmp_path)
    assert [trial["state"] for trial in found] == ["failed", "complete", *["failed"] * 4]
    reasons = [trial["reason"] for trial in found]
    assert reasons[0] == "RuntimeError: I was told to"
    assert reasons[2] == "val_loss is NaN: a trial needs a number"
    assert "memory: you tried to allocate" in reasons[3]
    assert reasons[4].startswith("ended by SIGKILL")
    assert "the run hangs: it is in compute at step 0 for" in reasons[5]
    log = (tmp_path / "sweeps/tiny/logs/trial-0005.txt").read_text()
    assert 'while self.fail == "hang"' in log or "time.sleep(0.02)" in log, "its stack"
    assert "RuntimeError: I was told to" in done.stdout
    best = samestep("sweep", "best", "tiny", "--json", cwd=tmp_path)
    assert json.loads(best.stdout) == found[1]
    exported = samestep("sweep", "best", "sweeps/tiny", "--config", cwd=tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "best.yaml").write_text(exported.stdout)
    final = samestep("train", "elsewhere/best.yaml", "--json", cwd=tmp_path)
    assert final.returncode == 0, final.stderr
    assert json.loads(final.stdout)["best"]["value"] == found[1]["value"]
    refit = ["refit=true", "name=refit", "--json"]
    whole = samestep("train", "elsewhere/best.yaml", *refit, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    told = json.loads(whole.stdout)
    assert (told["steps"], told["metrics"], told["best"]) == (9, {}, None), "24 samples, thrice"
    resumed = samestep("sweep", "run", "tiny", "seed=4", cwd=tmp_path)
    assert resumed.returncode == 2
    assert "sweep.seed was 0, is 4" in resumed.stderr
    stored = tmp_path / "sweeps" / "tiny" / "sweep.json"
    stored.write_text(stored.read_text().replace('"trials": 9', '"trials": 8'))
    changed = samestep("sweep", "run", "tiny", cwd=tmp_path)
    assert changed.returncode == 2
    assert "is not trusted" in changed.stderr
    assert samestep("sweep", "run", "tiny", "--trust", cwd=tmp_path).returncode == 0


@pytest.mark.requirement("001-T-4", "001-G-2", "001-S4-2", "001-S6-3")
def test_a_rank_that_fails_is_named_and_the_next_trial_runs_on_two(tmp_path: Path) -> None:
    space = {"params.fail": {"choice": ["rank 1", "no"]}, "params.lr": {"choice": [0.1]}}
    path = write_sweep(tmp_path, sampler="grid", space=space, ranks_per_trial=2)
    done = samestep("sweep", "run", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    broken, whole = json.loads(done.stdout)["trials"]
    assert "rank 1" in broken["reason"]
    assert broken["reason"].endswith("RuntimeError: I was told to")
    assert whole["state"] == "complete"


def test_a_running_sweep_is_not_run_twice_and_stops_on_request(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, trials=1)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + f"params: {{wait: {tmp_path / 'go'}}}\n")
    with started("sweep", "run", path, cwd=tmp_path) as process:
        wait_for(lambda: (tmp_path / "go.waiting").exists())
        second = samestep("sweep", "run", path, cwd=tmp_path)
        assert second.returncode == 2
        assert f"in use by process {process.pid}" in second.stderr
        assert trials("tiny", tmp_path)[0]["state"] == "running"
        runs_it = coordinator("tiny", tmp_path)
        assert runs_it["alive"]
        assert f"process {process.pid} on" in runs_it["process"]
        assert samestep("stop", "tiny", cwd=tmp_path).returncode == 0
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=180)
    # The trial may have come to its end before the stop was seen.
    assert process.returncode in (0, SAVED), output
    assert not processes_of(base)
    resumed = samestep("sweep", "run", "tiny", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [trial["state"] for trial in trials("tiny", tmp_path)] == ["complete"]
    assert coordinator("tiny", tmp_path) is None


@pytest.mark.requirement("001-S4-3", "001-G-2")
def test_folds_of_a_trial_are_runs_and_their_mean_is_its_value(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, folds={"k": 2, "stratify": "by_label"}, trials=1)
    code, output, shown = on_a_terminal("sweep", "run", path, "--json", cwd=tmp_path)
    assert code == 0, shown
    (trial,) = json.loads(output)["trials"]
    runs = [
        json.loads((tmp_path / "sweeps/tiny/trials/trial-0000" / fold / "result.json").read_text())
        for fold in ("fold-0", "fold-1")
    ]
    assert trial["folds"] == [run["best"]["value"] for run in runs]
    assert trial["value"] == sum(trial["folds"]) / 2
    assert "0 of 1 trials" in shown, "one table is kept up to date"
    assert "░░ 0/2" in shown
    assert "█░ 1/2" in shown
    assert "trial 0000 fold 1: " in shown, "and what happens is above it"


@pytest.mark.variation("test_several_objectives_are_the_same_study_at_any_parallelism: of real runs")
def test_several_objectives_of_real_runs(tmp_path: Path) -> None:
    path = write_sweep(
        tmp_path, "Sized", objective=[{"metric": "val_loss"}, {"metric": "size", "mode": "max"}],
        sampler="nsga2", sampler_args={"population_size": 2}, trials=3, round=2,
    )  # fmt: skip
    done = samestep("sweep", "run", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["trials"]
    for trial in found:
        run = tmp_path / f"sweeps/tiny/trials/trial-{trial['number']:04d}"
        best = json.loads((run / "result.json").read_text())["best"]
        assert trial["values"] == [best["metrics"]["val_loss"], best["metrics"]["size"]]
    assert "Pareto front: " in done.stderr


def test_the_fastest_is_found_by_measuring_the_models(tmp_path: Path) -> None:
    grid = {"params.lr": {"choice": [0.31, 0.3]}}  # the first one's predictions wait
    path = write_sweep(tmp_path, "Sized", sampler="grid", space=grid)
    done = samestep("sweep", "run", path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    option = ["--prefer-faster-within", "1"]
    best = samestep("sweep", "best", "tiny", "--json", *option, cwd=tmp_path)
    assert best.returncode == 0, best.stderr
    told = json.loads(best.stdout)
    choice = told["choice"]
    assert (told["number"], choice["best"]["number"]) == (1, 0), "worse, and faster"
    figures = {entry["number"]: entry for entry in choice["candidates"]}
    assert figures[1]["one_sample"]["median"] < 0.02 <= figures[0]["one_sample"]["low"]
    assert figures[0]["batch_size"] == 4, "of a lane"


def test_what_only_the_task_knows_is_reported_at_once_before_anything_trains(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, objective={"metric": "f1"}, folds={"k": 12, "stratify": "by_label"})
    done = samestep("sweep", "run", path, cwd=tmp_path)
    assert done.returncode == 2
    assert "tiny.yaml has 2 mistakes" in done.stderr
    assert "objective.metric: the task has no 'f1': it has val_loss" in done.stderr
    assert "12 folds by label need 12 samples of each" in done.stderr
    assert not list(tmp_path.glob("sweeps/tiny/trials/*"))
