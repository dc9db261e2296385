"""samestep show, samestep runs, and train --json: what a run has come to, for people and scripts."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.checkpoint.run_result import RunResult, write_result
from samestep.cli import app
from tests.cli.processes import on_a_terminal, samestep, started, wait_for, write_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "slow.yaml", "Slow", steps=4, params={"seconds": 0.0}, log_every=1)


def test_a_training_prints_its_result_and_it_is_read_again_without_a_rank(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    half = samestep("train", config, "--stop-after", "2", "--json", cwd=tmp_path)
    assert half.returncode == 75, half.stderr
    assert json.loads(half.stdout)["status"] == "preempted"
    assert samestep("show", run, cwd=tmp_path).returncode == 75
    done = samestep("train", config, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["steps"], found["run"]) == ("finished", 4, "runs/slow")
    read = samestep("show", run, "--json", cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert json.loads(read.stdout)["result"] == {key: found[key] for key in found if key != "run"}
    assert "finished" in samestep("show", run, cwd=tmp_path).stdout


def test_a_killed_run_is_known_to_be_gone(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "slow"
    with started("train", config, "steps=60", "params.seconds=600", cwd=tmp_path) as process:
        wait_for(lambda: (run / "result.json").exists())
        running = samestep("show", run, "--json", cwd=tmp_path)
        assert (running.returncode, json.loads(running.stdout)["result"]["status"]) == (75, "running")
        holder = int((run / "run.lock").read_text().split()[1])
        os.kill(holder, signal.SIGKILL)
        process.wait()
    killed = samestep("show", run, "--json", cwd=tmp_path)
    assert (killed.returncode, json.loads(killed.stdout)["result"]["status"]) == (75, "killed")


def test_a_failed_run_and_none_at_all(config: Path, tmp_path: Path) -> None:
    failed = samestep("train", config, "optimizer.lr=1e30", "--json", cwd=tmp_path)
    assert failed.returncode != 0
    read = samestep("show", tmp_path / "runs" / "slow", "--json", cwd=tmp_path)
    assert read.returncode == 1, read.stdout
    assert json.loads(read.stdout)["result"]["status"] == "failed"
    none = samestep("show", tmp_path, cwd=tmp_path)
    assert none.returncode == 2
    assert "holds no result.json" in none.stderr


def test_every_number_has_its_unit(tmp_path: Path) -> None:
    rows = [
        {"step": 9, "samples_per_second": 3000.0, "time_data": 0.0012, "time_compute": 0.25,
         "rank_spread": 1.5, "slowest_rank": 1, "peak_memory_mb": 457.25},
        {"step": 19, "samples_per_second": 1000.0, "time_data": 0.0012, "time_compute": 0.75,
         "rank_spread": 1.5, "slowest_rank": 1, "peak_memory_mb": 457.25},
    ]  # fmt: skip
    write_result(tmp_path, RunResult("finished"))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in shown.output.splitlines()
        if line.startswith("│")
    ]
    assert cells[-6:] == [
        ["throughput", "2,000", "1,000", "samples/s"],
        ["reading data", "1.2", "1.2", "ms/step"],
        ["computing", "500", "750", "ms/step"],
        ["work of the slowest rank", "1.5", "1.5", "x the fastest's"],
        ["peak memory", "457.2", "457.2", "MiB"],
        ["slowest rank, most often", "rank 1", "", ""],
    ]
    found = json.loads(CliRunner().invoke(app, ["show", str(tmp_path), "--json"]).output)
    assert found["times"]["time_compute"] == {"median": 0.5, "worst": 0.75}, "seconds, for scripts"


def test_runs_are_listed_with_what_they_have_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    none = CliRunner().invoke(app, ["runs"])
    assert (none.exit_code, "there is no folder runs" in none.output) == (2, True)
    best = {"step": 3, "metric": "val_loss", "value": 0.25, "metrics": {}}
    for at, (name, result) in enumerate(
        {
            "first": RunResult("finished", steps=8, world=2, loss=0.5, best=best),
            "study/trial-0001": RunResult("failed", "it broke", steps=1),
        }.items()
    ):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_result(tmp_path / "runs" / name, result)
        os.utime(tmp_path / "runs" / name / "result.json", (at, at))
    (tmp_path / "runs" / "first" / "export").mkdir()
    shown = CliRunner().invoke(app, ["runs"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.index("runs/first") < shown.output.index("runs/study/trial-0001")
    assert "val_loss 0.25, step 3" in shown.output
    listed = json.loads(CliRunner().invoke(app, ["runs", "--json"]).output)["runs"]
    assert [(one["run"], one["status"], one["world"]) for one in listed] == [
        ("runs/first", "finished", 2), ("runs/study/trial-0001", "failed", 1),
    ]  # fmt: skip


def test_a_terminal_shows_each_run_of_a_proof_with_its_time(config: Path, tmp_path: Path) -> None:
    words = ("verify", config, "--worlds", "1,2", "--steps", "2", "--json")
    code, output, shown = on_a_terminal(*words, cwd=tmp_path)
    assert code == 0, shown
    assert json.loads(output)["kept"]
    for line in ("running on 1 rank", "running on 2 ranks"):
        assert re.search(rf"✓[^\n]*{line}[^\n]*0:00:\d\d", shown), shown


def test_a_damaged_run_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"good": "", "bad": "{"}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_result(tmp_path / "runs" / name, RunResult("finished", loss=float("nan")))
        if text:
            (tmp_path / "runs" / name / "result.json").write_text(text)
    listed = CliRunner().invoke(app, ["runs", "--json"])
    assert [(one["run"], one["loss"]) for one in json.loads(listed.stdout)["runs"]] == [("runs/good", None)]
    assert "runs/bad/result.json" in listed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "run", "--follow"], "--follow goes with --log"),
        (["show", "run", "lr=1"], "values are for a config"),
        (["show", "c.yaml", "--verify"], "--verify: this is for a run's directory"),
        (["show", "nowhere"], "there is no run, sweep or config nowhere"),
        (["check", "lr=3"], "values are for a config, and none is given"),
        (["check", "--facts", "c.yaml"], "takes nothing else"),
        (["plot", "run", "--maps", "pca"], "--maps: this goes with --embeddings"),
        (["export", "run", "--to", "pt", "--device", "cuda"], "do nothing with --to pt"),
        (["init", "c2.yaml", "--template", "one-gpu"], "a template is several files"),
        (["verify", "c.yaml", "--via", "srun"], "--via is srun: several world sizes are started by"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    write_result(tmp_path / "run", RunResult("finished"))
    (tmp_path / "task.py").write_text("class Mine: ...")
    (tmp_path / "c.yaml").write_text("task: task.py:Mine\nepochs: 1\nglobal_batch: 8\n")
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, message in done.output) == (2, True), done.output


def test_what_exists_is_a_path_and_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lr=0.1", "sweeps/one", "one"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "lr=0.1" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / "sweeps" / "one" / "sweep.json").write_text("{}")
    drawn = CliRunner().invoke(app, ["plot", "lr=0.1", "--json"])
    assert drawn.exit_code == 0, drawn.output
    write_result(tmp_path / "one", RunResult("finished"))
    shown = CliRunner().invoke(app, ["show", "one", "--json"])
    assert json.loads(shown.stdout)["run"] == "one", "a directory of that name comes before a sweep's name"
