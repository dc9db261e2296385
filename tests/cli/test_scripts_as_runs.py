"""A script that calls samestep.start is a run for train, launch and verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.train.record import RunRecord, read_state
from tests.cli.processes import ROOT, samestep
from tests.distributed.running import losses_of

LOOP = ROOT / "tests" / "distributed" / "own_loop.py"
PLAIN = ROOT / "examples" / "plain_loop.py"
"""It leaves the global batch to its DataLoader."""


def test_launch_starts_a_script_as_ranks_and_overrides_its_config(tmp_path: Path) -> None:
    alone = samestep("train", LOOP, "steps=4", "epochs=null", "--", "alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    done = samestep("launch", LOOP, "steps=4", "epochs=null", "--nproc", "2", "--", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks drive 4+4 lanes; 4 steps" in done.stderr
    assert (tmp_path / "two" / "launch").is_dir(), "the launcher knows the script's run directory"
    assert losses_of(tmp_path / "two") == losses_of(tmp_path / "alone")
    assert len(losses_of(tmp_path / "two")) == 4


def test_a_script_shows_its_plan_before_it_is_launched(tmp_path: Path) -> None:
    shown = samestep("launch", LOOP, "--nproc", "2", "--print", "--", "a b", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "8: 4 for each rank" in shown.stderr
    assert shown.stdout.rstrip().endswith(f"-m samestep train {LOOP} -- 'a b'")
    assert not (tmp_path / "a b").exists(), "nothing was started"
    many = samestep("launch", LOOP, "--nproc", "9", "--", "run", cwd=tmp_path)
    assert many.returncode == 2
    assert "9 ranks but only 8 lanes" in many.stderr


def test_a_failing_rank_of_a_script_is_shown_first(tmp_path: Path) -> None:
    done = samestep("launch", "--nproc", "2", LOOP, "run", "--fail-on", "1", cwd=tmp_path)  # as torchrun takes them
    assert done.returncode == 1
    output = done.stderr[done.stderr.index("samestep: rank 1") :]
    assert "ZeroDivisionError: my own bug" in output
    assert "own_loop.py" in output, "the user's own traceback"


def test_verify_runs_a_script_at_several_sizes_and_resumed(tmp_path: Path) -> None:
    done = samestep("verify", LOOP, "--worlds", "1,2", "--steps", "4", "--resumed", "--json", "--", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    worlds = json.loads(done.stdout)["worlds"]
    assert {label: world["steps"] for label, world in worlds.items()} == {"1": 4, "2": 4, "1→2": 4}
    assert len({world["state_hash"] for world in worlds.values()}) == 1
    record = tmp_path / "run" / "verify" / "world-2" / "record"
    assert RunRecord.read(record).threads == [1, 1]
    assert {"extra0.0.weight", "extra0.1.running_mean"} <= set(read_state(record))


def test_a_script_leaves_the_global_batch_to_its_loader(tmp_path: Path) -> None:
    shown = samestep("launch", PLAIN, "--nproc", "2", "--print", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "8: 4 for each rank" in shown.stderr
    assert "that of the script's DataLoader" in shown.stderr
    done = samestep("verify", PLAIN, "--worlds", "1,2", "--steps", "4", "--resumed", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    worlds = json.loads(done.stdout)["worlds"]
    assert {label: world["steps"] for label, world in worlds.items()} == {"1": 4, "2": 4, "1→2": 4}
    run = tmp_path / "runs" / "plain-loop" / "verify" / "world-2"
    assert json.loads((run / "config.json").read_text())["global_batch"] == 64
    other = samestep("train", PLAIN, "global_batch=32", "epochs=1", "name=other", cwd=tmp_path)
    assert other.returncode == 2, "what is set and what the loader has must be the same"
    assert "batch_size=64, and global_batch is 32" in other.stderr


def test_a_config_to_train_still_needs_a_batch(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("epochs: 1\ntask: task.py:Task\n")
    (tmp_path / "none.yaml").write_text("epochs: 1\n")
    for name, words in (("task.yaml", "set global_batch"), ("none.yaml", "and global_batch")):
        done = samestep("train", name, cwd=tmp_path)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("verb", "text", "code", "message"),
    [
        ("train", "print('nothing')", 2, "without calling samestep.start"),
        ("train", "import samestep\nsamestep.start({'epochz': 1})", 2, "is not a key of this config"),
        ("launch", "import samestep\nsamestep.start({'epochz': 1})", 2, "is not a key of this config"),
        ("train", "1 / 0", 1, "ZeroDivisionError"),
    ],
)
def test_scripts_that_open_no_run(tmp_path: Path, verb: str, text: str, code: int, message: str) -> None:
    (tmp_path / "script.py").write_text(text)
    done = samestep(verb, "script.py", cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
