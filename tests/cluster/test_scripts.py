"""The scripts of hpc/ by a real sbatch, made smaller by its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.runs import ROOT, Training, is_same
from tests.cluster.slurm import Slurm


@pytest.mark.requirement(
    "002-M1-2",
    "002-M2-1",
    "002-M2-2",
    "002-M2-3",
    "002-M3-3",
    "002-T-1",
    "002-T-6",
    "002-C-2",
    "004-SL-1",
    "004-3.1-4",
    "002-C-3",
)
@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("train.sh", ["--cpus-per-task=2"], "One process on cpu"),
        ("train_distributed.sh", ["--cpus-per-task=1"], "2 processes on 2 machines, 2 threads"),
        ("train_distributed_multinode.sh", ["--cpus-per-task=1"], "4 processes on 4 machines"),
        ("train_distributed_gpu.sh",
         ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"],
         "2 processes on 2 machines"),
        ("train_mpirun.sh", ["--ntasks-per-node=1", "--gpus-per-node=1"],
         "2 processes on 2 machines"),
    ],
)  # fmt: skip
@pytest.mark.needs("mpirun")
def test_a_script_trains_the_same_run(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord, script: str, options: list[str], shown: str
) -> None:
    training = Training.write(tmp_path)
    run = tmp_path / "run"
    words = (ROOT / "hpc" / script, tmp_path / "config.yaml", f"run_dir={run}", "--record", run / "record")
    state, output = slurm.run_script(tmp_path, *options, *words, **training.environment)
    assert state == "COMPLETED", output
    assert shown in output
    assert is_same(training.record("run"), untouched)


def test_a_script_without_a_config_prints_its_usage(slurm: Slurm, tmp_path: Path) -> None:
    state, output = slurm.run_script(tmp_path, "--cpus-per-task=1", ROOT / "hpc" / "train.sh")
    assert state == "FAILED"
    assert "usage: sbatch hpc/train.sh CONFIG" in output
