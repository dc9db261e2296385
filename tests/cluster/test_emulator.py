"""The emulator recipe by `srun python` on one, two and four nodes: one run, with the messages of its guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from samestep.words import counted
from tests.cluster.runs import ROOT, Training, is_same
from tests.cluster.slurm import Slurm
from tests.recipes.emulator.small import COMMON, CONFIG, RECIPE, SIZES, script


@pytest.mark.requirement("002-B-4", "002-T-5", "002-X-2b", "002-T-2", "002-T-3", "002-M2-4")
def test_srun_python_on_one_two_and_four_nodes_is_one_run(slurm: Slurm, tmp_path: Path) -> None:
    made = script("fields.py", "data", *SIZES, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    training = Training.write(tmp_path)
    records = []
    for nodes in (1, 2, 4):
        # By their names: a node may still be busy with the end of the last job.
        folder = tmp_path / f"on-{nodes}"
        done = slurm.run(
            ["srun", f"--nodes={nodes}", f"--nodelist=n[1-{nodes}]", f"--ntasks={nodes}", "--cpus-per-task=2", training.python,
             RECIPE / "scripts" / "train.py", "--config", CONFIG, *COMMON, "distributed.threads_per_rank=2",
             f"run_dir={folder}", "--record", folder / "record"],
            env={**training.environment, "MASTER_PORT": "29517"}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        records.append(RunRecord.read(folder / "record"))
        assert [path.name for path in folder.rglob("best_model*")] == ["best_model.pt"]
        if nodes > 1:
            said = done.stdout + done.stderr
            assert f"Distributed training initialized: gloo backend, {nodes} processes" in said
            assert f"on {counted(nodes, 'machine')}, {2 * nodes} threads in all" in said
            assert "[Rank 0] Master: n1:29517" in said, said
            assert "[Rank 1] local rank 0 on cpu of n2, 2 threads" in said
    assert all(is_same(record, records[0]) for record in records)


@pytest.mark.requirement("004-5.3-2")
@pytest.mark.parametrize(
    ("script_name", "words", "shown"),
    [
        ("diagnose.sh", (str(CONFIG),), ("Nodes: n[1-2]", "all-reduce", "same config")),
        ("test_distributed.sh", (), ("clocks", "The ranks of 2 nodes can train together")),
    ],
)
def test_a_script_tests_the_nodes(
    slurm: Slurm, tmp_path: Path, script_name: str, words: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    environment = {**Training.write(tmp_path).environment, "LARGEST": "64KB", "ROUNDS": "3"}
    script = ROOT / "hpc" / script_name
    _, output = slurm.run_script(tmp_path, "--cpus-per-task=1", script, *words, **environment)
    assert all(text in output for text in shown), output
